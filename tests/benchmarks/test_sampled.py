"""TFB: as much noise of lora_A as changes few classes."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader

from benchmarks.methods import sampled
from benchmarks.methods.sampled import noise_basis, training_free
from benchmarks.models import AdaptedModel
from tests.benchmarks.support import predicted
from tests.support.models import lora_model, ragged_batches


def test_tfb_takes_the_most_noise_that_changes_few_classes(monkeypatch):
    monkeypatch.setattr(sampled, "MOST_CHANGED", 0.2)
    model = AdaptedModel(lora_model("bert", hidden_size=32).eval())
    batches = ragged_batches(12 * (7, 4, 5, 7, 3, 6, 2, 7), batch_size=96)
    texts = DataLoader(batches, batch_size=None)
    noisy = predicted(training_free(model, texts), texts)
    p = model.logits(texts).softmax(-1)
    share_changed = (noisy.argmax(-1) != p.argmax(-1)).double().mean()
    # A search by halves comes near the most from below.
    assert 0.14 < share_changed <= 0.2
    assert (noisy - p).abs().mean() > 0.003


@pytest.mark.parametrize(
    ("shape", "rank"), [((7, 3), 3), ((2, 3), 2), ((7, 3), 1), ((7, 3), 0)]
)
def test_noise_of_tfb_is_isotropic_in_what_lora_b_reads(shape, rank):
    torch.manual_seed(0)
    m, n = shape
    B = torch.randn(m, rank) @ torch.randn(rank, n)
    effect = B @ noise_basis(B)
    # The covariance of lora_B times the noise of lora_A projects onto its columns.
    assert_close(effect @ effect.mT, B @ torch.linalg.pinv(B), rtol=0, atol=1e-5)

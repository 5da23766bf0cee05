"""TFB: as much noise of lora_A as changes few classes."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import DataLoader

from benchmarks.methods import sampled
from benchmarks.methods.sampled import noise_basis, training_free
from benchmarks.models import AdaptedModel
from tests.benchmarks.support import assert_same, copied, predicted, probabilities_of
from tests.support.models import lora_model, ragged_batches


def test_tfb_takes_the_most_noise_that_changes_few_classes(monkeypatch):
    monkeypatch.setattr(sampled, "MOST_CHANGED", 0.2)
    model = AdaptedModel(lora_model("bert", hidden_size=32).eval())
    batches = ragged_batches(12 * (7, 4, 5, 7, 3, 6, 2, 7), batch_size=24)
    texts = DataLoader(batches, batch_size=None)
    before = copied(model.model)
    noisy = predicted(training_free(model, texts), texts)
    assert_same(model.model, before)
    p = probabilities_of(model, texts)
    share_changed = (noisy.argmax(-1) != p.argmax(-1)).double().mean()
    # A search by halves comes near the most from below.
    assert 0.14 < share_changed <= 0.2
    assert (noisy - p).abs().mean() > 0.003


def effect_of_noise(B: Tensor) -> Tensor:
    """Return the covariance of lora_B times the noise of lora_A."""
    effect = B @ noise_basis(B)
    return effect @ effect.mT


@pytest.mark.parametrize("shape", [(7, 3), (2, 3)])
def test_noise_of_tfb_is_isotropic_in_the_columns_of_lora_b(shape):
    torch.manual_seed(0)
    B = torch.randn(shape).double() * torch.tensor([5.0, 1.0, 0.1])
    U, _, _ = torch.linalg.svd(B, full_matrices=False)
    assert_close(effect_of_noise(B), U @ U.mT)


def test_noise_of_tfb_has_no_direction_that_lora_b_does_not_read():
    assert noise_basis(torch.zeros(7, 3)).count_nonzero() == 0
    torch.manual_seed(0)
    column = torch.randn(7, 1)
    direction = column / column.norm()
    of_rank_1 = column @ torch.randn(1, 3)
    assert_close(effect_of_noise(of_rank_1), direction @ direction.mT)

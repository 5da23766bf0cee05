"""The host's structures over LoRA weights."""

import torch
from torch import Tensor
from torch.testing import assert_close

from tests.support.matrices import PARTS
from tests.support.models import OfBatches, lora_model, plain_model, ragged_batches
from tests.support.posteriors import fitted, make, normal, stock

EXACT = {"rtol": 1e-6, "atol": 1e-9}


def test_kron_is_the_stock_class_over_the_same_weights(batch):
    ours = fitted(structure="kron", modules_to_save=True)
    theirs = stock(lora_model("bert"), ragged_batches(), PARTS)
    # The host's are of other dtypes in part.
    found, expected = figures_of(ours, batch), figures_of(theirs, batch)
    assert_close(found, expected, check_dtype=False, **EXACT)


def figures_of(la, batch) -> dict[str, Tensor]:
    """Compute what a user sees of a posterior."""
    return {
        "evidence": la.log_marginal_likelihood(),
        "prediction": la(batch),
        # Not at the mean, where it is 0.
        "square norm": la.square_norm(la.mean + 1),
    }


class Reranker(OfBatches):
    """Gives each example a logit of each of three rows, under a key of its own."""

    def forward(self, batch) -> Tensor:
        return self.model(batch["rows"]).reshape(-1, 3)


def test_kron_needs_nothing_but_labels_to_count_examples():
    batch = {"rows": normal(12, 5), "labels": torch.tensor([0, 2, 1, 1])}
    model = Reranker(plain_model(1))
    ours = make(model, "kron")
    ours.fit([batch])
    theirs = stock(model, [batch], dict_key_x="labels")
    assert_close(figures_of(ours, batch), figures_of(theirs, batch), **EXACT)

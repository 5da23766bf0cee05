"""Reward models: pairs of texts in, a reward each out."""

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.testing import assert_close

from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import generator, make

TEXT_KEYS = ("input_ids", "attention_mask")
N_PAIRS = 5
PRIOR_PRECISION = 0.5

Batch = dict[str, Tensor]


def preferences() -> Batch:
    """Make pairs `(B, 2, T)` with the index of the text that is preferred."""
    lengths = (7, 4, 5, 7, 3, 6, 2, 7, 5, 5)
    (texts,) = ragged_batches(lengths, batch_size=len(lengths))
    shape = (N_PAIRS, 2)
    pairs = {key: texts[key].unflatten(0, shape) for key in TEXT_KEYS}
    return pairs | {"labels": torch.tensor([0, 1, 1, 0, 0])}


def first_texts() -> Batch:
    """Make the first text of each pair."""
    pairs = preferences()
    return {key: pairs[key][:, 0] for key in TEXT_KEYS}


def reward_model() -> PeftModel:
    """Make a classifier with one output."""
    return lora_model("bert", n_labels=1)


class Wrapped(nn.Module):
    """What a user writes for the host: it takes pairs apart by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = reward_model()

    def forward(self, batch: Batch) -> Tensor:
        texts = {key: batch[key].flatten(0, -2) for key in TEXT_KEYS}
        rewards = self.inner(**texts).logits
        n_examples = len(batch["input_ids"])
        return rewards.reshape(n_examples, -1)


def fit(model: nn.Module, structure: str = "lowrank_kron"):
    la = make(model, structure, "reward_modeling", prior_precision=PRIOR_PRECISION)
    la.fit([preferences()])
    return la


# --- rewards --------------------------------------------------------------------------


def test_a_classifier_is_treated_as_a_wrapper_that_takes_pairs():
    model = reward_model()
    plain, wrapped = fit(model, "kron"), fit(Wrapped(), "kron")
    assert_close(plain.loss, wrapped.loss)
    assert_close(plain.log_marginal_likelihood(), wrapped.log_marginal_likelihood())
    # Of one text, its reward; of a pair, which is preferred.
    first = first_texts()
    mean, variance = plain(first)
    assert_close((mean, variance), wrapped(first))
    pairs = preferences()
    assert_close(plain(pairs, fitting=True), wrapped(pairs, fitting=True))
    # Rewards have the model's mean, and samples have no noise.
    assert_close(mean, model.eval()(**first).logits.detach())
    assert variance.shape == (N_PAIRS, 1, 1)
    samples = plain.predictive_samples(first, n_samples=4000, generator=generator())
    assert_close(samples.mean(0), mean, atol=0.2, rtol=0.1)
    # Of 4000 draws, a variance has a standard error of 2.2%.
    assert_close(samples.var(0), variance.squeeze(-1), atol=0, rtol=0.1)


# --- batches of TRL -------------------------------------------------------------------


def stacked() -> Batch:
    """Make the same as TRL's collator does: all preferred texts, then all others."""
    pairs = preferences()
    batch = {}
    for key in TEXT_KEYS:
        preferred, others = pairs[key].unbind(1)
        batch[key] = torch.cat([preferred, others])
    return batch


@pytest.mark.parametrize("labels", [{}, {"labels": None}])
def test_trls_batches_are_taken_as_they_come(labels):
    la = make(reward_model(), likelihood="reward_modeling")
    first_preferred = {"labels": torch.zeros(N_PAIRS, dtype=torch.long)}
    la.fit([preferences() | first_preferred])
    expected = la.log_marginal_likelihood()
    batch = stacked() | labels
    la.fit([batch])
    assert la.n_data == N_PAIRS
    found = la.log_marginal_likelihood()
    assert torch.equal(found, expected)


def test_margins_are_warned_of():
    la = fit(reward_model())
    batch = stacked()
    batch["margin"] = torch.ones(N_PAIRS)
    with pytest.warns(UserWarning, match="has no margin"):
        la.fit([batch])


def test_what_makes_no_pairs_of_rewards_is_refused():
    with pytest.raises(ValueError, match="no pairs"):
        fit(reward_model()).fit([{"input_ids": torch.ones(3, 2)}])
    with pytest.raises(ValueError, match="num_labels=1"):
        fit(lora_model("bert"))

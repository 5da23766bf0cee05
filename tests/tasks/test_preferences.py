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
    pairs = {}
    for key in TEXT_KEYS:
        pairs[key] = texts[key].unflatten(0, shape)
    pairs["labels"] = torch.tensor([0, 1, 1, 0, 0])
    return pairs


def first_texts() -> Batch:
    """Make the first text of each pair."""
    pairs = preferences()
    first = {}
    for key in TEXT_KEYS:
        first[key] = pairs[key][:, 0]
    return first


def reward_model() -> PeftModel:
    """Make a classifier with one output."""
    return lora_model("bert", n_labels=1)


class Wrapped(nn.Module):
    """What a user writes for the host: it takes pairs apart by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = reward_model()

    def forward(self, batch: Batch) -> Tensor:
        texts = {}
        for key in TEXT_KEYS:
            texts[key] = batch[key].flatten(0, -2)
        rewards = self.inner(**texts).logits
        n_examples = len(batch["input_ids"])
        return rewards.reshape(n_examples, -1)


def fit(model: nn.Module, structure: str = "lowrank_kron"):
    la = make(model, structure, "reward_modeling", prior_precision=PRIOR_PRECISION)
    la.fit([preferences()])
    return la


# --- rewards --------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["lowrank_kron", "kron"])
def test_a_classifier_is_treated_as_a_wrapper_that_takes_pairs(structure):
    plain, wrapped = fit(reward_model(), structure), fit(Wrapped(), structure)
    assert_close(plain.loss, wrapped.loss)
    assert_close(plain.log_marginal_likelihood(), wrapped.log_marginal_likelihood())
    # Of one text, its reward; of a pair, which is preferred.
    assert_close(plain(first_texts()), wrapped(first_texts()))
    pairs = preferences()
    assert_close(plain(pairs, fitting=True), wrapped(pairs, fitting=True))


def test_rewards_have_the_models_mean_and_samples_without_noise():
    model = reward_model()
    la = fit(model)
    first = first_texts()
    mean, variance = la(first)
    model.eval()
    assert_close(mean, model(**first).logits.detach())
    assert variance.shape == (N_PAIRS, 1, 1)
    samples = la.predictive_samples(first, n_samples=4000, generator=generator())
    assert_close(samples.mean(0), mean, atol=0.2, rtol=0.1)
    # Of 4000 draws, a variance has a standard error of 2.2%.
    assert_close(samples.var(0), variance.squeeze(-1), atol=0, rtol=0.1)


# --- batches of TRL -------------------------------------------------------------------


def first_preferred() -> Batch:
    """Make pairs of which the first text is preferred."""
    pairs = preferences()
    pairs["labels"] = torch.zeros(N_PAIRS, dtype=torch.long)
    return pairs


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
    la.fit([first_preferred()])
    expected = la.log_marginal_likelihood()
    batch = stacked() | labels
    la.fit([batch])
    assert la.n_data == N_PAIRS
    found = la.log_marginal_likelihood()
    assert torch.equal(found, expected)


def test_a_guess_prefers_either_text_half_of_the_time():
    with pytest.warns(UserWarning, match=r"would be 0\.6931 without"):
        fit(reward_model())


def test_margins_are_warned_of():
    la = fit(reward_model())
    batch = stacked()
    batch["margin"] = torch.ones(N_PAIRS)
    with pytest.warns(UserWarning, match="has no margin"):
        la.fit([batch])

"""Reward models: pairs of texts in, a reward each out."""

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.testing import assert_close

from tests.support.models import Batch, OfBatches, lora_model
from tests.support.posteriors import generator, make
from tests.support.tasks import preferences

TEXT_KEYS = ("input_ids", "attention_mask")
# Pairs `(B, 2, T)` with the index of the text that is preferred.
(PAIRS,) = preferences()
N_PAIRS = len(PAIRS["labels"])


def reward_model() -> PeftModel:
    """Make a classifier with one output."""
    return lora_model("bert", n_labels=1)


def fit(model: nn.Module):
    la = make(model, likelihood="reward_modeling", prior_precision=0.5)
    la.fit([PAIRS])
    return la


# --- rewards --------------------------------------------------------------------------


class OfPairs(OfBatches):
    """A classifier of pairs: its logits are the rewards of both texts."""

    def forward(self, batch: Batch) -> Tensor:
        texts = {key: batch[key].flatten(0, 1) for key in TEXT_KEYS}
        return super().forward(texts).reshape(len(batch["input_ids"]), 2)


def test_the_hosts_kron_is_that_of_a_classifier_of_pairs():
    of_rewards = make(reward_model(), "kron", "reward_modeling")
    of_pairs = make(OfPairs(reward_model()), "kron")
    for la in (of_rewards, of_pairs):
        la.fit([PAIRS])
    assert_close(of_rewards.loss, of_pairs.loss)
    assert_close(of_rewards.H.to_matrix(), of_pairs.H.to_matrix())


def test_a_text_has_one_of_its_pairs_rewards_and_samples_have_no_noise():
    model = reward_model()
    la = fit(model)
    first = {key: PAIRS[key][:, 0] for key in TEXT_KEYS}
    mean, variance = la(first)
    assert_close(mean, model.eval()(**first).logits.detach())
    # The contract suite proves those of pairs.
    assert_close(variance, la.predictive_moments(PAIRS).f_var[:, :1, :1])
    samples = la.predictive_samples(first, n_samples=4000, generator=generator())
    assert_close(samples.mean(0), mean, atol=0.2, rtol=0.1)
    # Of 4000 draws, a variance has a standard error of 2.2%.
    assert_close(samples.var(0), variance.squeeze(-1), atol=0, rtol=0.1)
    prediction = la.predict(first)
    assert_close(prediction.epistemic_std, variance.squeeze(-1).sqrt())
    assert torch.equal(prediction.total_std, prediction.epistemic_std)
    # It has one also where weights don't vary, though a pair has two outputs.
    la.prior_precision = 1e12
    assert la.predictive_moments(first).f_var.shape == variance.shape


# --- batches of TRL -------------------------------------------------------------------


def stacked() -> Batch:
    """Make the same as TRL's collator does: all preferred texts, then all others."""
    return {key: torch.cat(PAIRS[key].unbind(1)) for key in TEXT_KEYS}


def test_trls_batches_are_taken_as_they_come():
    la = make(reward_model(), likelihood="reward_modeling")
    first_preferred = {"labels": torch.zeros(N_PAIRS, dtype=torch.long)}
    la.fit([PAIRS | first_preferred])
    expected = la.log_marginal_likelihood()
    for labels in ({}, {"labels": None}):
        la.fit([stacked() | labels])
        assert la.n_data == N_PAIRS
        assert torch.equal(la.log_marginal_likelihood(), expected)


def test_texts_that_are_predicted_are_no_pairs():
    la = fit(reward_model())
    texts = stacked()
    rewards, _ = la(texts)
    assert rewards.shape == (2 * N_PAIRS, 1)
    assert_close(la.predict([texts]).mean, rewards)
    assert la.function(seed=0)(texts).shape == rewards.shape


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

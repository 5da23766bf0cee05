"""Reward models: pairs of texts in, a reward each out."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.support.dense import (
    EXACT,
    exact_ggn,
    gradient_curvature,
    jacobians,
    softmax_fisher,
)
from tests.support.heads import dense_of
from tests.support.models import OfMapping, lora_model, ragged_batches
from tests.support.posteriors import STRUCTURES, generator, make

TEXT_KEYS = ("input_ids", "attention_mask")


N_PAIRS = 5


def preferences() -> dict[str, torch.Tensor]:
    """Make pairs `(B, 2, T)` with the index of the text that is preferred."""
    lengths = (7, 4, 5, 7, 3, 6, 2, 7, 5, 5)
    (texts,) = ragged_batches(lengths, batch_size=len(lengths))
    pairs = {key: texts[key].unflatten(0, (N_PAIRS, 2)) for key in TEXT_KEYS}
    return pairs | {"labels": torch.tensor([0, 1, 1, 0, 0])}


def first_texts() -> dict[str, torch.Tensor]:
    """Make the first text of each pair."""
    pairs = preferences()
    return {key: pairs[key][:, 0] for key in TEXT_KEYS}


class Wrapped(nn.Module):
    """What a user writes for the host: it takes pairs apart by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = lora_model("bert", n_labels=1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        texts = {key: batch[key].flatten(0, -2) for key in TEXT_KEYS}
        rewards = self.inner(**texts).logits
        n_examples = len(batch["input_ids"])
        return rewards.reshape(n_examples, -1)


def fit(
    model: nn.Module,
    structure: str = "lowrank_kron",
    modules_to_save: bool = False,
):
    la = make(
        model,
        structure,
        likelihood="reward_modeling",
        prior_precision=0.5,
        modules_to_save=modules_to_save,
    )
    la.fit([preferences()])
    return la


@pytest.mark.parametrize("modules_to_save", [False, True])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_classifier_is_treated_as_a_wrapper_that_takes_pairs(
    structure, modules_to_save
):
    plain = fit(lora_model("bert", n_labels=1), structure, modules_to_save)
    wrapped = fit(Wrapped(), structure, modules_to_save)
    first = first_texts()
    pairs = preferences()
    assert_close(plain.loss, wrapped.loss)
    assert_close(plain.log_marginal_likelihood(), wrapped.log_marginal_likelihood())
    assert_close(plain(first), wrapped(first))
    assert_close(plain(pairs, fitting=True), wrapped(pairs, fitting=True))


def test_rewards_are_those_of_the_model():
    model = lora_model("bert", n_labels=1)
    la = fit(model)
    first = first_texts()
    mean, variance = la(first)
    assert_close(mean, model.eval()(**first).logits.detach())
    assert variance.shape == (N_PAIRS, 1, 1)
    assert (variance > 0).all()
    for draw in (la.functional_samples, la.predictive_samples):
        samples = draw(first, n_samples=4000, generator=generator())
        assert_close(samples.mean(0), mean, atol=0.2, rtol=0.1)
        # Of 4000 draws, a variance has a standard error of 2.2%.
        assert_close(samples.var(0), variance.squeeze(-1), atol=0, rtol=0.1)


def test_rewards_have_the_curvature_of_preferences():
    model = OfMapping(Wrapped()).eval()
    pairs = preferences()
    la = make(model, likelihood="reward_modeling", backend_kwargs={"rank": 100})
    la.fit([pairs])
    preferred = pairs.pop("labels")
    rewards = model(pairs).detach()
    loss = nn.functional.cross_entropy(rewards, preferred, reduction="sum")
    assert_close(la.loss, loss, **EXACT)
    Js = jacobians(model, pairs)
    H = gradient_curvature(model, Js, softmax_fisher(rewards))
    assert_close(la.H.to_matrix(), H, **EXACT)


def test_a_head_has_the_curvature_of_preferences():
    model = lora_model("bert", n_labels=1).eval()
    la = fit(model, "full", modules_to_save=True)
    pairs = preferences()
    texts = []
    for pair in range(N_PAIRS):
        for place in range(2):
            texts.append({key: pairs[key][pair, place][None] for key in TEXT_KEYS})
    rewards, Js = dense_of(model, texts)
    of_pairs = Js.reshape(N_PAIRS, 2, -1)
    H = exact_ggn(of_pairs, softmax_fisher(rewards.reshape(N_PAIRS, 2)))
    assert_close(la.H, H, **EXACT)
    # Which text is preferred says nothing of the reward that all texts have in common.
    bias = la.blocks[-1]
    assert bias.parameter == "bias"
    assert la.H[-1].abs().max() < 1e-12

    precision = H + 0.5 * torch.eye(len(H)).double()
    of_first = Js[::2]
    expected = of_first @ torch.linalg.solve(precision, of_first.mT)
    _, f_var = la(first_texts())
    assert_close(f_var, expected, **EXACT)


# --- batches of TRL -------------------------------------------------------------------


def first_preferred() -> dict[str, torch.Tensor]:
    """Make pairs of which the first text is preferred."""
    first = torch.zeros(N_PAIRS, dtype=torch.long)
    return preferences() | {"labels": first}


def stacked() -> dict[str, torch.Tensor]:
    """Make the same as TRL's collator does: all preferred texts, then all others."""
    pairs = preferences()
    batch = {}
    for key in TEXT_KEYS:
        preferred, others = pairs[key].unbind(1)
        batch[key] = torch.cat([preferred, others])
    return batch


def test_trls_batches_are_taken_as_they_come():
    la = make(lora_model("bert", n_labels=1), likelihood="reward_modeling")
    la.fit([first_preferred()])
    evidence = la.log_marginal_likelihood()
    for batch in (stacked(), stacked() | {"labels": None}):
        la.fit([batch])
        assert la.n_data == 5
        assert torch.equal(la.log_marginal_likelihood(), evidence)


@pytest.mark.parametrize(
    ("method", "data"),
    [("agreement", "train_loader"), ("gridsearch", "val_loader")],
)
def test_trls_batches_choose_the_prior_as_pairs_do(method, data):
    la = fit(lora_model("bert", n_labels=1))

    def objective(batch):
        loader = {data: [batch]}
        return la.optimize_prior_precision(method=method, **loader).objective

    expected = objective(first_preferred())
    assert_close(objective(stacked()), expected)


def test_margins_are_warned_of():
    la = fit(lora_model("bert", n_labels=1))
    with pytest.warns(UserWarning, match="has no margin"):
        la.fit([stacked() | {"margin": torch.ones(5)}])

"""Reward models: pairs of texts in, a reward each out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.dense import gradient_curvature, jacobians, softmax_fisher
from tests.support.models import TwoLinear, lora_model, ragged_batches, with_lora
from tests.support.posteriors import KFAC_APPROX, STRUCTURES, make


def preferences():
    """Pairs `(B, 2, T)` with the index of the text that is preferred."""
    (batch,) = ragged_batches(lengths=(7, 4, 5, 7, 3, 6, 2, 7, 5, 5), batch_size=10)
    pairs = {key: batch[key].unflatten(0, (5, 2)) for key in ("input_ids", "attention_mask")}
    return {**pairs, "labels": torch.tensor([0, 1, 1, 0, 0])}


class Wrapped(nn.Module):
    """What a user writes for the host: it takes pairs apart by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = lora_model("bert", n_labels=1)

    def forward(self, batch):
        ids, mask = batch["input_ids"], batch["attention_mask"]
        flat = {"input_ids": ids.flatten(0, -2), "attention_mask": mask.flatten(0, -2)}
        return self.inner(**flat).logits.reshape(len(ids), -1)


def fit(model, structure="lowrank_kron"):
    la = make(model, structure, likelihood="reward_modeling", prior_precision=0.5)
    la.fit([preferences()])
    return la


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_classifier_is_treated_as_a_wrapper_that_takes_pairs(structure):
    pairs = preferences()
    first = {key: pairs[key][:, 0] for key in ("input_ids", "attention_mask")}
    plain, wrapped = fit(lora_model("bert", n_labels=1), structure), fit(Wrapped(), structure)
    torch.testing.assert_close(plain.loss, wrapped.loss)
    torch.testing.assert_close(plain.log_marginal_likelihood(), wrapped.log_marginal_likelihood())
    torch.testing.assert_close(plain(first), wrapped(first))
    torch.testing.assert_close(plain(pairs, fitting=True), wrapped(pairs, fitting=True))


def test_rewards_are_those_of_the_model():
    model = lora_model("bert", n_labels=1)
    la, pairs = fit(model), preferences()
    first = {key: pairs[key][:, 0] for key in ("input_ids", "attention_mask")}
    mean, variance = la(first)
    torch.testing.assert_close(mean, model.eval()(**first).logits.detach())
    assert variance.shape == (5, 1, 1)
    assert (variance > 0).all()
    for draw in (la.functional_samples, la.predictive_samples):
        samples = draw(first, n_samples=4000, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(samples.mean(0), mean, atol=0.2, rtol=0.1)
        torch.testing.assert_close(samples.var(0), variance[..., 0], atol=0, rtol=0.1)


@pytest.mark.parametrize("method", ["agreement", "marglik", "gridsearch", "val_gd"])
def test_the_prior_precision_is_tuned_on_preferences(method):
    la = fit(lora_model("bert", n_labels=1))
    data = {} if method == "marglik" else {"val_loader": [preferences()]}
    if method == "agreement":
        data = {"train_loader": [preferences()]}
    steps = {} if method in ("agreement", "gridsearch") else {"n_steps": 200}
    history = la.optimize_prior_precision(method=method, **data, **steps)
    assert torch.isfinite(history.objective).all()
    assert la.prior_precision.item() != 0.5


def test_a_classifier_of_two_classes_is_no_reward_model():
    la = make(lora_model("bert", n_labels=2), likelihood="reward_modeling")
    with pytest.raises(ValueError, match="num_labels=1"):
        la.fit([preferences()])


EXACT = {"rtol": 1e-9, "atol": 1e-12}


class Rewards(nn.Module):
    """As in the host's example: `(B, 2, d)` pairs to `(B, 2)`, and `(B, d)` to `(B, 1)`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TwoLinear(n_outputs=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.flatten(0, -2)).reshape(len(x), -1)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_rewards_are_fitted_on_preferences_and_predicted_one_by_one(structure):
    model = with_lora(Rewards(), "first", "second")
    generator = torch.Generator().manual_seed(1)
    pairs = torch.randn(6, 2, 5, generator=generator).double()
    preferred = torch.arange(6) % 2
    la = make(model, structure, "reward_modeling")
    la.fit([(pairs[:4], preferred[:4]), (pairs[4:], preferred[4:])])
    expected = nn.functional.cross_entropy(model(pairs), preferred, reduction="sum").detach()
    torch.testing.assert_close(la.loss, expected, **EXACT)
    f_mu, f_var = la(pairs[:, 0])
    assert f_mu.shape == (6, 1)
    assert f_var.shape == (6, 1, 1)
    torch.testing.assert_close(f_mu, model(pairs[:, 0]).detach(), **EXACT)
    probabilities = la(pairs, fitting=True)
    assert probabilities.shape == (6, 2)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(6).double())


def test_rewards_have_the_curvature_of_preferences():
    model = with_lora(Rewards(), "first", "second")
    pairs = torch.randn(6, 2, 5, generator=torch.Generator().manual_seed(1)).double()
    la = make(model, likelihood="reward_modeling")
    la.fit([(pairs, torch.arange(6) % 2)])
    Js, H = jacobians(model, pairs), softmax_fisher(model(pairs).detach())
    torch.testing.assert_close(la.H.to_matrix(), gradient_curvature(model, Js, H), **EXACT)


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_rewards_of_a_padded_transformer_do_not_count_padding(kfac_approx):
    matrices = []
    for padded_to in (7, 11):
        (batch,) = ragged_batches(batch_size=8, padded_to=padded_to)
        pairs = {key: batch[key].unflatten(0, (4, 2)) for key in ("input_ids", "attention_mask")}
        la = make(
            Wrapped(),
            likelihood="reward_modeling",
            backend_kwargs={"kfac_approx": kfac_approx},
        )
        la.fit([{**pairs, "labels": torch.tensor([0, 1, 1, 0])}])
        matrices.append(la.H.to_matrix())
        assert la({k: v[:, 0] for k, v in pairs.items()})[0].shape == (4, 1)
    torch.testing.assert_close(*matrices, rtol=1e-7, atol=1e-12)


def apart(pattern: str) -> dict[str, torch.Tensor]:
    """The first preferences as TRL's older collators make them, of different lengths."""
    pairs = ordered()
    batch = {}
    for name, place, length in (("chosen", 0, 7), ("rejected", 1, 6)):
        for key in ("input_ids", "attention_mask"):
            batch[pattern.format(key=key, name=name)] = pairs[key][:, place, :length]
    return batch


def ordered() -> dict[str, torch.Tensor]:
    """Preferences for the first text, the second of which has at most six tokens."""
    pairs = preferences()
    pairs["input_ids"][:, 1, 6], pairs["attention_mask"][:, 1, 6] = 0, 0
    return pairs | {"labels": torch.zeros(5, dtype=torch.long)}


def stacked() -> dict[str, torch.Tensor]:
    """The same as TRL's newer collator makes them."""
    pairs = ordered()
    return {
        key: pairs[key].transpose(0, 1).flatten(0, 1) for key in ("input_ids", "attention_mask")
    }


TRL_BATCHES = {
    "stacked": stacked,
    "word last": lambda: apart("{key}_{name}"),
    "word first": lambda: apart("{name}_{key}"),
}


@pytest.mark.parametrize("kind", TRL_BATCHES)
def test_trls_batches_are_taken_as_they_come(kind):
    la = make(lora_model("bert", n_labels=1), likelihood="reward_modeling")
    la.fit([ordered()])
    evidence = la.log_marginal_likelihood()
    batch = TRL_BATCHES[kind]()
    la.fit([batch])
    assert la.n_data == 5
    assert torch.equal(la.log_marginal_likelihood(), evidence)
    for method, data in (("agreement", "train_loader"), ("gridsearch", "val_loader")):
        expected = la.optimize_prior_precision(method=method, **{data: [ordered()]})
        found = la.optimize_prior_precision(method=method, **{data: [batch]})
        torch.testing.assert_close(found.objective, expected.objective)
    if kind != "stacked":
        torch.testing.assert_close(la(batch, fitting=True), la(ordered(), fitting=True))


def test_batches_without_labels_that_are_no_pairs_are_refused():
    la = make(lora_model("bert", n_labels=1), likelihood="reward_modeling")
    odd = {key: value[:5] for key, value in stacked().items()}
    for batch in (odd, {k: v for k, v in ordered().items() if k != "labels"}):
        with pytest.raises(ValueError, match=r"No labels 'labels'.*as many chosen as rejected"):
            la.fit([batch])


def test_texts_of_different_lengths_need_a_padding_token():
    model = lora_model("bert", n_labels=1)
    model.config.pad_token_id = None
    with pytest.raises(ValueError, match=r"differ in length, and .* no pad_token_id: set it"):
        make(model, likelihood="reward_modeling").fit([apart("{key}_{name}")])


def test_margins_are_warned_of():
    la = make(lora_model("bert", n_labels=1), likelihood="reward_modeling")
    with pytest.warns(UserWarning, match="has no margin"):
        la.fit([stacked() | {"margin": torch.ones(5)}])

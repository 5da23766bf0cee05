"""Predictions from one forward pass, against exact ones."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from laplace_lora_ext import from_pretrained
from tests.support.models import lora_model, plain_model, ragged_batches, with_lora
from tests.support.posteriors import (
    STRUCTURES,
    count_forward_passes,
    fitted,
    generator,
    make,
    plain_regression,
    some_precision,
)
from tests.support.snapshots import Snapshot, half_trained
from tests.support.texts import fitted_text

LINKS = ["mean_field", "probit", "mc", "bridge"]
AMORTIZED = {"pred_type": "amortized"}


class Exponential(nn.Module):
    """The logits' variances are proportional to exp(2 x_0), which the output layer reads."""

    def __init__(self, n_outputs: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.head = nn.Linear(9, n_outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = x[:, :1].exp() * self.layer(torch.ones_like(x))
        return self.head(torch.cat([x, z], dim=1))


def inputs(n: int, seed: int, spread: float = 1.0) -> torch.Tensor:
    return spread * (2 * torch.rand(n, 5, generator=generator(seed)).double() - 1)


def exponential(structure: str = "lowrank_kron", likelihood: str = "classification", **keywords):
    """A posterior that has learnt its variances."""
    model = with_lora(Exponential(), "layer")
    la = make(model, structure, likelihood, **keywords)
    y = torch.arange(40) % 3
    targets = torch.nn.functional.one_hot(y).double() if likelihood == "regression" else y
    la.fit([(inputs(40, 1), targets)])
    la.amortize([inputs(40, 2), inputs(40, 3)])
    return la


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("link", LINKS)
def test_variances_that_are_linear_in_the_features_predict_exactly(structure, link):
    la, X = exponential(structure), inputs(20, 4, spread=0.9)
    assert la.learnt_variance.r_squared > 1 - 1e-8
    how = {"link_approx": link, "generator": generator()}
    found = la(X, **AMORTIZED, **how)
    exact = la(la.predictive_moments(X), **(how | {"generator": generator()}))
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    assert (exact - la.model(X).softmax(-1)).abs().max() > 0.01
    if link != "bridge":
        decision = la.predict(X, link, generator=generator(), **AMORTIZED)
        expected = la.predict(X, link, generator=generator())
        for one, other in zip(decision, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
        proba = torch.from_numpy(la.predict_proba(X, link, **AMORTIZED))
        expected = torch.from_numpy(la.predict_proba(X, link))
        torch.testing.assert_close(proba, expected, rtol=1e-5, atol=1e-5)


def test_regression_has_a_mean_and_a_covariance():
    la, X = exponential(likelihood="regression", sigma_noise=0.7), inputs(20, 4, spread=0.9)
    for found, exact in zip(la(X, **AMORTIZED), la(X), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="no covariance between examples"):
        la(X, joint=True, **AMORTIZED)
    for n_outputs in (1, 2):
        la, X = plain_regression(n_outputs)
        la.amortize([X])
        _, f_var = la(3 * X, **AMORTIZED)
        assert torch.linalg.eigvalsh(f_var).min() > -1e-12
        assert (f_var.diagonal(dim1=1, dim2=2) > 0).all()


def test_variances_that_fit_no_covariance_give_the_nearest_one():
    la, X = plain_regression()
    la.amortize([X])
    # Of outputs with a variance of 1 each, no difference has more than 4.
    logs = torch.tensor([1.0, 1.0, 10.0]).double().log()
    weights = torch.zeros_like(la.learnt_variance.weights)
    la.learnt_variance = replace(
        la.learnt_variance, weights=weights, offset=logs, lowest=logs, highest=logs
    )
    _, f_var = la(X, **AMORTIZED)
    nearest = torch.tensor([[2.5, -2.5], [-2.5, 2.5]]).double()  # of [[1, -4], [-4, 1]]
    torch.testing.assert_close(f_var, nearest.expand_as(f_var))


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_prediction_is_one_forward_pass(kind, monkeypatch):
    la, batches = fitted(kind), ragged_batches()
    la.amortize(batches)
    la(batches[0], **AMORTIZED)
    passes = count_forward_passes(la)
    monkeypatch.setattr(torch.autograd, "grad", lambda *_, **__: pytest.fail("a backward pass"))
    for link in (*LINKS, "bridge_norm"):
        probs = la(batches[0], link_approx=link, **AMORTIZED)
        torch.testing.assert_close(probs.sum(1), torch.ones(3).double())
        assert not probs.requires_grad
    la.predict(batches[0], **AMORTIZED)
    la.predict_proba(batches[0], **AMORTIZED)
    assert len(passes) == len(LINKS) + 3


def test_what_it_learns_from_and_that_copies_are_seeded():
    la, batches, before = fitted(), ragged_batches(), torch.get_rng_state()
    unlabelled = [{k: v for k, v in b.items() if k != "labels"} for b in ragged_batches(seed=7)]
    assert la.amortize(batches, None).n_examples == 8
    copies = [la.amortize(batches, generator=g) for g in (None, None, generator(1))]
    assert [one.n_examples for one in copies] == [16] * 3  # a copy of each text
    assert torch.equal(copies[0].offset, copies[1].offset)
    assert not torch.equal(copies[0].offset, copies[2].offset)
    assert torch.equal(torch.get_rng_state(), before)
    found = la.amortize(batches, unlabelled)
    both = la.amortize([*batches, *ragged_batches(seed=7)], None)
    torch.testing.assert_close(found.weights.abs(), both.weights.abs())
    assert la.learnt_variance is both
    la, X = plain_regression()
    assert la.amortize([X]).n_examples == 12  # numbers have no swapped copies


def test_it_belongs_to_a_fit_and_a_prior():
    la, batches = fitted(), ragged_batches()
    with pytest.raises(ValueError, match=r"No variance is learnt for this fit: call la\.amortize"):
        la(batches[0], **AMORTIZED)
    la.amortize(batches)
    expected = la(batches[0], **AMORTIZED)
    before = la.prior_precision
    for name, value in (
        ("prior_precision", 2 * before),
        ("prior_precision", some_precision(la, "layerwise")),
        ("temperature", 2.0),
    ):
        old = getattr(la, name)
        setattr(la, name, value)
        for predict in (la, la.predict, la.predict_proba):
            with pytest.raises(ValueError, match="The prior has changed since"):
                predict(batches[0], **AMORTIZED)
        setattr(la, name, old)
        assert torch.equal(la(batches[0], **AMORTIZED), expected)
    la.fit(batches)
    with pytest.raises(ValueError, match="No variance is learnt"):
        la.predict(batches[0], **AMORTIZED)


def rewards():
    return make(lora_model("bert", n_labels=1), likelihood="reward_modeling")


PACKED = {"input_ids": torch.ones(1, 4).long(), "position_ids": torch.tensor([[0, 1, 0, 1]])}
REFUSED = [
    (lambda la, b: la.amortize([]), "The loader has no data"),
    (lambda la, b: la.amortize([b[0], PACKED], None), "batch 1: Several texts are packed"),
    (lambda la, b: la.amortize(b, "shuffled"), 'must be "swapped", data or None'),
    (lambda la, b: la(PACKED, **AMORTIZED), "Several texts are packed"),
    (lambda la, b: la(la.predictive_moments(b[0]), **AMORTIZED), "Moments hold no inputs"),
    (lambda la, b: la.predict(b[0], pred_type="nn"), 'neither "glm" nor "amortized"'),
    (lambda la, b: make(plain_model()).amortize([inputs(4, 1)]), "fit"),
    (lambda la, b: fitted_text().amortize(b), "not language_modeling"),
    (lambda la, b: rewards().amortize(b), "not reward_modeling"),
]


def test_what_is_refused_leaves_the_model_and_what_was_learnt():
    model = half_trained(lora_model("bert"))
    la, batches = fitted(model=model), ragged_batches()
    before, learnt = Snapshot(model), la.amortize(batches)
    la.predict_proba(batches, **AMORTIZED)
    before.assert_equal(model)
    for use, message in REFUSED:
        with pytest.raises((ValueError, AttributeError, NotImplementedError), match=message):
            use(la, batches)
        assert la.learnt_variance is learnt
        before.assert_equal(model, random_state=False)
    with torch.no_grad():
        la.blocks[0].weight.mul_(2)
    for use in (lambda: la(batches[0], **AMORTIZED), lambda: la.amortize(batches)):
        with pytest.raises(RuntimeError, match="weights"):
            use()


def test_it_is_saved_with_the_posterior(tmp_path):
    la, batches = fitted(), ragged_batches()
    la.amortize(batches)
    expected = la(batches[0], **AMORTIZED)
    other = make(la.model.model, backend_kwargs={"rank": 3})
    other.load_state_dict(la.state_dict())
    la.save_pretrained(tmp_path)
    model = lora_model("bert")
    for loaded in (other, from_pretrained(model, tmp_path)):
        torch.testing.assert_close(loaded(batches[0], **AMORTIZED), expected)
        assert loaded.learnt_variance.r_squared == la.learnt_variance.r_squared
    state = fitted().state_dict()
    assert state["learnt_variance"] is None
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="No variance is learnt"):
        other(batches[0], **AMORTIZED)

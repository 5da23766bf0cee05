"""Predictions from one forward pass, against exact ones."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from laplace_lora_ext import from_pretrained
from laplace_lora_ext.predictive.amortized import changes_of_logits
from laplace_lora_ext.predictive.functions import Functions
from tests.support.models import (
    lora_model,
    plain_model,
    ragged_batches,
    with_lora,
    without_labels,
)
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

LINKS_OF_DECISIONS = ["mean_field", "probit", "mc"]
LINKS = [*LINKS_OF_DECISIONS, "bridge"]
AMORTIZED = {"pred_type": "amortized"}


@pytest.fixture
def amortized():
    """A posterior of a classifier that has learnt its variances from its batches."""
    la = fitted()
    la.amortize(ragged_batches())
    return la


@pytest.fixture
def batch():
    """The first of the batches that posteriors are fitted to."""
    return ragged_batches()[0]


def forbid_backward_passes(monkeypatch):
    def fail(*_, **__):
        pytest.fail("a backward pass")

    monkeypatch.setattr(torch.autograd, "grad", fail)


# --- against exact predictions --------------------------------------------------------


class Exponential(nn.Module):
    """Has logits' variances proportional to exp(2 x_0), the layer's input.

    Their logarithms are thus linear in the head's inputs, of which x_0 is one.
    """

    def __init__(self, n_outputs: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.head = nn.Linear(9, n_outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        constant = self.layer(torch.ones_like(x))
        z = x[:, :1].exp() * constant
        return self.head(torch.cat([x, z], dim=1))


def inputs(
    n: int,
    seed: int,
    spread: float = 1.0,
) -> torch.Tensor:
    """Draw numbers between minus and plus the spread."""
    uniform = torch.rand(n, 5, generator=generator(seed)).double()
    return spread * (2 * uniform - 1)


def exponential(
    structure: str = "lowrank_kron",
    likelihood: str = "classification",
    **keywords,
):
    """Fit a posterior, and let it learn variances that its features tell exactly."""
    model = with_lora(Exponential(), "layer")
    la = make(model, structure, likelihood, **keywords)
    y = torch.arange(40) % 3
    if likelihood == "regression":
        y = nn.functional.one_hot(y).double()
    la.fit([(inputs(40, seed=1), y)])
    la.amortize([inputs(40, seed=2), inputs(40, seed=3)])
    return la


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("link", LINKS)
def test_variances_that_are_linear_in_the_features_predict_exactly(structure, link):
    la = exponential(structure)
    # Within what it has learnt from, beyond which variances are cut off.
    X = inputs(20, seed=4, spread=0.9)
    # Not 1, for the regression has a penalty.
    assert la.learnt_variance.r_squared > 1 - 1e-8
    found = la(X, link_approx=link, generator=generator(), **AMORTIZED)
    moments = la.predictive_moments(X)
    exact = la(moments, link_approx=link, generator=generator())
    assert_close(found, exact, rtol=1e-5, atol=1e-5)
    of_map = la.model(X).softmax(-1)
    assert (exact - of_map).abs().max() > 0.01


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("link", LINKS_OF_DECISIONS)
def test_decisions_by_variances_that_are_linear_are_exact(structure, link):
    la = exponential(structure)
    X = inputs(20, seed=4, spread=0.9)
    found = la.predict(X, link, generator=generator(), **AMORTIZED)
    expected = la.predict(X, link, generator=generator())
    for part, of_exact in zip(found, expected, strict=True):
        # Entropies that are differences of others keep fewer digits.
        assert_close(part, of_exact, rtol=1e-3, atol=1e-5)
    proba = torch.from_numpy(la.predict_proba(X, link, **AMORTIZED))
    expected_proba = torch.from_numpy(la.predict_proba(X, link))
    assert_close(proba, expected_proba, rtol=1e-5, atol=1e-5)


def test_regression_has_a_mean_and_a_covariance():
    la = exponential(likelihood="regression", sigma_noise=0.7)
    X = inputs(20, seed=4, spread=0.9)
    mean, covariance = la(X, **AMORTIZED)
    f_mu, f_var = la(X)
    assert_close(mean, f_mu, rtol=1e-5, atol=1e-6)
    assert_close(covariance, f_var, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="no covariance between examples"):
        la(X, joint=True, **AMORTIZED)


@pytest.mark.parametrize("n_outputs", [1, 2])
def test_far_from_the_data_covariances_stay_positive(n_outputs):
    la, X = plain_regression(n_outputs)
    la.amortize([X])
    _, f_var = la(3 * X, **AMORTIZED)
    variances = f_var.diagonal(dim1=1, dim2=2)
    assert (variances > 0).all()
    assert torch.linalg.eigvalsh(f_var).min() > -1e-12


def test_variances_that_fit_no_covariance_give_the_nearest_one():
    la, X = plain_regression()
    la.amortize([X])
    # Of outputs with a variance of 1 each, no difference has more than 4.
    logs = torch.tensor([1.0, 1.0, 10.0]).double().log()
    learnt = la.learnt_variance
    la.learnt_variance = replace(
        learnt,
        weights=torch.zeros_like(learnt.weights),
        offset=logs,
        lowest=logs,
        highest=logs,
    )
    _, f_var = la(X, **AMORTIZED)
    # Of [[1, -4], [-4, 1]], without its eigenvalue of -3.
    nearest = torch.tensor([[2.5, -2.5], [-2.5, 2.5]]).double()
    assert_close(f_var, nearest.expand_as(f_var))


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_prediction_is_one_forward_pass(kind, batch, monkeypatch):
    la = fitted(kind)
    la.amortize(ragged_batches())
    forbid_backward_passes(monkeypatch)
    passes = count_forward_passes(la)
    links = [*LINKS, "bridge_norm"]
    for link in links:
        probs = la(batch, link_approx=link, **AMORTIZED)
        assert_close(probs.sum(1), torch.ones(3).double())
        assert not probs.requires_grad
    la.predict(batch, **AMORTIZED)
    la.predict_proba(batch, **AMORTIZED)
    assert len(passes) == len(links) + 2


# --- many outputs ---------------------------------------------------------------------


def test_changes_of_logits_are_those_of_the_linearised_model(batch):
    la = fitted()
    drawn = la.sample(4, generator())
    found = changes_of_logits(la, batch, drawn)
    linearised = Functions(la, drawn).linearised(batch)
    expected = linearised - la.predictive_moments(batch).f_mu
    # Found are central differences: rounding and curvature leave an error.
    assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_many_outputs_learn_from_draws(monkeypatch):
    n_outputs = 18
    model = with_lora(Exponential(n_outputs), "layer")
    la = make(model, prior_precision=20.0)
    y = torch.arange(40) % n_outputs
    la.fit([(inputs(40, seed=1), y)])
    batches = [inputs(4, seed=seed) for seed in range(100)]
    X = inputs(20, seed=1000, spread=0.9)
    exact = la(X, link_approx="mean_field", n_contrasts=n_outputs)
    of_map = la.model(X).softmax(-1)

    forbid_backward_passes(monkeypatch)
    passes = count_forward_passes(la)
    learnt = la.amortize(batches, None)
    # One at the weights and two at each of eight draws, whatever the number of classes.
    assert len(passes) == 17 * len(batches)
    # From draws a variance is known with noise only.
    assert learnt.r_squared > 0.8
    found = la(X, link_approx="mean_field", **AMORTIZED)
    error = (found - exact).abs().mean()
    error_of_map = (of_map - exact).abs().mean()
    assert error < 0.2 * error_of_map
    again = la.amortize(batches, None)
    assert torch.equal(again.weights, learnt.weights)


# --- what it learns from --------------------------------------------------------------


def test_what_it_learns_from_and_that_copies_are_seeded():
    la = fitted()
    batches = ragged_batches()
    before = torch.get_rng_state()
    assert la.amortize(batches, None).n_examples == 8
    one = la.amortize(batches)
    same = la.amortize(batches)
    other = la.amortize(batches, generator=generator(1))
    for learnt in (one, same, other):
        assert learnt.n_examples == 16  # a copy of each text
    assert torch.equal(one.offset, same.offset)
    assert not torch.equal(one.offset, other.offset)
    assert torch.equal(torch.get_rng_state(), before)


def test_texts_without_labels_are_learnt_from_like_others():
    la = fitted()
    batches = ragged_batches()
    more = ragged_batches(seed=7)
    unlabelled = [without_labels(each) for each in more]
    found = la.amortize(batches, unlabelled)
    both = la.amortize([*batches, *more], None)
    # A principal component may have either sign.
    assert_close(found.weights.abs(), both.weights.abs())
    assert la.learnt_variance is both


def test_numbers_have_no_swapped_copies():
    la, X = plain_regression()
    assert la.amortize([X]).n_examples == 12


def test_it_belongs_to_a_fit(batch):
    la = fitted()
    with pytest.raises(
        ValueError,
        match=r"No variance is learnt for this fit: call la\.amortize",
    ):
        la(batch, **AMORTIZED)
    la.amortize(ragged_batches())
    la.fit(ragged_batches())
    with pytest.raises(ValueError, match="No variance is learnt"):
        la.predict(batch, **AMORTIZED)


def test_it_belongs_to_a_prior(amortized, batch):
    expected = amortized(batch, **AMORTIZED)
    changes = [
        ("prior_precision", 2 * amortized.prior_precision),
        ("prior_precision", some_precision(amortized, "layerwise")),
        ("temperature", 2.0),
    ]
    for name, value in changes:
        before = getattr(amortized, name)
        setattr(amortized, name, value)
        for predict in (amortized, amortized.predict, amortized.predict_proba):
            with pytest.raises(ValueError, match="The prior has changed since"):
                predict(batch, **AMORTIZED)
        setattr(amortized, name, before)
        assert torch.equal(amortized(batch, **AMORTIZED), expected)


# --- what is refused ------------------------------------------------------------------

PACKED = {
    "input_ids": torch.ones(1, 4).long(),
    "position_ids": torch.tensor([[0, 1, 0, 1]]),
}


def no_data(la, batches):
    la.amortize([])


def packed_texts(la, batches):
    la.amortize([batches[0], PACKED], None)


def an_unknown_name(la, batches):
    la.amortize(batches, "shuffled")


def packed_texts_to_predict(la, batches):
    la(PACKED, **AMORTIZED)


def moments_to_predict(la, batches):
    la(la.predictive_moments(batches[0]), **AMORTIZED)


def a_decision_in_the_weights(la, batches):
    la.predict(batches[0], pred_type="nn")


def a_posterior_that_is_not_fitted(la, batches):
    make(plain_model()).amortize([inputs(4, seed=1)])


def a_language_model(la, batches):
    fitted_text().amortize(batches)


def rewards(la, batches):
    model = lora_model("bert", n_labels=1)
    make(model, likelihood="reward_modeling").amortize(batches)


REFUSED = [
    (no_data, "The loader has no data"),
    (packed_texts, "batch 1: Several texts are packed"),
    (an_unknown_name, 'must be "swapped", data or None'),
    (packed_texts_to_predict, "Several texts are packed"),
    (moments_to_predict, "Moments hold no inputs"),
    (a_decision_in_the_weights, 'neither "glm" nor "amortized"'),
    (a_posterior_that_is_not_fitted, "fit"),
    (a_language_model, "not language_modeling"),
    (rewards, "not reward_modeling"),
]


def test_what_is_refused_leaves_the_model_and_what_was_learnt():
    model = half_trained(lora_model("bert"))
    la = fitted(model=model)
    batches = ragged_batches()
    before = Snapshot(model)
    learnt = la.amortize(batches)
    la.predict_proba(batches, **AMORTIZED)
    before.assert_equal(model)
    for use, message in REFUSED:
        with pytest.raises(
            (ValueError, AttributeError, NotImplementedError),
            match=message,
        ):
            use(la, batches)
        assert la.learnt_variance is learnt
        before.assert_equal(model, random_state=False)


def test_weights_that_have_changed_are_refused(amortized, batch):
    with torch.no_grad():
        amortized.blocks[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="weights"):
        amortized(batch, **AMORTIZED)
    with pytest.raises(RuntimeError, match="weights"):
        amortized.amortize(ragged_batches())


# --- files ----------------------------------------------------------------------------


def test_it_is_saved_with_the_posterior(amortized, batch, tmp_path):
    expected = amortized(batch, **AMORTIZED)
    r_squared = amortized.learnt_variance.r_squared
    restored = make(amortized.model.model, backend_kwargs={"rank": 3})
    restored.load_state_dict(amortized.state_dict())
    amortized.save_pretrained(tmp_path)
    read = from_pretrained(lora_model("bert"), tmp_path)
    for loaded in (restored, read):
        assert_close(loaded(batch, **AMORTIZED), expected)
        assert loaded.learnt_variance.r_squared == r_squared


def test_a_state_without_learnt_variances_removes_them(amortized, batch):
    state = fitted().state_dict()
    assert state["learnt_variance"] is None
    amortized.load_state_dict(state)
    with pytest.raises(ValueError, match="No variance is learnt"):
        amortized(batch, **AMORTIZED)

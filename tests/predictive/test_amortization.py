"""Predictions from one forward pass, against exact ones."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_lora_ext import from_pretrained
from laplace_lora_ext.models.swapping import Swapping
from laplace_lora_ext.predictive.amortization import changes_of_logits
from laplace_lora_ext.predictive.posterior import drawn_functions
from tests.support.models import (
    lora_model,
    plain_model,
    ragged_batches,
    with_lora,
    without_labels,
)
from tests.support.posteriors import (
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


@pytest.fixture
def forbid_backward_passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function from whose call on a backward pass fails."""

    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("a backward pass")

    def forbid() -> None:
        monkeypatch.setattr(torch.autograd, "grad", fail)

    return forbid


# --- against exact predictions --------------------------------------------------------


class Exponential(nn.Module):
    """Has logits' variances proportional to exp(2 x_0), the layer's input.

    Their logarithms are thus linear in the head's inputs, of which x_0 is one.
    """

    def __init__(self, n_outputs: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.head = nn.Linear(9, n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        constant = self.layer(torch.ones_like(x))
        first = x[:, :1]
        z = first.exp() * constant
        features = torch.cat([x, z], dim=1)
        return self.head(features)


def inputs(n: int, seed: int, spread: float = 1.0) -> Tensor:
    """Draw numbers between minus and plus the spread."""
    draws = generator(seed)
    uniform = torch.rand(n, 5, generator=draws).double()
    around_zero = 2 * uniform - 1
    return spread * around_zero


def exponential(
    structure: str = "lowrank_kron", likelihood: str = "classification", **keywords: Any
):
    """Fit a posterior, and let it learn variances that its features tell exactly."""
    model = with_lora(Exponential(), "layer")
    la = make(model, structure, likelihood, **keywords)
    y = torch.arange(40) % 3
    if likelihood == "regression":
        y = nn.functional.one_hot(y).double()
    X = inputs(40, seed=1)
    la.fit([(X, y)])
    first = inputs(40, seed=2)
    second = inputs(40, seed=3)
    la.amortize([first, second])
    return la


@pytest.fixture
def points() -> Tensor:
    """Inputs within what is learnt from, beyond which variances are cut off."""
    return inputs(20, seed=4, spread=0.9)


@pytest.fixture(params=["lowrank_kron", "full"])
def linear(request: pytest.FixtureRequest):
    """A posterior of ours and of the host's whose learnt variances are exact."""
    la = exponential(request.param)
    # Not 1, for the regression has a penalty.
    assert la.learnt_variance.r_squared > 1 - 1e-8
    return la


def by_link(la: Any, given: Any, link: str, **options: Any) -> Tensor:
    """Predict with the same noise each time."""
    return la(given, link_approx=link, generator=generator(), **options)


@pytest.mark.parametrize("link", LINKS)
def test_variances_that_are_linear_in_the_features_predict_exactly(
    linear, points, link
):
    found = by_link(linear, points, link, **AMORTIZED)
    exact = by_link(linear, linear.predictive_moments(points), link)
    assert_close(found, exact, rtol=1e-5, atol=1e-5)
    # Without a variance there would be an error.
    of_map = linear.model(points).softmax(-1)
    assert (exact - of_map).abs().max() > 0.01
    if link == "bridge":  # which decides nothing
        return
    found = linear.predict(points, link, generator=generator(), **AMORTIZED)
    expected = linear.predict(points, link, generator=generator())
    for part, of_exact in zip(found, expected, strict=True):
        # Entropies that are differences of others keep fewer digits.
        assert_close(part, of_exact, rtol=1e-3, atol=1e-5)


def test_regression_has_a_mean_and_a_covariance(points):
    la = exponential(likelihood="regression", sigma_noise=0.7)
    mean, covariance = la(points, **AMORTIZED)
    f_mu, f_var = la(points)
    assert_close(mean, f_mu, rtol=1e-5, atol=1e-6)
    assert_close(covariance, f_var, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="no covariance between examples"):
        la(points, joint=True, **AMORTIZED)


@pytest.mark.parametrize("n_outputs", [1, 2])
def test_far_from_the_data_covariances_stay_positive(n_outputs):
    la, X = plain_regression(n_outputs)
    # Numbers have no swapped copies.
    assert la.amortize([X]).n_examples == 12
    _, f_var = la(3 * X, **AMORTIZED)
    variances = f_var.diagonal(dim1=1, dim2=2)
    assert variances.min() > 0
    eigenvalues = torch.linalg.eigvalsh(f_var)
    assert eigenvalues.min() > -1e-12


def test_variances_that_fit_no_covariance_give_the_nearest_one():
    la, X = plain_regression()
    la.amortize([X])
    # Of outputs with a variance of 1 each, no difference has more than 4.
    impossible = torch.tensor([1.0, 1.0, 10.0]).double()
    logs = impossible.log()
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
    nearest = [[2.5, -2.5], [-2.5, 2.5]]
    expected = torch.tensor(nearest).double()
    assert_close(f_var, expected.expand_as(f_var))


# --- their price ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_prediction_is_one_forward_pass(kind, batch, forbid_backward_passes):
    la = fitted(kind)
    la.amortize(ragged_batches())
    forbid_backward_passes()
    passes = count_forward_passes(la)
    for link in LINKS:
        probs = la(batch, link_approx=link, **AMORTIZED)
        total = probs.sum(1)
        assert_close(total, torch.ones_like(total))
        assert not probs.requires_grad
    assert len(passes) == len(LINKS)
    la.predict(batch, **AMORTIZED)
    la.predict_proba(batch, **AMORTIZED)
    assert len(passes) == len(LINKS) + 2


# --- many outputs ---------------------------------------------------------------------


def test_changes_of_logits_are_those_of_the_linearised_model(batch):
    la = fitted()
    drawn = la.sample(4, generator())
    found = changes_of_logits(la, batch, drawn)
    linearised = drawn_functions(la, drawn, "glm", batch)
    expected = linearised - la.predictive_moments(batch).f_mu
    # Found are central differences: rounding and curvature leave an error.
    assert_close(found, expected, rtol=1e-6, atol=1e-7)


N_OUTPUTS = 18
"""More than are learnt from exact covariances."""


@pytest.fixture
def of_many_outputs():
    """A posterior of a classifier of so many classes, which has learnt nothing yet."""
    model = with_lora(Exponential(N_OUTPUTS), "layer")
    la = make(model, prior_precision=20.0)
    y = torch.arange(40) % N_OUTPUTS
    X = inputs(40, seed=1)
    la.fit([(X, y)])
    return la


@pytest.fixture
def unlabelled() -> list[Tensor]:
    """A hundred batches of four inputs."""
    return [inputs(4, seed=seed) for seed in range(100)]


def test_many_outputs_learn_from_draws(of_many_outputs, unlabelled, points):
    la = of_many_outputs
    la.n_contrasts = N_OUTPUTS
    exact = la(points, link_approx="mean_field")
    of_map = la.model(points).softmax(-1)
    learnt = la.amortize(unlabelled, None)
    # The noise of the draws, without which it is 0.83, is not the features' fault.
    assert learnt.r_squared > 0.95
    found = la(points, link_approx="mean_field", **AMORTIZED)
    errors = (found - exact).abs()
    errors_of_map = (of_map - exact).abs()
    assert errors.mean() < 0.2 * errors_of_map.mean()


def test_many_outputs_cost_no_backward_pass_and_learn_the_same_each_time(
    of_many_outputs, unlabelled, forbid_backward_passes
):
    forbid_backward_passes()
    passes = count_forward_passes(of_many_outputs)
    once = of_many_outputs.amortize(unlabelled, None)
    # One at the weights and two at each of eight draws, whatever the number of classes.
    assert len(passes) == 17 * len(unlabelled)
    again = of_many_outputs.amortize(unlabelled, None)
    assert torch.equal(again.weights, once.weights)


# --- what it learns from --------------------------------------------------------------


def test_it_learns_from_each_text_and_a_copy_by_a_generator():
    la = fitted()
    batches = ragged_batches()
    assert la.amortize(batches, None).n_examples == 8
    before = torch.get_rng_state()
    one = la.amortize(batches)
    assert one.n_examples == 16
    assert torch.equal(la.amortize(batches).offset, one.offset)
    assert torch.equal(torch.get_rng_state(), before)
    other = la.amortize(batches, generator=generator(1))
    assert not torch.equal(one.offset, other.offset)
    # Copies are learnt from as texts of one's own.
    swapped = Swapping(batches, la.model.transformer, generator(1))
    both = la.amortize([*batches, *map(swapped, batches)], None)
    assert_close(both.weights.abs(), other.weights.abs())
    la.amortize(batches, generator=generator(1))
    # What was learnt last is kept.
    assert torch.equal(la.learnt_variance.weights, other.weights)


def test_texts_without_labels_are_learnt_from_like_others():
    la = fitted()
    batches = ragged_batches()
    more = ragged_batches(seed=7)
    unlabelled = [without_labels(each) for each in more]
    found = la.amortize(batches, unlabelled)
    both = la.amortize([*batches, *more], None)
    # A principal component may have either sign.
    assert_close(found.weights.abs(), both.weights.abs())


# --- what it belongs to ---------------------------------------------------------------


def test_it_belongs_to_a_fit(amortized, batch):
    amortized.fit(ragged_batches())
    for predict in (fitted(), amortized, amortized.predict):
        with pytest.raises(ValueError, match=r"No variance is learnt .*la\.amortize"):
            predict(batch, **AMORTIZED)


@pytest.mark.parametrize("name", ["prior_precision", "layerwise", "temperature"])
def test_it_belongs_to_a_prior_and_serves_again_with_its_own(amortized, batch, name):
    expected = amortized(batch, **AMORTIZED)
    hyperparameters = amortized.hyperparameters
    if name == "layerwise":
        amortized.prior_precision = some_precision(amortized, name)
    else:
        setattr(amortized, name, 2.0)
    for predict in (amortized, amortized.predict, amortized.predict_proba):
        with pytest.raises(ValueError, match="The prior has changed since"):
            predict(batch, **AMORTIZED)
    amortized.hyperparameters = hyperparameters
    assert torch.equal(amortized(batch, **AMORTIZED), expected)


# --- what is refused ------------------------------------------------------------------

PACKED = {
    "input_ids": torch.ones(1, 4).long(),
    "position_ids": torch.tensor([[0, 1, 0, 1]]),
}


def rewards() -> Any:
    return make(lora_model("bert", n_labels=1), likelihood="reward_modeling")


# What is tried with a posterior and its batches.
REFUSED = [
    (lambda la, _: la.amortize([]), "no data"),
    (lambda la, batches: la.amortize([batches[0], PACKED], None), "batch 1: .*packed"),
    (lambda la, batches: la.amortize(batches, "shuffled"), "unlabelled"),
    (lambda la, _: la(PACKED, **AMORTIZED), "packed"),
    (
        lambda la, batches: la(la.predictive_moments(batches[0]), **AMORTIZED),
        "no inputs",
    ),
    (lambda la, batches: la.predict(batches[0], pred_type="nn"), "pred_type"),
    (lambda *_: make(plain_model()).amortize([inputs(4, seed=1)]), "fit"),
    (lambda _, batches: fitted_text().amortize(batches), "not language_modeling"),
    (lambda _, batches: rewards().amortize(batches), "not reward_modeling"),
]


REFUSALS = (ValueError, AttributeError, NotImplementedError)


@pytest.mark.parametrize(("use", "message"), REFUSED)
def test_what_is_refused_leaves_the_model_and_what_was_learnt(use, message):
    model = half_trained(lora_model("bert"))
    la = fitted(model=model)
    batches = ragged_batches()
    learnt = la.amortize(batches)
    before = Snapshot(model)
    with pytest.raises(REFUSALS, match=message):
        use(la, batches)
    assert la.learnt_variance is learnt
    # Some refusals make a model of their own first, by draws.
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
    amortized.save_pretrained(tmp_path)
    loaded = from_pretrained(lora_model("bert"), tmp_path)
    assert_close(loaded(batch, **AMORTIZED), amortized(batch, **AMORTIZED))
    r_squared = amortized.learnt_variance.r_squared
    assert loaded.learnt_variance.r_squared == r_squared


def test_a_state_without_learnt_variances_removes_them(amortized, batch):
    state = fitted().state_dict()
    assert state["learnt_variance"] is None
    amortized.load_state_dict(state)
    with pytest.raises(ValueError, match="No variance is learnt"):
        amortized(batch, **AMORTIZED)

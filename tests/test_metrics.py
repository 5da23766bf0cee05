"""Figures of predictions whose quality is known."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from laplace_lora_ext.metrics import (
    compare,
    quality,
    quality_of_numbers,
)
from tests.support.dense import labels_of, predicted
from tests.support.models import ragged_batches
from tests.support.posteriors import (
    fitted,
    normal,
    plain_regression,
)

# --- classes --------------------------------------------------------------------------

LABELS = torch.tensor([0, 1, 1, 0])
PERFECT = torch.tensor(
    [
        [1.0, 0.0],
        [0.0, 1.0],
        [0.0, 1.0],
        [1.0, 0.0],
    ]
)
EVEN = torch.full_like(PERFECT, 0.5)


def test_figures_of_perfect_predictions():
    figures = quality(PERFECT, LABELS)
    assert figures["accuracy"] == 1
    assert figures["nll"] == 0
    assert figures["ece"] == 0
    assert figures["brier"] == 0


def test_figures_of_predictions_that_are_certain_and_wrong():
    certain_and_wrong = PERFECT.flip(1)
    figures = quality(certain_and_wrong, LABELS)
    # Squared errors are summed over both classes.
    assert figures["brier"] == 2
    assert figures["ece"] == 1


def test_a_coin_has_the_logarithm_of_two_for_its_loss():
    figures = quality(EVEN, LABELS)
    loss = math.log(2)
    assert figures["nll"] == pytest.approx(loss)


def test_the_calibration_error_of_predictions_that_are_too_modest():
    # They say 0.65 and are always right.
    too_modest = 0.3 * PERFECT + 0.7 * EVEN
    figures = quality(too_modest, LABELS)
    error = 1 - 0.65
    assert figures["ece"] == pytest.approx(error, abs=1e-6)


@pytest.mark.parametrize(
    "shapes",
    # Of tokens, of several labels, and of one example less.
    [((2, 5, 3), (2, 5)), ((4, 2), (4, 2)), ((4, 3), (3,))],
    ids=str,
)
def test_labels_that_are_not_one_a_row_are_refused(shapes):
    of_probabilities, of_labels = shapes
    p = torch.ones(of_probabilities).softmax(-1)
    with pytest.raises(ValueError, match=r"\(N, C\), with labels \(N,\)"):
        quality(p, torch.zeros(of_labels, dtype=torch.long))


def test_probabilities_that_are_no_numbers_are_refused():
    infinite = EVEN / 0
    with pytest.raises(ValueError, match="not finite"):
        quality(infinite, LABELS)


@pytest.fixture
def batches():
    """Texts that the posterior is not fitted to."""
    return ragged_batches(seed=7)


@pytest.fixture
def labels(batches):
    return labels_of(batches)


def probabilities(la, batches, **options) -> Tensor:
    """Predict all texts by the link that figures are made with."""
    of_batches = []
    for batch in batches:
        p = la(batch, link_approx="mean_field", **options)
        of_batches.append(p)
    return torch.cat(of_batches)


def test_figures_of_a_posterior_are_those_of_its_predictions(batches, labels):
    la = fitted()
    p = probabilities(la, batches)
    found = compare(la, batches)
    assert found.posterior == quality(p, labels)


@pytest.mark.filterwarnings("error:The model's outputs")
def test_figures_of_the_trained_model_are_those_of_its_softmax(batches, labels):
    la = fitted()
    f_mu, _ = predicted(la, batches)
    p = f_mu.softmax(-1)
    expected = quality(p, labels)
    found = compare(la, batches)
    assert found.trained == pytest.approx(expected)


def lines_of(table) -> list[str]:
    return str(table).splitlines()


def test_figures_are_printed_in_a_table(batches):
    found = compare(fitted(), batches)
    head, trained, _ = lines_of(found)
    assert head.split() == ["accuracy", "nll", "ece", "brier"]
    name, accuracy, *_ = trained.split()
    assert name == "trained"
    assert accuracy == f"{found.trained['accuracy']:.4f}"


def test_learnt_variances_of_classes_have_a_row_of_their_own(batches, labels):
    la = fitted()
    la.amortize(ragged_batches())
    by_learnt = probabilities(la, batches, pred_type="amortized")
    found = compare(la, batches)
    assert found.amortized == quality(by_learnt, labels)


# --- numbers --------------------------------------------------------------------------


@pytest.fixture
def targets():
    """Two numbers for each of the twelve inputs of `plain_regression`."""
    n_inputs = 12
    return normal(n_inputs, 2, seed=5)


# Nine in ten numbers are so near their mean: one in twenty is beyond either side.
STANDARD_DEVIATIONS = Normal(0, 1).icdf(torch.tensor(0.95)).item()


def assert_figures_of_numbers(
    figures: dict[str, float],
    mean: Tensor,
    covariance: Tensor,
    targets: Tensor,
) -> None:
    """Compare figures with those of a normal distribution of each example."""
    normals = MultivariateNormal(mean, covariance)
    densities = normals.log_prob(targets)
    nll = -densities.mean()
    assert figures["nll"] == pytest.approx(nll.item())
    errors = targets - mean
    mse = errors.square().mean()
    assert figures["rmse"] == pytest.approx(mse.sqrt().item())
    variances = covariance.diagonal(dim1=1, dim2=2)
    z = errors / variances.sqrt()
    is_within = z.abs() < STANDARD_DEVIATIONS
    coverage = is_within.double().mean()
    assert figures["coverage"] == pytest.approx(coverage.item())


def test_figures_of_numbers_are_means_of_each_ones(targets):
    la, X = plain_regression()
    # Two batches of unequal size.
    X_of_batches = X.split(7)
    y_of_batches = targets.split(7)
    batches = zip(X_of_batches, y_of_batches, strict=True)
    found = compare(la, list(batches))

    f_mu, f_var = la(X)
    identity = torch.eye(2, dtype=torch.float64)
    noise = la.sigma_noise**2 * identity
    assert_figures_of_numbers(
        found.trained,
        f_mu,
        noise.expand_as(f_var),
        targets,
    )
    assert_figures_of_numbers(
        found.posterior,
        f_mu,
        f_var + noise,
        targets,
    )
    # They differ by the doubt about weights, which the trained model has none of.
    assert found.trained["crps"] != found.posterior["crps"]
    prediction = la.predict(X)
    assert found.posterior == quality_of_numbers(prediction, targets)


def test_figures_of_numbers_are_printed_in_a_table(targets):
    la, X = plain_regression()
    data = [(X, targets)]
    found = compare(la, data)
    head, *_ = lines_of(found)
    assert head.split() == ["rmse", "nll", "coverage", "crps"]


def test_targets_of_another_shape_are_refused(targets):
    la, X = plain_regression()
    prediction = la.predict(X)
    of_first_output = targets[:, 0]
    message = r"targets must be \(12, 2\), not \(12, 1\)"
    with pytest.raises(ValueError, match=message):
        quality_of_numbers(prediction, of_first_output)


def test_learnt_variances_of_numbers_have_a_row_of_their_own(targets):
    la, X = plain_regression()
    la.amortize([X])
    data = [(X, targets)]
    found = compare(la, data)
    prediction = la.predict(X, pred_type="amortized")
    expected = quality_of_numbers(prediction, targets)
    assert found.amortized == expected
    *_, last = lines_of(found)
    name, *_ = last.split()
    assert name == "amortized"


def test_learnt_variances_have_a_row_while_they_are_the_posteriors(targets):
    la, X = plain_regression()
    data = [(X, targets)]
    before = compare(la, data)
    assert before.amortized is None
    la.amortize([X])
    learnt = compare(la, data)
    assert learnt.amortized is not None
    # They were learnt under the former prior.
    la.prior_precision = 2 * la.prior_precision
    under_another = compare(la, data)
    assert under_another.amortized is None

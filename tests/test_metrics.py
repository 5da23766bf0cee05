"""Figures of predictions whose quality is known."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from laplace_lora_ext.metrics import compare, quality, quality_of_numbers
from laplace_lora_ext.plots import outcomes
from tests.support.dense import labels_of, predicted
from tests.support.models import ragged_batches
from tests.support.posteriors import normal, plain_regression

# --- classes --------------------------------------------------------------------------

LABELS = torch.tensor([0, 1, 1, 0])
PERFECT = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
EVEN = torch.full_like(PERFECT, 0.5)


def test_figures_of_predictions_of_known_quality():
    # Rounding may lead a little too far.
    perfect = quality(1.0000001 * PERFECT, LABELS)
    expected = {"accuracy": 1, "nll": 0, "ece": 0, "brier": 0}
    assert perfect == pytest.approx(expected, abs=1e-7)
    certain_and_wrong = quality(PERFECT.flip(1), LABELS)
    # Squared errors are summed over both classes.
    assert certain_and_wrong["brier"] == 2
    assert certain_and_wrong["ece"] == pytest.approx(1)
    # Zeros of float32 say less than those of float64.
    assert certain_and_wrong["nll"] == pytest.approx(126 * math.log(2))
    assert quality(PERFECT.double().flip(1), LABELS)["nll"] > 700
    # A coin.
    assert quality(EVEN, LABELS)["nll"] == pytest.approx(math.log(2))
    # They say 0.65 and are always right, or 0.95 and are wrong.
    sure = 0.9 * PERFECT + 0.1 * EVEN
    p = torch.cat([0.3 * PERFECT + 0.7 * EVEN, sure.flip(1)])
    for n_bins, error in ((15, (0.35 + 0.95) / 2), (1, 0.8 - 0.5)):
        found = quality(p, LABELS.repeat(2), n_bins)
        assert found["ece"] == pytest.approx(error, abs=1e-6)
    # In the last bin they say 0.975, and half of them are right.
    p = torch.cat([PERFECT, sure.flip(1)])
    assert quality(p, LABELS.repeat(2))["ece"] == pytest.approx(0.475, abs=1e-6)


@pytest.mark.filterwarnings("error:The model's outputs")
def test_figures_are_those_of_the_model_and_of_its_posteriors_predictions(la):
    la.amortize(ragged_batches())
    # Texts that the posterior is not fitted to.
    batches = ragged_batches(seed=7)
    labels = labels_of(batches)

    def figures(**options: str) -> dict[str, float]:
        p = [la(batch, link_approx="mean_field", **options) for batch in batches]
        return quality(torch.cat(p), labels)

    found = compare(la, batches)
    assert found.posterior == figures()
    assert found.amortized == figures(pred_type="amortized")
    f_mu, _ = predicted(la, batches)
    assert found.trained == pytest.approx(quality(f_mu.softmax(-1), labels))
    # Printed, they are a table.
    head, trained, *_ = str(found).splitlines()
    assert head.split() == ["accuracy", "nll", "ece", "brier"]
    assert trained.split()[:2] == ["trained", f"{found.trained['accuracy']:.4f}"]


# --- numbers --------------------------------------------------------------------------

# Nine in ten numbers are so near their mean: one in twenty is beyond either side.
STANDARD_DEVIATIONS = Normal(0, 1).icdf(torch.tensor(0.95)).item()


def assert_figures_of_numbers(
    figures: dict[str, float], mean: Tensor, covariance: Tensor, targets: Tensor
) -> None:
    """Compare figures with those of a normal distribution of each example."""
    nll = -MultivariateNormal(mean, covariance).log_prob(targets).mean()
    errors = targets - mean
    z = errors / covariance.diagonal(dim1=1, dim2=2).sqrt()
    coverage = (z.abs() < STANDARD_DEVIATIONS).double().mean()
    assert figures["nll"] == pytest.approx(nll.item())
    assert figures["rmse"] == pytest.approx(errors.square().mean().sqrt().item())
    assert figures["coverage"] == pytest.approx(coverage.item())


def test_figures_of_numbers_are_means_of_each_ones():
    la, X = plain_regression()
    targets = normal(12, 2, seed=5)
    # Two batches of unequal size.
    batches = list(zip(X.split(7), targets.split(7), strict=True))
    found = compare(la, batches)
    f_mu, f_var = la(X)
    noise = la.sigma_noise**2 * torch.eye(2).double()
    assert_figures_of_numbers(found.trained, f_mu, noise.expand_as(f_var), targets)
    assert_figures_of_numbers(found.posterior, f_mu, f_var + noise, targets)
    # They differ by the doubt about weights, which the trained model has none of.
    crps = la.predict(X).crps(targets).mean().item()
    assert found.posterior["crps"] == pytest.approx(crps)
    assert found.trained["crps"] != found.posterior["crps"]
    # Batches of other sizes are rounded otherwise.
    expected = quality_of_numbers(la.predict(X), targets)
    assert found.posterior == pytest.approx(expected)
    assert str(found).split()[:4] == ["rmse", "nll", "coverage", "crps"]
    # Learnt variances have a row while they are the posterior's.
    assert found.amortized is None
    la.amortize([X])
    expected = quality_of_numbers(la.predict(X, pred_type="amortized"), targets)
    assert compare(la, batches).amortized == pytest.approx(expected)
    la.prior_precision = 2 * la.prior_precision
    assert compare(la, batches).amortized is None


# --- what is refused ------------------------------------------------------------------

# Of tokens, and of one example less.
REFUSED = [
    (EVEN.expand(3, 4, 2), LABELS.expand(3, 4), "labels"),
    (EVEN, LABELS[:3], r"\(N, C\), with labels \(N,\)"),
]


def test_targets_of_another_shape_are_refused():
    for p, labels, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            quality(p, labels)
    la, X = plain_regression()
    with pytest.raises(ValueError, match="predicts numbers"):
        outcomes(la, [])
    measure = partial(quality_of_numbers, la.predict(X))
    with pytest.raises(ValueError, match=r"\(12, 2\), not \(12, 1\)"):
        measure(normal(12))

"""Descent on the loss of validation data."""

import math

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from laplace_lora_ext.tuning.val_gd import predictive_loss
from tests.support.models import ragged_batches
from tests.support.posteriors import (
    PRIORS,
    fitted,
    generator,
    overconfident,
    plain_regression,
    some_precision,
    validation_loss,
)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_val_gd_finds_the_best_scalar(dtype, tail):
    la, validation = overconfident(dtype=dtype, tail=tail)
    grid = torch.logspace(-3, 3, 61)
    whole = [{key: torch.cat([batch[key] for batch in validation]) for key in validation[0]}]
    losses = [validation_loss(la, point, whole, link_approx="probit") for point in grid]
    best = grid[losses.index(min(losses))].item()
    assert grid[0] < best < grid[-1]
    history = la.optimize_prior_precision(
        method="val_gd", val_loader=validation, link_approx="probit", n_steps=300, batch_size=24
    )
    assert history.objective.min().item() <= min(losses) + 1e-5
    assert la.prior_precision.log().item() == pytest.approx(math.log(best), abs=0.15)
    here = validation_loss(la, la.prior_precision, whole, link_approx="probit")
    assert history.objective.min().item() == pytest.approx(here, rel=1e-5)


def test_val_gd_with_samples_ends_near_the_best_scalar():
    la, validation = overconfident()
    statistics = la.predictive_statistics(validation)
    loss = predictive_loss(la, "mc", 20_000)

    def measure(point):
        return loss(statistics.moments(point), statistics.targets, generator()).mean().item()

    best = min(measure(point) for point in torch.logspace(-3, 3, 31))
    la.optimize_prior_precision(
        method="val_gd", val_loader=validation, init_prior_prec=100.0, generator=generator()
    )
    assert measure(la.prior_precision) <= best + 0.01
    assert measure(100.0) > best + 0.02  # where it has started from


def test_val_gd_takes_the_best_that_it_has_measured_and_not_the_last():
    la, validation = overconfident()
    way = {"link_approx": "probit", "n_steps": 4, "lr": 20.0}  # steps far too long
    history = la.optimize_prior_precision(method="val_gd", val_loader=validation, **way)
    best = history.objective.argmin()
    assert best < len(history.objective) - 1
    torch.testing.assert_close(la.prior_precision, history.prior_precision[best])


def test_val_gd_of_a_layerwise_prior_beats_the_best_scalar():
    la, validation = overconfident()
    arguments = {"method": "val_gd", "val_loader": validation, "link_approx": "probit"}
    scalar = la.optimize_prior_precision(**arguments, batch_size=24)
    layerwise = la.optimize_prior_precision(**arguments, batch_size=24, prior_structure="layerwise")
    assert len(la.prior_precision) == len(la.blocks)
    assert layerwise.objective.min() < scalar.objective.min()
    assert layerwise.prior_precision.shape == (21, len(la.blocks))
    assert layerwise.step.tolist() == list(range(0, 1001, 50))
    from_scalar = la.optimize_prior_precision(
        **arguments, init_prior_prec=torch.full((len(la.blocks),), 2.0), n_steps=1
    )
    assert from_scalar.prior_precision[0].tolist() == pytest.approx([2.0] * len(la.blocks))


def test_val_gd_honours_seeds(validation):
    la = fitted()

    def run(**kwargs):
        la.optimize_prior_precision(
            method="val_gd", val_loader=validation, n_steps=20, n_samples=3, **kwargs
        )
        return la.prior_precision

    assert torch.equal(run(generator=generator()), run(generator=generator()))
    assert not torch.equal(run(generator=generator()), run(generator=generator(1)))
    torch.manual_seed(0)
    first = run()
    torch.manual_seed(0)
    assert torch.equal(first, run())


def test_val_gd_for_regression_and_its_start_is_never_worsened():
    la, X = plain_regression()
    loader = DataLoader(TensorDataset(X, torch.zeros(12, 2).double()), batch_size=5)
    history = la.optimize_prior_precision(method="val_gd", val_loader=loader, n_steps=100)
    assert history.objective.min() < history.objective[0]
    best = history.prior_precision[history.objective.argmin()]
    torch.testing.assert_close(la.prior_precision, best)


def test_val_gd_is_for_low_rank_factors(validation):
    la = fitted(structure="diag")
    with pytest.raises(NotImplementedError, match='use "gridsearch"'):
        la.optimize_prior_precision(method="val_gd", val_loader=validation)


@pytest.mark.parametrize("structure", PRIORS)
@pytest.mark.parametrize(
    "kind", ["mc", "mc of a singular covariance", "probit", "mean field", "gaussian"]
)
def test_gradient_of_the_validation_loss(kind, structure):
    if kind == "gaussian":
        la, X = plain_regression()
        statistics = la.predictive_statistics([(X, X[:, :2])], dtype=torch.float64)
        loss = predictive_loss(la, "mc", 6)
    else:
        la = fitted()
        statistics = la.predictive_statistics(ragged_batches(seed=7), dtype=torch.float64)
        if "singular" in kind:  # one class is always as likely as another
            statistics.projections[:, 1] = statistics.projections[:, 0]
            statistics.inner_products[:] = 0
        loss = predictive_loss(la, "mc" if "mc" in kind else kind.replace(" ", "_"), 6)
    precision = some_precision(la, structure).log().requires_grad_()

    def validation_loss(logarithm):
        moments = statistics.moments(logarithm.exp())
        return loss(moments, statistics.targets, generator()).mean()

    assert torch.autograd.gradcheck(validation_loss, (precision,), atol=1e-5)


def test_validation_losses_are_those_of_the_predictions(validation):
    la = fitted(dtype=torch.float32, prior_precision=0.3)
    statistics = la.predictive_statistics(validation)
    moments, targets = statistics.moments(0.3), statistics.targets
    for link in ("probit", "mean_field"):
        loss = predictive_loss(la, link, 1)
        expected = -la(moments, link_approx=link).log().gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(loss(moments, targets, None), expected)
    mc = -la(moments, link_approx="mc", n_samples=100_000).log()
    expected = mc.gather(1, targets[:, None])[:, 0]
    sampled = predictive_loss(la, "mc", 100_000)(moments, targets, generator())
    torch.testing.assert_close(sampled, expected, rtol=0.02, atol=0.02)

    la, X = plain_regression()
    y = X[:, :2]
    moments = la.predictive_statistics([X], dtype=torch.float64).moments(1.0)
    P = torch.linalg.inv(moments.f_var + 0.25 * torch.eye(2).double())
    error = (y - moments.f_mu)[:, None]
    log_density = -0.5 * (error @ P @ error.mT).flatten() + 0.5 * (P / (2 * torch.pi)).logdet()
    torch.testing.assert_close(predictive_loss(la, "mc", 1)(moments, y, None), -log_density)

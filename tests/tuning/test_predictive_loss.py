"""The loss of predictions by which a prior precision is chosen."""

import pytest
import torch

from laplace_lora_ext.tuning.predictive_loss import predictive_loss
from tests.support.models import ragged_batches
from tests.support.posteriors import PRIORS, fitted, generator, plain_regression, some_precision


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

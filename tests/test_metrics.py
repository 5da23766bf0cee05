"""Figures of predictions whose quality is known."""

import pytest
import torch

from laplace_lora_ext.metrics import compare, quality, quality_of_numbers
from tests.support.models import ragged_batches
from tests.support.posteriors import fitted, generator, plain_regression


def test_figures_of_known_predictions():
    labels = torch.tensor([0, 1, 1, 0])
    sure = torch.eye(2)[labels]
    perfect = quality(sure, labels)
    assert perfect["accuracy"] == 1
    assert perfect["nll"] == perfect["ece"] == perfect["brier"] == 0
    wrong = quality(sure.flip(1), labels)
    assert wrong["brier"] == 2
    assert wrong["ece"] == 1
    even = torch.full((4, 2), 0.5)
    assert quality(even, labels)["nll"] == pytest.approx(0.6931, abs=1e-4)
    too_modest = 0.3 * sure + 0.7 * even  # it says 0.65 and is always right
    assert quality(too_modest, labels)["ece"] == pytest.approx(0.35, abs=1e-6)
    with pytest.raises(ValueError, match="not finite"):
        quality(even / 0, labels)


@pytest.mark.filterwarnings("error:The model's outputs")
def test_the_trained_model_beside_its_posterior():
    la = fitted()
    batches = ragged_batches(seed=7)
    labels = torch.cat([batch["labels"] for batch in batches])
    found = compare(la, batches)
    posterior = torch.cat([la(batch, link_approx="mean_field") for batch in batches])
    assert found.posterior == quality(posterior, labels)
    f_mu = torch.cat([la.predictive_moments(batch).f_mu for batch in batches])
    assert found.trained == pytest.approx(quality(f_mu.softmax(-1), labels))
    head, trained, _ = str(found).splitlines()
    assert head.split() == ["accuracy", "nll", "ece", "brier"]
    name, accuracy, *_ = trained.split()
    assert name == "trained"
    assert accuracy == f"{found.trained['accuracy']:.4f}"


def test_figures_of_numbers_are_means_of_each_ones():
    la, X = plain_regression()
    y = torch.randn(12, 2, generator=generator(5)).double()
    found = compare(la, [(X[:7], y[:7]), (X[7:], y[7:])])
    f_mu, f_var = la(X)
    noise = la.sigma_noise**2 * torch.eye(2).double()
    for figures, covariance in (
        (found.trained, noise.expand(12, 2, 2)),
        (found.posterior, f_var + noise),
    ):
        density = torch.distributions.MultivariateNormal(f_mu, covariance)
        assert figures["nll"] == pytest.approx(-density.log_prob(y).mean().item())
        assert figures["rmse"] == pytest.approx(
            (f_mu - y).square().mean().sqrt().item()
        )
        z = (y - f_mu) / covariance.diagonal(dim1=1, dim2=2).sqrt()
        is_within = z.abs() < 1.6448536269514722
        assert figures["coverage"] == pytest.approx(is_within.double().mean().item())
    assert found.trained["crps"] != found.posterior["crps"]
    assert found.posterior == quality_of_numbers(la.predict(X), y)
    assert str(found).splitlines()[0].split() == ["rmse", "nll", "coverage", "crps"]
    with pytest.raises(ValueError, match=r"targets must be \(12, 2\), not \(12, 1\)"):
        quality_of_numbers(la.predict(X), y[:, 0])


def test_learnt_variances_have_a_row_of_their_own_while_they_are_the_posteriors():
    la, X = plain_regression()
    y = torch.randn(12, 2, generator=generator(5)).double()
    assert compare(la, [(X, y)]).amortized is None
    la.amortize([X])
    found = compare(la, [(X, y)])
    assert found.amortized == quality_of_numbers(
        la.predict(X, pred_type="amortized"), y
    )
    assert str(found).splitlines()[-1].split()[0] == "amortized"
    la.prior_precision = 2 * la.prior_precision
    assert compare(la, [(X, y)]).amortized is None


def test_learnt_variances_of_classes_have_a_row_too():
    la = fitted()
    batches = ragged_batches(seed=7)
    la.amortize(ragged_batches())
    labels = torch.cat([batch["labels"] for batch in batches])
    predicted = [
        la(batch, pred_type="amortized", link_approx="mean_field") for batch in batches
    ]
    assert compare(la, batches).amortized == quality(torch.cat(predicted), labels)

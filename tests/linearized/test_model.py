"""The linearised model's evidence and cross-validation against dense algebra and refits."""

import math

import pytest
import torch

from laplace_lora_ext import LinearizedModel
from laplace_lora_ext.linearized import features
from laplace_lora_ext.predictive.statistics import upper_triangle
from tests.support.dense import LinearizedClassifier
from tests.support.models import ragged_batches
from tests.support.posteriors import (
    PRIORS,
    fitted,
    linearized,
    plain_regression,
    posterior_and_dense,
    sizes,
    some_precision,
)


@pytest.fixture(autouse=True)
def several_parts(monkeypatch):
    monkeypatch.setattr(features, "_ROWS", 6)  # of outputs


@pytest.mark.parametrize("structure", PRIORS)
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_evidence_at_the_mode_equals_dense_algebra(kind, structure):
    la, dense = posterior_and_dense(kind)
    model = linearized(la, ragged_batches())
    for factor in (0.1, 1, 10):
        precision = factor * some_precision(la, structure)
        evidence, dimension, scatter, error = model.evidence(precision)
        assert evidence == pytest.approx(dense.evidence(precision).item(), abs=1e-6)
        assert dense.evidence(precision).item() - evidence < error + 1e-8  # a bound that holds
        expected_dimension, expected_scatter = dense.balance(precision)
        torch.testing.assert_close(dimension, expected_dimension, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(scatter, expected_scatter, rtol=1e-5, atol=1e-8)


def test_features_in_float32_give_the_numbers_of_float64():
    la, dense = posterior_and_dense("bert")
    block = torch.arange(len(la.blocks)).repeat_interleave(torch.tensor(sizes(la)))
    f_mu = dense.offset + dense.J @ la.mean
    single, double = (
        LinearizedModel(
            f_mu.to(dtype), dense.J.to(dtype), block, dense.offset.to(dtype), dense.y, la.likelihood
        )
        for dtype in (torch.float32, torch.float64)
    )
    precision = some_precision(la, "layerwise")
    evidence, dimension, scatter, _ = single.evidence(precision)
    assert dimension.dtype == scatter.dtype == torch.float64
    other, *rest, _ = double.evidence(precision)
    assert evidence == pytest.approx(other, abs=1e-4)
    torch.testing.assert_close((dimension, scatter), tuple(rest), rtol=1e-4, atol=1e-6)
    moments, others = (model.leave_one_out(precision) for model in (single, double))
    assert {part.dtype for part in moments} == {torch.float64}
    torch.testing.assert_close(moments, others, rtol=1e-4, atol=1e-4)


def test_prior_mean_and_temperature_take_part():
    la = fitted(temperature=0.5)
    la.prior_mean = la.mean.clone()
    model = linearized(la, ragged_batches())
    evidence, _, scatter, _ = model.evidence(torch.ones(1) * 1e8, scale=1 / 0.5)
    # Held at the prior mean, which is the trained weights, nothing moves.
    assert scatter.sum() < 1e-6
    assert evidence == pytest.approx(-2 * la.loss.item(), rel=1e-3)


METHOD = "linearized_marglik"


def test_regression_has_the_evidence_of_a_gaussian():
    la, X = plain_regression()
    la.sigma_noise, targets = 0.7, X[:, :2].sin()
    la.fit([(X, targets)])
    model = linearized(la, [(X[:5], targets[:5]), (X[5:], targets[5:])])
    precision = some_precision(la, "layerwise")
    J, f = la.backend.jacobians(X)
    spread = precision.repeat_interleave(torch.tensor(sizes(la)))
    prior_mean = f - J @ la.mean
    J = J.flatten(0, 1)
    covariance = J / spread @ J.T + 0.7**2 * torch.eye(len(J), dtype=J.dtype)
    gaussian = torch.distributions.MultivariateNormal(prior_mean.flatten(), covariance)
    constant = -len(J) / 2 * math.log(2 * math.pi * 0.7**2)
    evidence, *_, error = model.evidence(precision, 1 / 0.7**2, constant)
    expected = gaussian.log_prob(targets.flatten().to(J)).item()
    assert expected - error - 1e-6 <= evidence <= expected + 1e-6
    assert evidence == pytest.approx(expected, abs=1e-3)
    start = {"init_prior_prec": precision, "n_steps": 1, "tolerance": 0, "pooling": 0}
    history = la.optimize_prior_precision(method=METHOD, train_loader=model, **start)
    assert history.objective.item() == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("structure", ["scalar", "layerwise"])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_moments_equal_dense_algebra(kind, structure):
    la, dense = posterior_and_dense(kind)
    model = linearized(la, ragged_batches())
    for factor, scale in ((0.1, 1.0), (1, 1.0), (10, 2.0)):
        precision = factor * some_precision(la, structure)
        f_mu, f_var = model.leave_one_out(precision, scale)
        expected_mu, expected_var = dense.leave_one_out(dense.spread(precision), scale)
        assert (f_mu - expected_mu).abs().max() < 1e-6 * expected_mu.abs().max()
        assert (f_var - expected_var).abs().max() < 1e-6 * expected_var.max()
        assert torch.equal(f_var, f_var.mT)


def test_a_larger_training_set_than_features_has_the_same_moments():
    torch.manual_seed(0)
    features = torch.randn(200, 3, 12, dtype=torch.float64)
    targets = torch.randint(3, (200,))
    block = torch.arange(12) // 6
    offset = torch.randn(200, 3, dtype=torch.float64)

    model = LinearizedModel(offset, features, block, offset, targets, "classification")
    precision = torch.tensor([0.5, 2.0]).double()
    f_mu, f_var = model.leave_one_out(precision)
    dense = LinearizedClassifier(offset, features, offset, targets, [6, 6])
    expected_mu, expected_var = dense.leave_one_out(precision[block])
    torch.testing.assert_close(f_mu, expected_mu)
    torch.testing.assert_close(f_var, expected_var)


@pytest.mark.parametrize("structure", PRIORS)
@pytest.mark.parametrize("n", [3, 9])  # fewer rows than features, and more
def test_what_features_leave_out_is_a_weight_of_each_example_of_its_own(n, structure):
    torch.manual_seed(0)
    block = torch.arange(12) // 6
    features, offset = torch.randn(n, 3, 12).double(), torch.randn(n, 3).double()
    roots = torch.randn(n, 2, 3, 3).double()
    f_mu, targets = torch.randn(n, 3).double(), torch.randint(3, (n,))
    own = upper_triangle(roots @ roots.mT)
    model = LinearizedModel(f_mu, features, block, offset, targets, "classification", own)
    # The same model, where each example has three more features of each block.
    columns = torch.zeros(n, 3, 2, n, 3).double()
    for example in range(n):
        columns[example, :, :, example] = roots[example].transpose(0, 1)
    order = torch.cat([block, torch.arange(2).repeat_interleave(3 * n)]).argsort(stable=True)
    wider = torch.cat([features, columns.flatten(2)], dim=2)[..., order]
    dense = LinearizedClassifier(f_mu, wider, offset, targets, [6 + 3 * n] * 2)
    precision = torch.tensor([0.7] if structure == "scalar" else [0.3, 2.0]).double()
    evidence, dimension, scatter, error = model.evidence(precision)
    assert error < 1e-3
    assert evidence == pytest.approx(dense.evidence(precision).item(), abs=error + 1e-8)
    expected_dimension, expected_scatter = dense.balance(precision)
    torch.testing.assert_close(dimension, expected_dimension)
    torch.testing.assert_close(scatter, expected_scatter, rtol=1e-6, atol=0)
    moments = model.leave_one_out(precision)
    expected = dense.leave_one_out(dense.spread(precision))
    torch.testing.assert_close(tuple(moments), tuple(expected), rtol=1e-6, atol=1e-6)


def test_it_is_close_to_fits_without_the_example():
    la, dense = posterior_and_dense("bert")
    precision = torch.tensor([1e-3]).double()
    f_mu, _ = linearized(la, ragged_batches()).leave_one_out(precision)
    whole = dense.offset + dense.J @ dense.mode(dense.spread(precision))
    refits = []
    for n in range(len(dense.y)):
        u = dense.without(n).mode(dense.spread(precision))
        refits.append(dense.offset[n] + dense.J[n] @ u)
    refits = torch.stack(refits)
    apart = (whole - refits).norm(dim=-1).mean()
    assert apart > 0.1
    assert (f_mu - refits).norm(dim=-1).mean() < 0.1 * apart


def test_regression_is_exact():
    la, X = plain_regression()
    targets = X[:, :2].sin()
    la.fit([(X, targets)])
    model = linearized(la, [(X, targets)])
    precision = some_precision(la, "layerwise")
    f_mu, f_var = model.leave_one_out(precision, 1 / 0.7**2)
    J, f = la.backend.jacobians(X)
    offset, prior = f - J @ la.mean, precision.repeat_interleave(torch.tensor(sizes(la)))

    def posterior(examples):
        rows, residual = J[examples].flatten(0, 1), (targets - offset)[examples].flatten()
        covariance = torch.linalg.inv(prior.diag() + rows.T @ rows / 0.7**2)
        return covariance @ rows.T @ residual / 0.7**2, covariance

    everything = list(range(len(X)))
    with_it, _ = posterior(everything)
    for n in everything:
        mean, covariance = posterior([i for i in everything if i != n])
        error, shift = f_mu[n] - offset[n] - J[n] @ mean, J[n] @ (with_it - mean)
        assert error.norm() < 1e-6 * shift.norm()
        torch.testing.assert_close(f_var[n], J[n] @ covariance @ J[n].T)

"""Leave-one-out cross-validation in the linearised model, against dense algebra and refits."""

import math
import warnings

import pytest
import torch

from laplace_lora_ext import LinearizedModel
from laplace_lora_ext.predictive.links import mean_field as mean_field_log_softmax
from laplace_lora_ext.tuning.loss_search import search_line
from tests.dense_oracle import softmax_fisher
from tests.test_host_api import plain_regression
from tests.test_linearized_evidence import linearized, posterior_and_dense
from tests.test_predictive_statistics import count_forward_passes, fitted, some_precision
from tests.test_tuning import generator, overconfident
from tests.tiny_models import ragged_batches

METHOD = "linearized_loo"


def cavity(dense, precision, scale=1.0):
    """Each example's factor taken out of the posterior, in the space of all weights."""
    u = dense.mode(precision / scale)
    logits = dense.offset + dense.J @ u
    fisher = scale * torch.stack([softmax_fisher(f) for f in logits])
    slope = scale * (logits.softmax(-1) - torch.nn.functional.one_hot(dense.y, logits.shape[1]))
    A = precision.diag() + torch.einsum("ncp,ncd,ndq->pq", dense.J, fisher, dense.J)
    moments = []
    for J, H, g, offset in zip(dense.J, fisher, slope, dense.offset, strict=True):
        covariance = torch.linalg.inv(A - J.T @ H @ J)
        mean = covariance @ (A @ u - J.T @ (H @ J @ u - g))
        moments.append((offset + J @ mean, J @ covariance @ J.T))
    return (torch.stack(part) for part in zip(*moments, strict=True))


@pytest.mark.parametrize("structure", ["scalar", "layerwise"])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_moments_equal_dense_algebra(kind, structure):
    la, dense = posterior_and_dense(kind)
    model = linearized(la, ragged_batches())
    for factor, scale in ((0.1, 1.0), (1, 1.0), (10, 2.0)):
        precision = factor * some_precision(la, structure)
        f_mu, f_var = model.leave_one_out(precision, scale)
        expected_mu, expected_var = cavity(dense, dense.spread(precision), scale)
        with_it = dense.offset + dense.J @ dense.mode(dense.spread(precision) / scale)
        # L-BFGS ends near the mode: nearer by far than an example moves it.
        assert (f_mu - expected_mu).abs().max() < 2e-2 * (with_it - expected_mu).abs().max()
        assert (f_var - expected_var).abs().max() < 1e-4 * expected_var.max()
        assert torch.equal(f_var, f_var.mT)


def test_a_larger_training_set_than_features_has_the_same_moments():
    torch.manual_seed(0)
    features = torch.randn(200, 3, 12, dtype=torch.float64)
    targets = torch.randint(3, (200,))
    block = torch.arange(12) // 6
    offset = torch.randn(200, 3, dtype=torch.float64)

    class Explicit:
        J, y = features, targets

    Explicit.offset = offset
    Explicit.mode = lambda precision: model._mode(precision, 1.0)[0]
    model = LinearizedModel(offset, features, block, offset, targets, "classification")
    assert len(model._root) == 12
    precision = torch.tensor([0.5, 2.0]).double()
    f_mu, f_var = model.leave_one_out(precision)
    expected_mu, expected_var = cavity(Explicit, precision[block])
    torch.testing.assert_close(f_mu, expected_mu)
    torch.testing.assert_close(f_var, expected_var)


def test_it_is_close_to_fits_without_the_example():
    la, dense = posterior_and_dense("bert")
    precision = torch.tensor([1e-3]).double()
    f_mu, _ = linearized(la, ragged_batches()).leave_one_out(precision)
    whole = dense.offset + dense.J @ dense.mode(dense.spread(precision))
    J, offset, y = dense.J, dense.offset, dense.y
    refits = []
    for n in range(len(y)):
        rest = [i for i in range(len(y)) if i != n]
        dense.J, dense.offset, dense.y = J[rest], offset[rest], y[rest]
        refits.append(offset[n] + J[n] @ dense.mode(dense.spread(precision)))
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
    offset, prior = f - J @ la.mean, precision.repeat_interleave(torch.tensor(la._sizes))

    def posterior(examples):
        rows, residual = J[examples].flatten(0, 1), (targets - offset)[examples].flatten()
        covariance = torch.linalg.inv(prior.diag() + rows.T @ rows / 0.7**2)
        return covariance @ rows.T @ residual / 0.7**2, covariance

    everything = list(range(len(X)))
    with_it, _ = posterior(everything)
    for n in everything:
        mean, covariance = posterior([i for i in everything if i != n])
        error, shift = f_mu[n] - offset[n] - J[n] @ mean, J[n] @ (with_it - mean)
        assert error.norm() < 2e-2 * shift.norm()  # L-BFGS ends near the mode
        torch.testing.assert_close(f_var[n], J[n] @ covariance @ J[n].T)


@pytest.mark.parametrize("link", [None, "probit", "mc", "mean_field"])
def test_the_chosen_scalar_has_the_least_loss_of_a_grid(link):
    la, _ = overconfident()
    model = linearized(la, ragged_batches())

    def loss(point):
        moments = model.leave_one_out(torch.as_tensor(point).reshape(1))
        if link in (None, "mean_field"):
            p = mean_field_log_softmax(*moments).exp()
        else:
            draws = torch.Generator().manual_seed(0)
            p = la(moments, link_approx=link, n_samples=100_000, generator=draws)
        return -p.gather(1, model.targets[:, None]).log().mean().item()

    grid = torch.logspace(-3, 3, 31)
    losses = [loss(point) for point in grid]
    best = min(losses)
    assert best < min(losses[0], losses[-1]) - 0.01
    history = la.optimize_prior_precision(
        method=METHOD,
        train_loader=model,
        link_approx=link,
        n_samples=20_000,
        generator=generator(),
    )
    noise = 0.01 if link == "mc" else 2e-4  # nor is a mode exact
    assert loss(la.prior_precision) <= best + noise
    assert history.objective.min().item() == pytest.approx(loss(la.prior_precision), abs=noise)
    assert len(history.step) < 30
    assert history.prior_precision.shape == (len(history.step), 1)


def test_what_it_starts_with_is_scaled_as_a_whole():
    la, _ = overconfident()
    model = linearized(la, ragged_batches())
    start = torch.arange(1.0, len(la.blocks) + 1)
    la.optimize_prior_precision(method=METHOD, train_loader=model, init_prior_prec=start)
    factors = la.prior_precision.cpu() / start
    torch.testing.assert_close(factors, factors[:1].expand_as(factors))
    assert abs(math.log(factors[0])) > 0.1


def test_regression_is_tuned_too():
    la, X = plain_regression()
    targets = X[:, :2].sin()
    la.fit([(X, targets)])
    model = linearized(la, [(X, targets)])
    la.optimize_prior_precision(method=METHOD, train_loader=model)

    def loss(precision):
        f_mu, f_var = model.leave_one_out(precision, float(la._H_factor))
        noise = la.sigma_noise.double() ** 2 * torch.eye(2).double()
        normal = torch.distributions.MultivariateNormal(f_mu, f_var + noise)
        return -normal.log_prob(targets.double()).mean().item()

    here = loss(la.prior_precision)
    for factor in (0.8, 1.25):
        assert loss(factor * la.prior_precision) > here


def test_one_pass_a_seed_and_silence(capfd):
    la, _ = overconfident(dtype=torch.float32)
    calls = count_forward_passes(la)
    chosen = []
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in (0, 0, 1):
            la.optimize_prior_precision(
                method=METHOD,
                train_loader=ragged_batches(),
                link_approx="mc",
                n_samples=10,
                generator=generator(seed),
            )
            chosen.append(la.prior_precision)
    assert len(calls) == 3 * len(ragged_batches())
    assert torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[0], chosen[2])
    assert capfd.readouterr() == ("", "")
    la.optimize_prior_precision(method=METHOD, train_loader=ragged_batches(), progress_bar=True)
    assert "leave-one-out" in capfd.readouterr().err


def test_a_search_without_a_minimum_says_so():
    with pytest.warns(UserWarning, match="no minimum in reach") as warning:
        search_line(lambda point: 1 / (1 + point.item()), torch.ones(1), 100)
    assert len(warning) == 1
    with pytest.raises(ValueError, match="does not depend"):
        search_line(lambda point: 1.0, torch.ones(1), 100)
    with pytest.raises(ValueError, match="not a number"):
        search_line(lambda point: math.nan, torch.ones(1), 100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"link_approx": "bridge"}, "links"),
        ({"pred_type": "nn"}, "no option pred_type"),
        ({"loss": torch.nn.functional.cross_entropy}, "no option loss"),
        ({"train_loader": None}, "pass train_loader"),
    ],
)
def test_bad_arguments_leave_the_prior_precision_alone(arguments, message):
    la = fitted(prior_precision=0.4)
    arguments = {"method": METHOD, "train_loader": ragged_batches()} | arguments
    with pytest.raises(ValueError, match=message):
        la.optimize_prior_precision(**arguments)
    assert la.prior_precision.item() == pytest.approx(0.4)


def test_a_layerwise_prior_is_a_factor_of_the_linearised_evidence():
    la, _ = overconfident()
    model = linearized(la, ragged_batches())
    options = {"train_loader": model, "prior_structure": "layerwise", "pooling": 0.2}
    la.optimize_prior_precision(method="linearized_marglik", **options)
    evidence = la.prior_precision
    assert evidence.log().std() > 0.1
    la.optimize_prior_precision(method=METHOD, **options)
    factors = la.prior_precision / evidence
    torch.testing.assert_close(factors, factors[:1].expand_as(factors), rtol=0.02, atol=0)
    assert abs(math.log(factors[0])) > 0.1

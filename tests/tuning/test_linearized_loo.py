"""The prior precision that leave-one-out cross-validation chooses."""

import math
import warnings

import pytest
import torch

from laplace_lora_ext.predictive.links import mean_field
from tests.support.models import ragged_batches
from tests.support.posteriors import (
    count_forward_passes,
    generator,
    linearized,
    overconfident,
    plain_regression,
)

METHOD = "linearized_loo"


@pytest.mark.parametrize("link", [None, "probit", "mc", "mean_field"])
def test_the_chosen_scalar_has_the_least_loss_of_a_grid(link):
    la, _ = overconfident()
    model = linearized(la, ragged_batches())

    def loss(point):
        moments = model.leave_one_out(torch.as_tensor(point).reshape(1))
        if link in (None, "mean_field"):
            p = mean_field(*moments).exp()
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

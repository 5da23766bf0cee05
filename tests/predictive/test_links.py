"""Links: limits, symmetries, bounds on their error, and samples."""

import math

import pytest
import torch
from torch.testing import assert_close

from laplace_lora_ext import Moments
from laplace_lora_ext.predictive.links import (
    mean_field,
    monte_carlo,
    own_links,
    probit,
    sampled,
    shared_noise,
)
from laplace_lora_ext.predictive.moments import gaussian_samples, square_root
from tests.support.posteriors import generator, normal


def some_moments(
    n_classes: int,
    scale: float = 1.0,
    n: int = 40,
) -> Moments:
    """Draw means `(n, C)` and covariances `(n, C, C)`."""
    draws = generator()

    def next_numbers(*shape: int) -> torch.Tensor:
        return torch.randn(
            *shape,
            generator=draws,
            dtype=torch.float64,
        )

    f_mu = 2 * next_numbers(n, n_classes)
    root = next_numbers(n, n_classes, n_classes)
    f_var = scale * root @ root.mT
    return Moments(f_mu, f_var)


# --- links against their definitions --------------------------------------------------


def test_probit_shrinks_each_logit_by_its_own_variance():
    f_mu, f_var = some_moments(4)
    variances = f_var.diagonal(dim1=1, dim2=2)
    # MacKay's approximation.
    factor = 1 + math.pi / 8 * variances
    expected = (f_mu / factor.sqrt()).softmax(-1)
    assert_close(probit(f_mu, f_var).exp(), expected)


def test_monte_carlo_is_the_mean_probability_of_samples():
    f_mu, f_var = some_moments(4)
    noise = normal(7, len(f_mu), 4)
    # Takes away what all logits of an example share, of which no probability knows.
    centring = torch.eye(4).double() - 1 / 4
    centred = centring @ f_var @ centring
    samples = gaussian_samples(f_mu, centred, noise)
    expected = samples.softmax(-1).mean(0)
    found = monte_carlo(f_mu, f_var, noise).exp()
    assert_close(found, expected)


def test_monte_carlo_reads_differences_alone():
    f_mu, f_var = some_moments(4)
    noise = normal(7, len(f_mu), 4)
    # Covariances of differences from the first logit lack what all logits share.
    with_first = f_var[:, :1]
    variance_of_first = f_var[:, :1, :1]
    of_differences = f_var - with_first - with_first.mT + variance_of_first
    found = monte_carlo(f_mu, of_differences, noise)
    expected = monte_carlo(f_mu, f_var, noise)
    assert_close(found.exp(), expected.exp())


def three_alike() -> Moments:
    """Repeat the moments of one example."""
    f_mu, f_var = some_moments(4, n=1)
    return Moments(
        f_mu=f_mu.expand(3, -1),
        f_var=f_var.expand(3, -1, -1),
    )


def test_the_links_samples_are_shared_by_a_batch():
    link = own_links(9, generator())["mc"]
    log_p = link(*three_alike())
    assert torch.equal(log_p[0], log_p[2])


def test_samples_of_a_search_are_each_examples_own_and_drawn_anew_at_every_call():
    link = sampled(9, generator())
    moments = three_alike()
    first = link(*moments)
    second = link(*moments)
    assert not torch.allclose(first[0], first[2])
    assert not torch.allclose(first, second)


def test_shared_noise_is_drawn_as_the_host_draws_it():
    f_mu, _ = some_moments(4)
    noise = shared_noise(f_mu, 9, generator())
    assert noise.shape == (9, 1, 4)
    # The host multiplies its root with one matrix of a row an output and a column a
    # sample.
    # By `normal` they would be others: a generator draws another stream in float32.
    of_host = torch.randn(4, 9, generator=generator(), dtype=torch.float64)
    assert torch.equal(noise[:, 0], of_host.T)


# --- mean field -----------------------------------------------------------------------


def test_what_all_logits_share_plays_no_part():
    f_mu, f_var = some_moments(4)
    share = normal(len(f_mu), 4, 1, seed=1)
    # Var(f + c 1): each entry gains a row's and a column's part.
    shifted = f_var + share + share.mT
    found = mean_field(f_mu + 3, shifted)
    assert_close(found, mean_field(f_mu, f_var))


def test_classes_are_exchangeable():
    f_mu, f_var = some_moments(4)
    order = [2, 0, 3, 1]
    permuted_var = f_var[:, order][:, :, order]
    found = mean_field(f_mu[:, order], permuted_var)
    expected = mean_field(f_mu, f_var)[:, order]
    assert_close(found, expected)


def total_variation(
    p: torch.Tensor,
    q: torch.Tensor,
) -> torch.Tensor:
    """Compute the mean distance of examples' probabilities."""
    distances = (p - q).abs().sum(-1) / 2
    return distances.mean()


def integrated(
    f_mu: torch.Tensor,
    f_var: torch.Tensor,
) -> torch.Tensor:
    """Average the softmax over so many draws that chance plays no part."""
    noise = normal(20_000, 4, seed=2)
    root = torch.linalg.cholesky(f_var)
    logits = f_mu + torch.einsum("bck,sk->sbc", root, noise)
    return logits.softmax(-1).mean(0)


# Measured with these moments; of a broader posterior, the link is less exact.
@pytest.mark.parametrize(
    ("scale", "measured"),
    [
        (0.1, 0.0171),
        (1.0, 0.0599),
        (10.0, 0.1162),
    ],
)
def test_it_is_close_to_the_exact_integral(scale, measured):
    f_mu, f_var = some_moments(4, scale)
    p = mean_field(f_mu, f_var).exp()
    total = p.sum(-1)
    assert_close(total, torch.ones_like(total))
    distance = total_variation(p, integrated(f_mu, f_var))
    assert distance < 1.1 * measured


@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_it_is_closer_to_the_exact_integral_than_the_mean_of_the_logits(scale):
    f_mu, f_var = some_moments(4, scale)
    exact = integrated(f_mu, f_var)
    p = mean_field(f_mu, f_var).exp()
    distance = total_variation(p, exact)
    of_map = total_variation(f_mu.softmax(-1), exact)
    assert of_map > 2.5 * distance


@pytest.mark.parametrize(
    ("mean", "variance"),
    [
        (1e4, 0.0),
        (1.0, 0.0),
        (1e4, 1e12),
        (0.0, 1e30),
    ],
)
def test_extreme_moments_give_finite_logarithms_and_gradients(mean, variance):
    f_mu = torch.tensor([[mean, 0.0, -mean]]).requires_grad_()
    of_each = variance * torch.eye(3)
    f_var = of_each[None].requires_grad_()
    log_p = mean_field(f_mu, f_var)
    log_p[0, 1].backward()
    for tensor in (log_p, f_mu.grad, f_var.grad):
        assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("mean", [1.0, 1e4])
def test_without_a_variance_it_is_the_softmax(mean):
    f_mu = torch.tensor([[mean, 0.0, -mean]])
    found = mean_field(f_mu, torch.zeros(1, 3, 3))
    assert_close(found, f_mu.log_softmax(-1))


def test_a_variance_that_rounding_has_made_negative_counts_as_none():
    # Float32 leaves differences of either sign of a large common variance: here two
    # logits covary more than they vary.
    f_mu = torch.tensor(
        [
            [1.0, 0.5, -1.0],
            [0.0, 0.0, 3.0],
        ]
    )
    f_var = torch.full((2, 3, 3), 1e8)
    # Steps of float32 at such a number are 8.
    f_var[:, [0, 1], [1, 0]] += 16
    f_var[1, [0, 2], [2, 0]] += 1024
    found = mean_field(f_mu, f_var).exp()
    assert_close(found, f_mu.softmax(-1))


# --- samples --------------------------------------------------------------------------


@pytest.fixture(params=[0, 1, 2, 4], ids="rank {}".format)
def covariance(request: pytest.FixtureRequest) -> torch.Tensor:
    """Covariances `(3, 4, 4)` of a rank."""
    factor = normal(3, 4, request.param)
    return factor @ factor.mT


def test_roots_of_singular_covariances(covariance):
    S = square_root(covariance)
    assert_close(S @ S, covariance)
    assert_close(S, S.mT)


def test_samples_of_singular_covariances(covariance):
    S = square_root(covariance)
    f_mu = normal(3, 4, seed=1)
    noise = normal(5, 3, 4, seed=2)
    samples = gaussian_samples(f_mu, covariance, noise)
    for b in range(3):
        expected = f_mu[b] + noise[:, b] @ S[b]
        assert_close(samples[:, b], expected)


def test_samples_of_singular_covariances_may_share_noise(covariance):
    S = square_root(covariance)
    f_mu = normal(3, 4, seed=1)
    shared = normal(5, 1, 4, seed=2)
    samples = gaussian_samples(f_mu, covariance, shared)
    for b in range(3):
        expected = f_mu[b] + shared[:, 0] @ S[b]
        assert_close(samples[:, b], expected)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_roots_of_singular_covariances_have_gradients(rank):
    factor = normal(3, 4, rank)
    scales = normal(rank, seed=1).abs() + 0.5

    # Gradients keep the null space, as those of a prior precision do.
    def root_of(scales: torch.Tensor) -> torch.Tensor:
        V = (factor * scales) @ factor.mT
        return square_root(V)

    scales.requires_grad_()
    assert torch.autograd.gradcheck(root_of, (scales,), atol=1e-6)

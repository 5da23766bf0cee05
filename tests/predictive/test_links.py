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
from tests.support.posteriors import generator


def randn(
    *shape: int,
    seed: int = 0,
) -> torch.Tensor:
    return torch.randn(
        *shape,
        generator=generator(seed),
        dtype=torch.float64,
    )


def some_moments(
    n_classes: int,
    scale: float = 1.0,
    n: int = 40,
) -> Moments:
    """Draw means `(n, C)` and covariances `(n, C, C)`."""
    draws = generator()
    f_mu = 2 * torch.randn(n, n_classes, generator=draws, dtype=torch.float64)
    root = torch.randn(
        n,
        n_classes,
        n_classes,
        generator=draws,
        dtype=torch.float64,
    )
    return Moments(f_mu, scale * root @ root.mT)


# --- links against their definitions --------------------------------------------------


def test_probit_shrinks_each_logit_by_its_own_variance():
    f_mu, f_var = some_moments(4)
    variances = f_var.diagonal(dim1=1, dim2=2)
    shrunk = f_mu / (1 + math.pi / 8 * variances).sqrt()
    assert_close(probit(f_mu, f_var).exp(), shrunk.softmax(-1))


def test_monte_carlo_is_the_mean_probability_of_samples():
    f_mu, f_var = some_moments(4)
    noise = torch.randn(7, len(f_mu), 4, generator=generator()).double()
    # Takes away what all logits of an example share, of which no probability knows.
    centring = torch.eye(4).double() - 1 / 4
    samples = gaussian_samples(f_mu, centring @ f_var @ centring, noise)
    expected = samples.softmax(-1).mean(0)
    assert_close(monte_carlo(f_mu, f_var, noise).exp(), expected)
    # Covariances of differences from the first logit lack what all share, too.
    with_first = f_var[:, :1]
    variance_of_first = f_var[:, :1, :1]
    of_differences = f_var - with_first - with_first.mT + variance_of_first
    found = monte_carlo(f_mu, of_differences, noise).exp()
    assert_close(found, expected)


def test_samples_are_shared_by_a_batch_or_each_examples_own():
    f_mu, f_var = some_moments(4, n=1)
    same_mu = f_mu.expand(3, -1)
    same_var = f_var.expand(3, -1, -1)
    shared = own_links(9, generator())["mc"]
    alike = shared(same_mu, same_var)
    assert torch.equal(alike[0], alike[2])
    own = sampled(9, generator())
    first = own(same_mu, same_var)
    second = own(same_mu, same_var)
    assert not torch.allclose(first[0], first[2])
    assert not torch.allclose(first, second)  # drawn anew at every call


def test_shared_noise_is_drawn_as_the_host_draws_it():
    f_mu, _ = some_moments(4)
    noise = shared_noise(f_mu, 9, generator())
    assert noise.shape == (9, 1, 4)
    # The host multiplies its root with one matrix of a row an output and a column a
    # sample.
    of_host = randn(4, 9)
    assert torch.equal(noise[:, 0], of_host.T)


# --- mean field -----------------------------------------------------------------------


def test_what_all_logits_share_plays_no_part():
    f_mu, f_var = some_moments(4)
    share = torch.randn(len(f_mu), 4, 1, generator=generator(1)).double()
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
    noise = randn(20_000, 4, seed=2)
    root = torch.linalg.cholesky(f_var)
    logits = f_mu + torch.einsum("bck,sk->sbc", root, noise)
    exact = logits.softmax(-1).mean(0)
    p = mean_field(f_mu, f_var).exp()
    assert_close(p.sum(-1), torch.ones(len(p)).double())
    distance = total_variation(p, exact)
    assert distance < 1.1 * measured
    if scale >= 1:
        assert total_variation(f_mu.softmax(-1), exact) > 2.5 * distance


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
    f_var = (variance * torch.eye(3)[None]).requires_grad_()
    log_p = mean_field(f_mu, f_var)
    assert torch.isfinite(log_p).all()
    if not variance:
        assert_close(log_p, f_mu.log_softmax(-1))
    log_p[0, 1].backward()
    assert torch.isfinite(f_mu.grad).all()
    assert torch.isfinite(f_var.grad).all()


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
    f_var[:, [0, 1], [1, 0]] += 16
    f_var[1, [0, 2], [2, 0]] += 1024
    found = mean_field(f_mu, f_var).exp()
    assert_close(found, f_mu.softmax(-1))


# --- samples --------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1, 2, 4])
def test_roots_and_samples_of_singular_covariances(rank):
    factor = randn(3, 4, rank)
    V = factor @ factor.mT
    S = square_root(V)
    assert_close(S @ S, V)
    assert_close(S, S.mT)

    f_mu = randn(3, 4, seed=1)
    own = randn(5, 3, 4, seed=2)
    shared = own[:, :1]
    of_own = gaussian_samples(f_mu, V, own)
    of_shared = gaussian_samples(f_mu, V, shared)
    for b in range(3):
        assert_close(of_own[:, b], f_mu[b] + own[:, b] @ S[b])
        assert_close(of_shared[:, b], f_mu[b] + shared[:, 0] @ S[b])


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_roots_of_singular_covariances_have_gradients(rank):
    factor = randn(3, 4, rank)
    scales = randn(rank, seed=1).abs() + 0.5

    # Gradients keep the null space, as those of a prior precision do.
    def root_of(scales):
        return square_root((factor * scales) @ factor.mT)

    assert torch.autograd.gradcheck(root_of, (scales.requires_grad_(),), atol=1e-6)

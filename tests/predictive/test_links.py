"""Links: limits, symmetries, bounds on their error, and samples."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext import Moments
from laplace_lora_ext.predictive.links import (
    log_probabilities,
    mean_field,
    probit,
    shared_noise,
)
from laplace_lora_ext.predictive.moments import gaussian_samples
from tests.support.posteriors import generator, normal


def some_moments(n_classes: int, scale: float = 1.0, n_examples: int = 40) -> Moments:
    """Draw means `(n, C)` and covariances `(n, C, C)`."""
    draws = generator()

    def next_numbers(*shape: int) -> Tensor:
        return torch.randn(n_examples, *shape, generator=draws, dtype=torch.float64)

    means = next_numbers(n_classes)
    root = next_numbers(n_classes, n_classes)
    return Moments(
        # Far enough apart that some examples are decided, and some are not.
        f_mu=2 * means,
        covariance=scale * root @ root.mT,
    )


@pytest.fixture
def moments() -> Moments:
    """Moments of forty examples of four classes."""
    return some_moments(4)


# --- links against their definitions --------------------------------------------------


def test_probit_shrinks_each_logit_by_its_own_variance(moments):
    # MacKay's approximation.
    factor = 1 + math.pi / 8 * moments.f_var.diagonal(dim1=1, dim2=2)
    shrunk = moments.f_mu / factor.sqrt()
    assert_close(probit(moments).exp(), shrunk.softmax(-1))


def test_monte_carlo_is_the_mean_probability_of_samples(moments):
    f_mu, f_var = moments
    noise = shared_noise(f_mu, 7, generator())
    # Takes away what all logits of an example share, of which no probability knows.
    centring = torch.eye(4).double() - 1 / 4
    samples = gaussian_samples(f_mu, centring @ f_var @ centring, noise)
    expected = samples.softmax(-1).mean(0)
    drawn = {"n_samples": 7, "generator": generator()}
    assert_close(log_probabilities(moments, "mc", **drawn).exp(), expected)
    # It reads differences alone: covariances of differences from the first logit lack
    # what all logits share.
    with_first = f_var[:, :1]
    of_differences = f_var - with_first - with_first.mT + f_var[:, :1, :1]
    drawn["generator"] = generator()
    found = log_probabilities(Moments(f_mu, of_differences), "mc", **drawn)
    assert_close(found.exp(), expected)


def test_shared_noise_is_drawn_as_the_host_draws_it(moments):
    noise = shared_noise(moments.f_mu, 9, generator())
    assert noise.shape == (9, 1, 4)
    # The host multiplies its root with one matrix of a row an output and a column a
    # sample.
    # By `normal` they would be others: a generator draws another stream in float32.
    of_host = torch.randn(4, 9, generator=generator(), dtype=torch.float64)
    of_batch = noise[:, 0]
    assert torch.equal(of_batch, of_host.T)


# --- mean field -----------------------------------------------------------------------


def test_what_all_logits_share_plays_no_part_and_classes_are_exchangeable(moments):
    f_mu, f_var = moments
    expected = mean_field(moments)
    share = normal(len(f_mu), 4, 1, seed=1)
    # Var(f + c 1): each entry gains a row's and a column's part.
    shifted = Moments(f_mu + 3, f_var + share + share.mT)
    assert_close(mean_field(shifted), expected)
    order = [2, 0, 3, 1]
    permuted = Moments(f_mu[:, order], f_var[:, order][:, :, order])
    assert_close(mean_field(permuted), expected[:, order])


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Compute the mean distance of examples' probabilities."""
    return (p - q).abs().sum(-1).mean() / 2


def integrated(moments: Moments) -> Tensor:
    """Average the softmax over so many draws that chance plays no part."""
    noise = normal(20_000, 4, seed=2)
    root = torch.linalg.cholesky(moments.f_var)
    logits = moments.f_mu + torch.einsum("bck,sk->sbc", root, noise)
    return logits.softmax(-1).mean(0)


# Measured with these moments; of a broader posterior, the link is less exact.
@pytest.mark.parametrize(
    ("scale", "measured"), [(0.1, 0.0171), (1.0, 0.0599), (10.0, 0.1162)]
)
def test_it_is_close_to_the_exact_integral(scale, measured):
    moments = some_moments(4, scale)
    p = mean_field(moments).exp()
    assert_close(p.sum(-1), torch.ones(len(p)).double())
    exact = integrated(moments)
    distance = total_variation(p, exact)
    assert distance < 1.1 * measured
    if scale >= 1:
        # Closer than the mean of the logits.
        of_mean = moments.f_mu.softmax(-1)
        assert total_variation(of_mean, exact) > 2.5 * distance


def test_a_variance_that_rounding_has_made_negative_counts_as_none():
    # Float32 leaves differences of either sign of a large common variance: here two
    # logits covary more than they vary.
    f_mu = torch.tensor([[1.0, 0.5, -1.0], [0.0, 0.0, 3.0]])
    f_var = torch.full((2, 3, 3), 1e8)
    # Steps of float32 at such a number are 8.
    f_var[:, [0, 1], [1, 0]] += 16
    f_var[1, [0, 2], [2, 0]] += 1024
    log_p = mean_field(Moments(f_mu, f_var))
    expected = f_mu.softmax(-1)
    assert_close(log_p.exp(), expected)

"""Links: samples, and limits. Formulas are proven by the contract suite."""

import pytest
import torch
from torch.testing import assert_close

from laplace_lora_ext import Moments
from laplace_lora_ext.predictive.links import (
    log_probabilities,
    mean_field,
    shared_noise,
)
from laplace_lora_ext.predictive.moments import gaussian_samples
from tests.support.posteriors import generator, normal


@pytest.fixture
def moments() -> Moments:
    """Moments of forty examples of four classes."""
    root = normal(40, 4, 4, seed=1)
    # Far enough apart that some examples are decided, and some are not.
    return Moments(2 * normal(40, 4), root @ root.mT)


# --- links against their definitions --------------------------------------------------


def test_monte_carlo_is_the_mean_probability_of_samples(moments):
    f_mu, f_var = moments
    noise = shared_noise(f_mu, 7, generator())
    # Takes away what all logits of an example share, of which no probability knows.
    centring = torch.eye(4).double() - 1 / 4
    samples = gaussian_samples(f_mu, centring @ f_var @ centring, noise)
    expected = samples.softmax(-1).mean(0)
    log_p = log_probabilities(moments, "mc", n_samples=7, generator=generator())
    assert_close(log_p.exp(), expected)


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
    # Or two classes, in what they are compared with a third one by.
    by_groups = Moments(f_mu, f_var[:, :2, :2], torch.arange(3).expand(2, -1))
    by_pairs = Moments(f_mu, by_groups.f_var)
    assert_close(mean_field(by_groups), mean_field(by_pairs))

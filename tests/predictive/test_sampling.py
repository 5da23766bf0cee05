"""Samples of Gaussian logits, and a differentiable root of covariances, singular ones included."""

import pytest
import torch

from laplace_lora_ext.predictive.sampling import gaussian_samples, square_root, standard_normal
from tests.support.posteriors import generator


def covariances(rank: int, size: int = 4) -> torch.Tensor:
    torch.manual_seed(0)
    factor = torch.randn(3, size, rank).double()
    return factor @ factor.mT


@pytest.mark.parametrize("rank", [0, 1, 2, 4])
def test_the_roots_square_is_the_covariance(rank):
    V = covariances(rank)
    S = square_root(V)
    torch.testing.assert_close(S @ S, V)
    torch.testing.assert_close(S, S.mT)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_its_gradient_is_that_of_finite_differences(rank):
    """In directions that keep the null space, as those of a prior precision do."""
    torch.manual_seed(0)
    factor = torch.randn(3, 4, rank).double()
    weights = torch.rand(rank).double().add(0.5).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda w: square_root((factor * w) @ factor.mT), (weights,), atol=1e-6
    )


def test_equal_eigenvalues_have_a_gradient():
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    identity = torch.eye(4).double()
    assert torch.autograd.gradcheck(lambda s: square_root(s * identity), (scale,))


def test_no_variance_has_a_finite_gradient():
    V = torch.zeros(2, 3, 3, requires_grad=True)
    square_root(V).sum().backward()
    assert torch.isfinite(V.grad).all()


def test_samples_are_the_mean_and_a_root_times_the_noise():
    f_mu, f_var = torch.randn(3, 4).double(), covariances(4)
    own, shared = torch.randn(5, 3, 4).double(), torch.randn(5, 1, 4).double()
    for noise in (own, shared):
        samples = gaussian_samples(f_mu, f_var, noise)
        assert samples.shape == (5, 3, 4)
        for b in range(3):
            expected = f_mu[b] + noise[:, min(b, noise.shape[1] - 1)] @ square_root(f_var[b])
            torch.testing.assert_close(samples[:, b], expected)


def test_noise_follows_a_generator_and_the_dtype():
    like = torch.zeros(1).double()
    noise = standard_normal((2, 3), like, generator(5))
    assert noise.dtype == torch.float64
    assert torch.equal(noise, torch.randn(2, 3, generator=generator(5), dtype=torch.float64))
    torch.manual_seed(5)
    assert torch.equal(standard_normal((2, 3), like, None), noise)

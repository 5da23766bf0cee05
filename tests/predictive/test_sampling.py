"""Samples of Gaussian logits, and a differentiable root of covariances, singular ones included."""

import pytest
import torch

from laplace_lora_ext.predictive.sampling import square_root


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

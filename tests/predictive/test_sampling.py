"""A differentiable root of covariances, singular ones included."""

import pytest
import torch

from laplace_lora_ext.predictive.sampling import gaussian_samples, square_root


@pytest.mark.parametrize("rank", [0, 1, 2, 4])
def test_roots_and_samples_of_singular_covariances_and_their_gradients(rank):
    """Gradients in directions that keep the null space, as those of a prior precision do."""
    torch.manual_seed(0)
    factor, f_mu = torch.randn(3, 4, rank).double(), torch.randn(3, 4).double()
    weights = torch.rand(rank).double().add(0.5).requires_grad_()

    def covariance(w):
        return (factor * w) @ factor.mT

    V = covariance(weights).detach()
    S = square_root(V)
    torch.testing.assert_close(S @ S, V)
    torch.testing.assert_close(S, S.mT)
    if rank:
        assert torch.autograd.gradcheck(lambda w: square_root(covariance(w)), (weights,), atol=1e-6)
    for n_noises in (3, 1):  # each example's own, or shared
        noise = torch.randn(5, n_noises, 4).double()
        samples = gaussian_samples(f_mu, V, noise)
        for b in range(3):
            expected = f_mu[b] + noise[:, min(b, n_noises - 1)] @ S[b]
            torch.testing.assert_close(samples[:, b], expected)

"""Seeds against the Fisher's formula, also for very confident samples."""

import pytest
import torch

from laplace_lora_ext.likelihoods import LIKELIHOODS, Classification, Regression


def fisher(seeds) -> torch.Tensor:
    scaled = seeds.vectors.double() * seeds.weights.double()[..., None]
    return torch.einsum("sbi,sbj->bij", scaled, scaled)


def formula(logits: torch.Tensor) -> torch.Tensor:
    """`diag(p) - p pᵀ` in float64, with p (1 - p) from the log-probability of not p."""
    n_classes = logits.shape[-1]
    log_p = logits.double().log_softmax(-1)
    p = log_p.exp()
    itself = torch.eye(n_classes).bool()
    log_others = log_p[:, None].expand(-1, n_classes, -1).masked_fill(itself, -torch.inf)
    H = -p[..., None] * p[:, None]
    H[:, itself] = p * log_others.logsumexp(-1).exp()
    return H


@pytest.mark.parametrize("n_classes", [2, 3, 10])
@pytest.mark.parametrize("scale", [1, 10, 20])
def test_exact_seeds_keep_float32_accuracy_on_confident_samples(n_classes, scale):
    logits = scale * torch.randn(500, n_classes, generator=torch.Generator().manual_seed(0))
    seeds = Classification().exact_seeds(logits)
    assert seeds.vectors.shape == (n_classes - 1, 500, n_classes)
    expected = formula(logits)
    error = (fisher(seeds) - expected).abs().amax((1, 2)) / expected.abs().amax((1, 2))
    assert error.max() < 1e-5  # measured: 2e-6 at scale 10


def test_seed_vectors_are_of_order_one():
    logits = torch.tensor([[60.0, 0.0, -60.0], [0.0, 0.0, 0.0]])
    for seeds in (
        Classification().exact_seeds(logits),
        Classification().empirical_seeds(logits, torch.tensor([0, 1])),
        Classification().sampled_seeds(logits, 2),
    ):
        largest = seeds.vectors.abs().amax(-1)
        assert (largest <= 1.0 + 1e-6).all()
        assert (largest >= 0.5).all()


def test_exact_seeds_of_tied_classes():
    logits = torch.zeros(2, 4)
    torch.testing.assert_close(fisher(Classification().exact_seeds(logits)), formula(logits))


def test_regression_seeds_are_the_identity():
    seeds = Regression().exact_seeds(torch.randn(5, 3))
    torch.testing.assert_close(fisher(seeds), torch.eye(3).double().expand(5, 3, 3))


def test_empirical_seeds_are_gradients_of_the_loss():
    logits = 20 * torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(50) % 4
    precise = logits.double().requires_grad_()
    (gradient,) = torch.autograd.grad(
        torch.nn.functional.cross_entropy(precise, y, reduction="sum"), precise
    )
    seeds = Classification().empirical_seeds(logits, y)
    scaled = seeds.vectors[0].double() * seeds.weights[0].double()[:, None]
    # p_y - 1 itself cannot be had in float64 by subtraction; the other entries are p.
    torch.testing.assert_close(scaled, gradient, rtol=1e-4, atol=1e-15)
    regression = Regression().empirical_seeds(logits, torch.zeros(50, 4))
    torch.testing.assert_close(regression.vectors[0] * regression.weights[0][:, None], logits)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_sampled_seeds_are_unbiased(likelihood):
    torch.manual_seed(0)
    logits = torch.tensor([[1.0, 0.0, -0.5]])
    estimate = fisher(LIKELIHOODS[likelihood].sampled_seeds(logits, 40_000))[0]
    expected = formula(logits)[0] if likelihood == "classification" else torch.eye(3).double()
    torch.testing.assert_close(estimate, expected, rtol=0, atol=0.03)  # 4 standard errors


def test_sampled_seeds_follow_the_global_random_state():
    logits = torch.randn(20, 5)
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        draws.append(Classification().sampled_seeds(logits, 2).vectors)
    assert torch.equal(*draws)

"""The exact generalised Gauss-Newton matrix of a small model, by means that no library shares."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from scipy.optimize import minimize_scalar
from torch import nn

LOG_PRECISION_BOUNDS = (math.log(1e-6), math.log(1e6))


def jacobians(
    model: Callable[[Any], torch.Tensor], weights: Sequence[nn.Parameter], examples: Iterable[Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Differentiate the logits of batches of one example each, one class at a time.

    Returns the Jacobians `(N, C, P)` in the P numbers of the weights, and the logits `(N, C)`.
    """
    rows, outputs = [], []
    for example in examples:
        logits = model(example)[0]
        gradients = [torch.autograd.grad(f, weights, retain_graph=True) for f in logits]
        rows.append(torch.stack([torch.cat([g.flatten() for g in row]) for row in gradients]))
        outputs.append(logits.detach())
    return torch.stack(rows), torch.stack(outputs)


class DenseCurvature:
    """A block-diagonal curvature H, of dense blocks `(p, p)` whose p add up to P."""

    def __init__(self, blocks: Sequence[torch.Tensor]) -> None:
        self.blocks = list(blocks)
        self.sizes = [len(block) for block in self.blocks]

    @classmethod
    def of_softmax(
        cls, Js: torch.Tensor, logits: torch.Tensor, sizes: Sequence[int]
    ) -> "DenseCurvature":
        """Sum `Jᵀ (diag(p) - p pᵀ) J` over examples, within blocks of the given sizes."""
        p = logits.softmax(-1)
        fisher = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        return cls(
            [J.flatten(0, 1).mT @ (fisher @ J).flatten(0, 1) for J in Js.split(list(sizes), dim=-1)]
        )

    def covariance(self, Js: torch.Tensor, prior_precision: float) -> torch.Tensor:
        """Covariance `(N, C, C)` of the linearised logits, `J (H + λ I)⁻¹ Jᵀ`."""
        total = torch.zeros(())
        for root, J in zip(self._roots(prior_precision), Js.split(self.sizes, -1), strict=True):
            half = torch.linalg.solve_triangular(root, J.flatten(0, 1).mT, upper=False)
            half = half.mT.unflatten(0, J.shape[:2])
            total = total + half @ half.mT
        return total

    def log_det(self, prior_precision: float) -> float:
        """Log-determinant of `H + λ I`, in nats."""
        roots = self._roots(prior_precision)
        return sum(2 * root.diagonal().log().sum().item() for root in roots)

    def _roots(self, prior_precision: float) -> Iterable[torch.Tensor]:
        """Cholesky factors of the blocks of `H + λ I`, one at a time."""
        for block in self.blocks:
            yield torch.linalg.cholesky(block + prior_precision * torch.eye(len(block)).to(block))


def evidence_prior_precision(curvature: DenseCurvature, weights: torch.Tensor) -> float:
    """Scalar prior precision that maximises the Laplace evidence, with the prior mean 0.

    The λ with the least `log det(I + H / λ) + λ ‖w‖²`, for weights w where the loss is minimal.
    """
    eigenvalues = torch.cat([torch.linalg.eigvalsh(block) for block in curvature.blocks])
    eigenvalues = eigenvalues.clamp_min(0)
    scatter = weights.square().sum()

    def loss(log_precision: float) -> float:
        precision = math.exp(log_precision)
        return ((eigenvalues / precision).log1p().sum() + precision * scatter).item()

    found = minimize_scalar(loss, bounds=LOG_PRECISION_BOUNDS, method="bounded")
    return math.exp(found.x)  # pyright: ignore[reportAttributeAccessIssue]

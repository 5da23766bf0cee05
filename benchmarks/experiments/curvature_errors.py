"""The exact Gauss-Newton matrix, computed without any library's help, and distances from it."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from laplace.utils.matrix import KronDecomposed
from scipy.optimize import minimize_scalar
from torch import Tensor

KILOBYTES_OF_A_NUMBER = 0.004
LOG_PRECISION_BOUNDS = (math.log(1e-6), math.log(1e6))


def jacobians(
    model: Callable[[Any], Tensor], weights: Sequence[Any], examples: Iterable[Any]
) -> tuple[Tensor, Tensor]:
    """Jacobians `(N, C, P)` and logits `(N, C)` of examples that come one at a time."""
    rows, outputs = [], []
    for example in examples:
        logits = model(example)[0]
        gradients = [torch.autograd.grad(f, weights, retain_graph=True) for f in logits]
        rows.append(torch.stack([torch.cat([g.flatten() for g in row]) for row in gradients]))
        outputs.append(logits.detach())
    return torch.stack(rows), torch.stack(outputs)


class DenseCurvature:
    """A block-diagonal curvature H, of dense blocks `(p, p)` whose p add up to P."""

    def __init__(self, blocks: Sequence[Tensor]) -> None:
        self.blocks = list(blocks)

    @classmethod
    def of_softmax(cls, Js: Tensor, logits: Tensor, sizes: Sequence[int]) -> "DenseCurvature":
        """Sum `Jᵀ (diag(p) - p pᵀ) J` over examples, within blocks of the given sizes."""
        p = logits.softmax(-1)
        fisher = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        parts = Js.split(list(sizes), dim=-1)
        return cls([J.flatten(0, 1).mT @ (fisher @ J).flatten(0, 1) for J in parts])

    @classmethod
    def of_fit(cls, H: Any, sizes: Sequence[int]) -> "DenseCurvature":
        """A fitted curvature, diagonal or of Kronecker factors, in blocks of the given sizes."""
        dense = torch.diag(H) if isinstance(H, Tensor) else H.to_matrix()
        rows = dense.split(list(sizes))
        return cls([row.split(list(sizes), dim=1)[place] for place, row in enumerate(rows)])

    def covariance(self, Js: Tensor, prior_precision: float) -> Tensor:
        """Covariance `(N, C, C)` of the linearised logits, `J (H + λ I)⁻¹ Jᵀ`."""
        total = torch.zeros(())
        parts = Js.split([len(block) for block in self.blocks], dim=-1)
        for root, J in zip(self._roots(prior_precision), parts, strict=True):
            half = torch.linalg.solve_triangular(root, J.flatten(0, 1).mT, upper=False)
            half = half.mT.unflatten(0, J.shape[:2])
            total = total + half @ half.mT
        return total

    def log_det(self, prior_precision: float) -> float:
        """Log-determinant of `H + λ I`, in nats."""
        return sum(2 * root.diagonal().log().sum().item() for root in self._roots(prior_precision))

    def _roots(self, prior_precision: float) -> Iterable[Tensor]:
        """Cholesky factors of the blocks of `H + λ I`, one at a time."""
        for block in self.blocks:
            yield torch.linalg.cholesky(block + prior_precision * torch.eye(len(block)).to(block))


def evidence_prior_precision(curvature: DenseCurvature, weights: Tensor) -> float:
    """The λ with the highest evidence: it minimises `log det(I + H / λ) + λ ‖w‖²`."""
    eigenvalues = torch.cat([torch.linalg.eigvalsh(block) for block in curvature.blocks])
    eigenvalues = eigenvalues.clamp_min(0)
    scatter = weights.square().sum()

    def loss(log_precision: float) -> float:
        precision = math.exp(log_precision)
        return ((eigenvalues / precision).log1p().sum() + precision * scatter).item()

    found: Any = minimize_scalar(loss, bounds=LOG_PRECISION_BOUNDS, method="bounded")
    return math.exp(found.x)


def kilobytes_kept(H: Any) -> float:
    """Memory of a fitted curvature in float32: diagonal, the host's factors, or low-rank ones."""
    if isinstance(H, Tensor):
        factors: list[Any] = [[H]]
    elif isinstance(H, KronDecomposed):
        factors = [*H.eigenvectors, *H.eigenvalues]
    else:
        factors = [factor for block in H.blocks for factor in (block.small, block.large)]
    return KILOBYTES_OF_A_NUMBER * sum(part.numel() for factor in factors for part in factor)


def errors(
    found: DenseCurvature, exact: DenseCurvature, full: Tensor, Js: Tensor, λ: float
) -> dict[str, float]:
    """How far a posterior is from the exact one, relative to the exact one's figures.

    `full` is the covariance `(N, C, C)` from the full matrix, `Js` are the Jacobians of the same
    texts. The log-determinant's error is in nats per weight, and relative to `log det(I + H / λ)`.
    """

    def distance(parts: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
        squares = sum((a - b).square().sum().item() for a, b in zip(parts, exact, strict=True))
        return math.sqrt(squares / sum(b.square().sum().item() for b in exact))

    def trace(matrices: Iterable[Tensor]) -> float:
        return sum(matrix.trace().item() for matrix in matrices)

    weights = sum(len(block) for block in exact.blocks)
    covariance, exact_covariance = (each.covariance(Js, λ) for each in (found, exact))
    log_det = exact.log_det(λ)
    difference = abs(found.log_det(λ) - log_det)
    return {
        "block_error": distance(found.blocks, exact.blocks),
        "covariance_error": distance([covariance], [exact_covariance]),
        "full_covariance_error": distance([covariance], [full]),
        "log_det_error": difference / weights,
        "log_det_relative_error": difference / (log_det - weights * math.log(λ)),
        "trace_ratio": trace(found.blocks) / trace(exact.blocks),
        "covariance_trace_ratio": trace(covariance) / trace(exact_covariance),
    }

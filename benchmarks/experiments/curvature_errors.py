"""The exact Gauss-Newton matrix, by means that no library shares, and distances from it."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from laplace.utils.matrix import KronDecomposed
from scipy.optimize import minimize_scalar
from torch import Tensor

BYTES_OF_A_NUMBER = 4
LOG_PRECISION_BOUNDS = (math.log(1e-6), math.log(1e6))


def jacobians(
    model: Callable[[Any], Tensor], weights: Sequence[Any], examples: Iterable[Any]
) -> tuple[Tensor, Tensor]:
    """Jacobians `(N, C, P)` and logits `(N, C)` of batches of one example, a class at a time."""
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
        roots = self._roots(prior_precision)
        return sum(2 * root.diagonal().log().sum().item() for root in roots)

    def facts(self, Js: Tensor, λ: float) -> "PosteriorFacts":
        """What it says at the prior precision that its evidence chooses."""
        kept = sum(block.numel() for block in self.blocks)
        return PosteriorFacts(self.blocks, self.covariance(Js, λ), self.log_det(λ), kept, λ)

    def _roots(self, prior_precision: float) -> Iterable[Tensor]:
        """Cholesky factors of the blocks of `H + λ I`, one at a time."""
        for block in self.blocks:
            yield torch.linalg.cholesky(block + prior_precision * torch.eye(len(block)).to(block))


def evidence_prior_precision(curvature: DenseCurvature, weights: Tensor) -> float:
    """The λ that maximises the evidence: of least `log det(I + H / λ) + λ ‖w‖²` for weights w."""
    eigenvalues = torch.cat([torch.linalg.eigvalsh(block) for block in curvature.blocks])
    eigenvalues = eigenvalues.clamp_min(0)
    scatter = weights.square().sum()

    def loss(log_precision: float) -> float:
        precision = math.exp(log_precision)
        return ((eigenvalues / precision).log1p().sum() + precision * scatter).item()

    found: Any = minimize_scalar(loss, bounds=LOG_PRECISION_BOUNDS, method="bounded")
    return math.exp(found.x)


class PosteriorFacts(NamedTuple):
    """What a curvature H says at a prior precision λ."""

    blocks: Sequence[Tensor]  # (p, p), one for each LoRA weight
    covariance: Tensor  # (N, C, C), of the linearised logits of the test texts
    log_det: float  # of H + λ I, in nats
    numbers_kept: int  # after a fit, the weights themselves aside
    own_prior_precision: float  # that its own evidence would choose


def approximate_posterior(
    la: Any, sizes: Sequence[int], Js: Tensor, prior_precision: float
) -> PosteriorFacts:
    """Facts of a fitted approximation, for sizes of the weights and the test texts' Jacobians."""
    la.optimize_prior_precision(method="marglik")
    own = la.prior_precision.item()
    la.prior_precision = prior_precision
    dense = torch.diag(la.H) if isinstance(la.H, Tensor) else la.H.to_matrix()
    rows = dense.split(list(sizes))
    blocks = [row.split(list(sizes), dim=1)[place] for place, row in enumerate(rows)]
    log_det = la.log_det_posterior_precision.item()
    return PosteriorFacts(blocks, la.functional_variance(Js), log_det, numbers_kept(la.H), own)


def numbers_kept(H: Any) -> int:
    """Count the numbers in the tensors of a fitted curvature: diagonal, the host's, or low-rank."""
    if isinstance(H, Tensor):
        return H.numel()
    if isinstance(H, KronDecomposed):
        factors = [*H.eigenvectors, *H.eigenvalues]
    else:
        factors = [factor for block in H.blocks for factor in (block.small, block.large)]
    return sum(tensor.numel() for factor in factors for tensor in factor)


def errors(
    found: PosteriorFacts, exact: PosteriorFacts, full_covariance: Tensor, λ: float
) -> dict[str, float]:
    """Measure how far a posterior is from the exact ones, in units of their figures.

    The log-determinant's error is in nats per weight, and in units of `log det(I + H / λ)`.
    """

    def distance(parts: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
        squares = sum((a - b).square().sum().item() for a, b in zip(parts, exact, strict=True))
        return math.sqrt(squares / sum(b.square().sum().item() for b in exact))

    def trace(matrices: Iterable[Tensor]) -> float:
        return sum(matrix.trace().item() for matrix in matrices)

    weights = sum(len(block) for block in exact.blocks)
    difference = abs(found.log_det - exact.log_det)
    return {
        "block_error": distance(found.blocks, exact.blocks),
        "covariance_error": distance([found.covariance], [exact.covariance]),
        "full_covariance_error": distance([found.covariance], [full_covariance]),
        "log_det_error": difference / weights,
        "log_det_relative_error": difference / (exact.log_det - weights * math.log(λ)),
        "trace_ratio": trace(found.blocks) / trace(exact.blocks),
        "covariance_trace_ratio": trace(found.covariance) / trace(exact.covariance),
        "own_prior_precision_ratio": found.own_prior_precision / λ,
        "kilobytes": found.numbers_kept * BYTES_OF_A_NUMBER / 1000,
    }

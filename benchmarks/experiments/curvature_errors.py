"""What a curvature says of the posterior, and how far it is from what the exact one says."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from laplace.utils.matrix import KronDecomposed

from benchmarks.experiments.exact_curvature import DenseCurvature
from laplace_lora_ext import LowRankKronDecomposed

BYTES_OF_A_NUMBER = 4

AnyCurvature = torch.Tensor | KronDecomposed | LowRankKronDecomposed


@dataclass(frozen=True)
class PosteriorFacts:
    """What a curvature H says at a prior precision λ.

    The `blocks` `(p, p)` of H, one for each LoRA weight; the `covariance` `(N, C, C)` of the
    linearised logits of the test texts; the `log_det` of `H + λ I` in nats; how many numbers are
    kept for it after a fit, the weights themselves aside; the λ that its own evidence would choose.
    """

    blocks: list[torch.Tensor]
    covariance: torch.Tensor
    log_det: float
    numbers_kept: int
    own_prior_precision: float


def exact_posterior(
    curvature: DenseCurvature, Js: torch.Tensor, prior_precision: float
) -> PosteriorFacts:
    """Facts of an exact curvature, at the prior precision that its evidence chooses."""
    return PosteriorFacts(
        blocks=curvature.blocks,
        covariance=curvature.covariance(Js, prior_precision),
        log_det=curvature.log_det(prior_precision),
        numbers_kept=sum(block.numel() for block in curvature.blocks),
        own_prior_precision=prior_precision,
    )


def approximate_posterior(
    la: Any, sizes: Sequence[int], Js: torch.Tensor, prior_precision: float
) -> PosteriorFacts:
    """Facts of a fitted Laplace approximation, whose prior precision is changed.

    `sizes` are the numbers in each LoRA weight, `Js` `(N, C, P)` the test texts' Jacobians.
    """
    la.optimize_prior_precision(method="marglik")
    own_prior_precision = la.prior_precision.item()
    la.prior_precision = prior_precision
    return PosteriorFacts(
        blocks=dense_blocks(la.H, sizes),
        covariance=la.functional_variance(Js),
        log_det=la.log_det_posterior_precision.item(),
        numbers_kept=numbers_kept(la.H),
        own_prior_precision=own_prior_precision,
    )


def dense_blocks(H: AnyCurvature, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Diagonal blocks `(p, p)` of a fitted curvature, one for each LoRA weight."""
    dense = torch.diag(H) if isinstance(H, torch.Tensor) else H.to_matrix()
    ends = list(accumulate(sizes))
    return [
        dense[end - size : end, end - size : end] for size, end in zip(sizes, ends, strict=True)
    ]


def numbers_kept(H: AnyCurvature) -> int:
    """Count the numbers in a fitted curvature's tensors."""
    if isinstance(H, torch.Tensor):
        return H.numel()
    if isinstance(H, KronDecomposed):
        factors = [*H.eigenvectors, *H.eigenvalues]
    else:
        factors = [factor for block in H.blocks for factor in (block.small, block.large)]
    return sum(tensor.numel() for factor in factors for tensor in factor)


def errors(
    approximate: PosteriorFacts,
    exact: PosteriorFacts,
    full_covariance: torch.Tensor,
    prior_precision: float,
) -> dict[str, float]:
    """Measure how far a posterior is from the exact ones: within blocks, and of all weights.

    Errors of blocks and covariances are Frobenius norms of differences, over all blocks or all
    texts, in units of the exact one's norm. That of the log-determinant is in nats per weight, the
    relative one in units of `log det(I + H / λ)`, the term of the evidence. Ratios are in units of
    the exact figure; what is kept is counted in float32.
    """
    weights = sum(len(block) for block in exact.blocks)
    difference = abs(approximate.log_det - exact.log_det)
    gained = exact.log_det - weights * math.log(prior_precision)
    return {
        "block_error": _distance(approximate.blocks, exact.blocks),
        "covariance_error": _distance([approximate.covariance], [exact.covariance]),
        "full_covariance_error": _distance([approximate.covariance], [full_covariance]),
        "log_det_error": difference / weights,
        "log_det_relative_error": difference / gained,
        "trace_ratio": _trace(approximate.blocks) / _trace(exact.blocks),
        "covariance_trace_ratio": _trace(approximate.covariance) / _trace(exact.covariance),
        "own_prior_precision_ratio": approximate.own_prior_precision / prior_precision,
        "kilobytes": approximate.numbers_kept * BYTES_OF_A_NUMBER / 1000,
    }


def _distance(parts: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    squares = sum((a - b).square().sum().item() for a, b in zip(parts, exact, strict=True))
    return math.sqrt(squares / sum(b.square().sum().item() for b in exact))


def _trace(matrices: Iterable[torch.Tensor]) -> float:
    return sum(matrix.trace().item() for matrix in matrices)

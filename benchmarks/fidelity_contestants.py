"""The approximations that are compared, and how far each is from the exact curvature."""

import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from laplace import Laplace
from laplace.utils.matrix import KronDecomposed

from benchmarks.exact_curvature import DenseCurvature
from laplace_lora_ext import LowRankKronDecomposed
from laplace_lora_ext.curvature.backend import LowRankKronInterface
from laplace_lora_ext.curvature.statistics import KFAC_APPROX
from laplace_lora_ext.models.logits_model import LogitsModel

KEYWORDS = ("kfac_approx", "rank", "tail")
_PARAMETERS = inspect.signature(LowRankKronInterface).parameters
DEFAULTS: dict[str, Any] = {keyword: _PARAMETERS[keyword].default for keyword in KEYWORDS}

BYTES_OF_A_NUMBER = 4

Curvature = torch.Tensor | KronDecomposed | LowRankKronDecomposed


@dataclass(frozen=True)
class Contestant:
    """One way to approximate the curvature.

    Attributes
    ----------
    name : str
        How the tables call it.
    hessian_structure : str
        Of the Laplace class.
    settings : dict
        `backend_kwargs`; empty for the host's structures.
    """

    name: str
    hessian_structure: str
    settings: dict[str, Any]

    @property
    def is_default(self) -> bool:
        """Whether these are the library's own choices."""
        return self.settings == DEFAULTS


def all_contestants(ranks: Iterable[int], hidden_size: int) -> Iterator[Contestant]:
    """The library's settings at every rank, their limits of full rank, and the host's structures.

    Parameters
    ----------
    ranks : iterable of int
        Ranks of the large factors; the default's is added if it is not among them.
    hidden_size : int
        The full rank, at which nothing is left for a tail.

    Yields
    ------
    contestant : Contestant
    """
    for kfac_approx in KFAC_APPROX:
        for rank in sorted({*ranks, DEFAULTS["rank"]}):
            for tail in (True, False):
                name = f"{kfac_approx}, rank {rank}" + (", tail" if tail else "")
                settings = {"kfac_approx": kfac_approx, "rank": rank, "tail": tail}
                yield Contestant(name, "lowrank_kron", settings)
        settings = {"kfac_approx": kfac_approx, "rank": hidden_size, "tail": False}
        yield Contestant(f"{kfac_approx}, full rank", "lowrank_kron", settings)
    yield Contestant("stock Kron", "kron", {})
    yield Contestant("stock diag", "diag", {})


def fitted(contestant: Contestant, model: LogitsModel, loader: Iterable[Any]) -> Any:
    """A Laplace approximation that is fitted on batches, through the public interface.

    Parameters
    ----------
    contestant : Contestant
        Which one.
    model : LogitsModel
        The trained model, in the precision of the curvature.
    loader : iterable
        Training batches.

    Returns
    -------
    la : LoRALaplace
    """
    keywords: dict[str, Any] = {}
    if contestant.settings:
        keywords["backend_kwargs"] = contestant.settings
    la: Any = Laplace(
        model.model,
        "classification",
        "lora",
        contestant.hessian_structure,
        class_token_ids=model.class_token_ids,
        **keywords,
    )
    la.fit(loader)
    return la


@dataclass(frozen=True)
class Posterior:
    """What a curvature H says at a prior precision λ.

    Attributes
    ----------
    blocks : list of torch.Tensor
        `(p, p)`, H of each LoRA weight.
    covariance : torch.Tensor
        `(N, C, C)`, of the linearised logits of the test texts.
    log_det : float
        Of `H + λ I`, in nats.
    numbers_kept : int
        Numbers that are held for it after a fit, the weights themselves aside.
    own_prior_precision : float
        The λ that its own evidence would choose.
    """

    blocks: list[torch.Tensor]
    covariance: torch.Tensor
    log_det: float
    numbers_kept: int
    own_prior_precision: float


def exact_posterior(
    curvature: DenseCurvature, Js: torch.Tensor, prior_precision: float
) -> Posterior:
    """The posterior of an exact curvature, at the prior precision that its evidence chooses."""
    return Posterior(
        blocks=curvature.blocks,
        covariance=curvature.covariance(Js, prior_precision),
        log_det=curvature.log_det(prior_precision),
        numbers_kept=sum(block.numel() for block in curvature.blocks),
        own_prior_precision=prior_precision,
    )


def approximate_posterior(
    la: Any, sizes: Sequence[int], Js: torch.Tensor, prior_precision: float
) -> Posterior:
    """The posterior of a fitted Laplace approximation.

    Parameters
    ----------
    la : LoRALaplace
        Fitted; its prior precision is changed.
    sizes : sequence of int
        Numbers in each LoRA weight.
    Js : torch.Tensor
        `(N, C, P)`, Jacobians of the test texts' logits.
    prior_precision : float
        λ.
    """
    la.optimize_prior_precision(method="marglik")
    own_prior_precision = la.prior_precision.item()
    la.prior_precision = prior_precision
    return Posterior(
        blocks=dense_blocks(la.H, sizes),
        covariance=la.functional_variance(Js),
        log_det=la.log_det_posterior_precision.item(),
        numbers_kept=numbers_kept(la.H),
        own_prior_precision=own_prior_precision,
    )


def dense_blocks(H: Curvature, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Diagonal blocks `(p, p)` of a fitted curvature, one for each LoRA weight."""
    dense = torch.diag(H) if isinstance(H, torch.Tensor) else H.to_matrix()
    ends = list(accumulate(sizes))
    return [
        dense[end - size : end, end - size : end] for size, end in zip(sizes, ends, strict=True)
    ]


def numbers_kept(H: Curvature) -> int:
    """Count the numbers in a fitted curvature's tensors."""
    if isinstance(H, torch.Tensor):
        return H.numel()
    if isinstance(H, KronDecomposed):
        factors = [*H.eigenvectors, *H.eigenvalues]
    else:
        factors = [factor for block in H.blocks for factor in (block.small, block.large)]
    return sum(tensor.numel() for factor in factors for tensor in factor)


def errors(
    posterior: Posterior,
    block_diagonal: Posterior,
    full_covariance: torch.Tensor,
    prior_precision: float,
) -> dict[str, float]:
    """Measure how far a posterior is from the exact ones.

    Parameters
    ----------
    posterior : Posterior
        Of an approximation.
    block_diagonal : Posterior
        Of the exact GGN within blocks.
    full_covariance : torch.Tensor
        `(N, C, C)`, of the exact GGN of all weights.
    prior_precision : float
        λ, that of all of them.

    Returns
    -------
    figures : dict of float
        ``block_error``, ``covariance_error`` and ``full_covariance_error``: Frobenius norms of
        differences, over all blocks or all texts, in units of the exact one's norm;
        ``log_det_error``: nats per weight; ``log_det_relative_error``: the same in units of
        `log det(I + H / λ)`, the term of the evidence; ``trace_ratio`` of the curvatures, and
        ``covariance_trace_ratio``; ``own_prior_precision_ratio``: the λ of its own evidence in
        units of λ; ``kilobytes`` kept in float32.
    """
    exact = block_diagonal
    weights = sum(len(block) for block in exact.blocks)
    difference = abs(posterior.log_det - exact.log_det)
    return {
        "block_error": _distance(posterior.blocks, exact.blocks),
        "covariance_error": _distance([posterior.covariance], [exact.covariance]),
        "full_covariance_error": _distance([posterior.covariance], [full_covariance]),
        "log_det_error": difference / weights,
        "log_det_relative_error": difference
        / (exact.log_det - weights * math.log(prior_precision)),
        "trace_ratio": _trace(posterior.blocks) / _trace(exact.blocks),
        "covariance_trace_ratio": _trace(posterior.covariance) / _trace(exact.covariance),
        "own_prior_precision_ratio": posterior.own_prior_precision / prior_precision,
        "kilobytes": posterior.numbers_kept * BYTES_OF_A_NUMBER / 1000,
    }


def _distance(parts: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Frobenius norm of the difference, in units of that of the exact parts."""
    squares = sum((a - b).square().sum().item() for a, b in zip(parts, exact, strict=True))
    return math.sqrt(squares / sum(b.square().sum().item() for b in exact))


def _trace(matrices: Iterable[torch.Tensor]) -> float:
    return sum(matrix.trace().item() for matrix in matrices)

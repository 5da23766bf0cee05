"""How a draw changes a model's logits: passes with other weights, and how to combine them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
import torch.autograd.forward_ad as forward_ad

from laplace_lora_ext.models.weights import Values


@dataclass(frozen=True)
class Draw:
    """A draw of the posterior, ready for passes.

    Attributes
    ----------
    weights : list of Values
        the weights for each pass that the draw takes
    combine : callable
        makes the draw's logits from the trained model's and those of the passes
    """

    weights: list[Values]
    combine: Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]


class Perturbation(Protocol):
    """Turns the trained weights and a direction δ into a `Draw`, for use within `passes()`."""

    def passes(self) -> AbstractContextManager[None]: ...

    def draw(self, values: Values, direction: Values) -> Draw: ...


@dataclass(frozen=True)
class CentralDifference:
    """The linearised model's logits `f + Jδ`, with Jδ from two passes by any kernel.

    Parameters
    ----------
    step : float
        length of the step to either side, relative to the norm of all LoRA weights
    """

    step: float

    def passes(self) -> AbstractContextManager[None]:
        return nullcontext()

    def draw(self, values: Values, direction: Values) -> Draw:
        h = self.step * _length(values) / _length(direction)
        return Draw(
            [
                [v + sign * h * d for v, d in zip(values, direction, strict=True)]
                for sign in (1, -1)
            ],
            lambda f, outputs: f + (outputs[0] - outputs[1]) / (2 * h),
        )


@dataclass(frozen=True)
class ForwardMode:
    """The linearised model's logits `f + Jδ`, with Jδ from one pass of forward-mode derivatives.

    Fused attention has no such derivatives, so PyTorch's plain kernel runs instead.
    """

    @contextmanager
    def passes(self) -> Iterator[None]:
        with forward_ad.dual_level(), _plain_attention():
            yield

    def draw(self, values: Values, direction: Values) -> Draw:
        duals = [
            forward_ad.make_dual(v, d.to(v.dtype)) for v, d in zip(values, direction, strict=True)
        ]

        def combine(f: torch.Tensor, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
            tangent = forward_ad.unpack_dual(outputs[0]).tangent
            if tangent is None:
                raise RuntimeError("forward-mode derivatives do not reach the logits")
            return f + tangent

        return Draw([duals], combine)


@dataclass(frozen=True)
class SampledWeights:
    """The model's own logits with drawn weights, like those of a sampled adapter on a server."""

    def passes(self) -> AbstractContextManager[None]:
        return nullcontext()

    def draw(self, values: Values, direction: Values) -> Draw:
        drawn = [v + d.to(v.dtype) for v, d in zip(values, direction, strict=True)]
        return Draw([drawn], lambda f, outputs: outputs[0])


Passes = Callable[[Iterable[Values]], Iterable[torch.Tensor]]
"""Takes LoRA weights of some passes, and returns a batch's logits with each."""


def drawn_logits(
    way: Perturbation,
    values: Values,
    directions: Iterable[Values],
    passes: Passes,
    f: torch.Tensor,
    at_once: int = 1,
) -> Iterator[torch.Tensor]:
    """Logits of each draw, `at_once` in memory; `f` are those of the trained model."""
    directions = iter(directions)
    while some := list(islice(directions, at_once)):
        with way.passes():
            draws = [way.draw(values, direction) for direction in some]
            outputs = passes(weights for draw in draws for weights in draw.weights)
            logits = list(combined(draws, iter(outputs), f))
        yield from logits


def combined(
    draws: Iterable[Draw], outputs: Iterator[torch.Tensor], f: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Logits of each draw, whose passes come one after the other."""
    for draw in draws:
        yield draw.combine(f, [next(outputs) for _ in draw.weights])


def _length(values: Values) -> float:
    return float(sum(value.double().square().sum().cpu() for value in values) ** 0.5)


def _plain_attention() -> AbstractContextManager[Any]:
    attention = getattr(torch.nn, "attention", None)
    if attention is None:  # before PyTorch 2.3
        return torch.backends.cuda.sdp_kernel(enable_flash=False, enable_mem_efficient=False)
    return attention.sdpa_kernel(attention.SDPBackend.MATH)

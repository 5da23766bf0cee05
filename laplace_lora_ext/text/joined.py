"""Passes with weights of their own as one batch, where that gives what each gives alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch

from laplace_lora_ext.models.lora_layers import Block
from laplace_lora_ext.models.tokens_model import TokensModel
from laplace_lora_ext.models.weights import LoRAWeights, Values
from laplace_lora_ext.text.perturbations import Perturbation, drawn_logits

TOKENS_AT_ONCE = 2048  # which the passes of a batch read together
_LOGITS_AT_ONCE = 2**25

_ERROR = 0.05  # of logits, relative to what other weights change


class TextPasses:
    """Passes of a batch of texts with other LoRA weights.

    Parameters
    ----------
    model : TokensModel
    blocks : sequence of Block
    batch : Mapping
    """

    def __init__(
        self, model: TokensModel, blocks: Sequence[Block], batch: Mapping[str, Any]
    ) -> None:
        self._weights = LoRAWeights(model, blocks)
        self._batch, self._known = batch, model.layouts

    def drawn(
        self, way: Perturbation, directions: Iterable[Values], n_draws: int, f: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Logits `(N, V)` of each of so many draws, from as few batches as memory allows.

        The trained model's logits are `f`. Not more draws' logits are in memory than the passes of
        one batch have, however many draws there are.
        """
        at_once = self._at_once(n_draws, f)
        passes = partial(self._logits, at_once=at_once)
        return drawn_logits(way, self._weights.values, directions, passes, f, at_once)

    def _at_once(self, n_draws: int, f: torch.Tensor) -> int:
        values = list(self._batch.values())
        if not all(
            isinstance(of, torch.Tensor) and of.shape[:-1] == values[0].shape[:1] for of in values
        ):
            return 1
        n_tokens = max(of.numel() for of in values)
        at_once = min(n_draws, TOKENS_AT_ONCE // n_tokens, _LOGITS_AT_ONCE // f.numel())
        return at_once if at_once > 1 and self._can_join() else 1

    def _can_join(self) -> bool:
        """Whether passes as one batch are right; the first batch with such inputs proves it."""
        given = "joined texts", *sorted(self._batch)
        if given not in self._known:
            self._known[given] = joins(self._weights, self._joined)
        return self._known[given]

    def _logits(self, each: Iterable[Values], at_once: int) -> Iterator[torch.Tensor]:
        each = iter(each)
        while some := list(islice(each, at_once)):
            yield from self._joined(some)

    def _joined(self, each: Sequence[Values]) -> Sequence[torch.Tensor]:
        if len(each) == 1:
            return [self._weights.run(self._batch, each[0])]
        n_rows = len(next(iter(self._batch.values())))
        of_all = {name: values.repeat(len(each), 1) for name, values in self._batch.items()}
        weights = [torch.stack(of) for of in zip(*each, strict=True)]
        return self._weights.call_joined(weights, n_rows, (of_all,), {}).chunk(len(each))


def joins(
    weights: LoRAWeights, logits: Callable[[Sequence[Values]], Sequence[torch.Tensor]]
) -> bool:
    """Whether two passes with very different weights are the same as one batch and alone.

    Draws of a narrow posterior differ by less than rounding, and would prove anything.

    Parameters
    ----------
    weights : LoRAWeights
    logits : callable
        takes the weights of passes, and returns the logits of each, from one batch
    """
    if not weights.are_plain:
        return False
    each = [[factor * value for value in weights.values] for factor in (0, 3)]
    try:
        joined = logits(each)
    except Exception:  # a model that wants its rows otherwise
        return False
    alone = [logits([values])[0] for values in each]
    worst = max((a - b).float().norm() for a, b in zip(joined, alone, strict=True))
    return bool(worst <= _ERROR * (alone[1] - alone[0]).float().norm())

"""Logits of a vocabulary, a stated number of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformers import PreTrainedModel

from laplace_lora_ext.models.answers import first_places, reading_at
from laplace_lora_ext.models.running import forwards_replaced

MOST_ROWS = 1024
"""Most rows of a vocabulary's logits that a part of a batch has."""


Reading = Callable[[Tensor], Tensor]
"""Takes logits `(n, V)` of some rows, and returns `(n, ...)` that is read off them."""


@dataclass(frozen=True)
class Part:
    """Some of each text's labelled tokens, counted from its first one."""

    first: int
    size: int

    def of(self, labelled: Tensor) -> Tensor:
        """Mark which of the labelled ones among places `(B, T)` are of this part."""
        number = labelled.cumsum(1) - 1
        return labelled & (number >= self.first) & (number < self.first + self.size)


def parts_of(places: Tensor) -> list[Part]:
    """Divide the true ones of places `(N, T)`: a part has at most `MOST_ROWS`.

    Of more texts N than that, a part has a place of each.
    """
    size = max(1, MOST_ROWS // len(places))
    most = int(places.sum(1).max())
    return [Part(first, size) for first in range(0, most, size)]


def logits_at(
    transformer: PreTrainedModel | None,
    places: Tensor,
    call: Callable[[], Any],
) -> Tensor:
    """Call a model, and return logits `(n, V)` at the true ones of `(N, T)` places."""
    index, is_true = first_places(places)
    with reading_at(transformer, index, places.shape[1]) as read_off:
        logits = read_off(call())
    if is_true.all():
        return logits.flatten(0, 1)  # without a copy
    return logits[is_true.to(logits.device)]


def read_in_parts(
    transformer: PreTrainedModel,
    places: Tensor,
    parts: Sequence[Part],
    logits: Callable[[Part], Tensor],
    reading: Callable[[Tensor], Reading],
) -> tuple[Tensor, Tensor]:
    """Read `(n, ...)` off logits at the true ones of `(N, T)` places; keep no logits.

    Also returns the logits `(N, V)` at each text's first place. `logits` takes a part,
    and calls the model: the layers before the output layer run once. `reading` takes an
    index of rows, and tells how to read these. A backward pass computes the logits of
    one part after the other anew.
    """
    remembered = Remembered(transformer)

    def compute(part: Part, read: Reading) -> Tensor:
        with remembered.running():
            return read(logits(part))

    # The layers before the output layer run here, and never again.
    with remembered.running():
        at_first = logits(Part(first=0, size=1))
    rows: list[Tensor] = []
    of_parts: list[Tensor] = []
    for part in parts:
        own = part.of(places)[places].nonzero()[:, 0]
        # A model's hooks are to see whole passes.
        with set_checkpoint_early_stop(False):
            of_part = checkpoint(compute, part, reading(own), use_reentrant=False)
        rows.append(own)
        of_parts.append(of_part)
    in_order = torch.cat(rows).argsort()
    read = torch.cat(of_parts)
    return read[in_order.to(read.device)], at_first


class Remembered:
    """What modules before the output layer returned, so that it alone runs again.

    It is of one batch and one set of weights. What a model does behind the layer, such
    as capping its logits, it does again too.
    """

    def __init__(self, transformer: PreTrainedModel) -> None:
        self._layer = transformer.get_output_embeddings()
        self._others: list[nn.Module] = []
        if isinstance(self._layer, nn.Module):
            self._others = _modules_beside(self._layer, transformer)
        self._outputs: list[_Output] = []  # of all calls of the others in a pass
        self._is_known = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Note what modules return in the first pass, and return it in later ones."""
        calls = iter(self._outputs)
        is_behind = False

        def remembered(
            _: nn.Module,
            forward: Callable[..., Any],
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if is_behind:
                return forward(*args, **kwargs)
            if self._is_known:
                return next(calls).unchanged()
            output = forward(*args, **kwargs)
            self._outputs.append(_Output(output, _versions(output)))
            return output

        def note(*_: Any) -> None:
            nonlocal is_behind
            is_behind = True

        with ExitStack() as hooks:
            if isinstance(self._layer, nn.Module):
                hooks.callback(self._layer.register_forward_hook(note).remove)
            hooks.enter_context(forwards_replaced(self._others, remembered))
            yield
        self._is_known = True


@dataclass(frozen=True)
class _Output:
    """What a module returned, and how often its tensors had been changed by then."""

    value: Any
    versions: list[int]

    def unchanged(self) -> Any:
        """Return the value; refuse one that the model has overwritten since."""
        if _versions(self.value) != self.versions:
            raise NotImplementedError(
                "The model overwrites what its modules return before the output layer: "
                "write x = x * y in place of x *= y in its forward pass, or pass "
                "batches with fewer labelled tokens."
            )
        return self.value


def _versions(value: Any) -> list[int]:
    versions: list[int] = []
    for leaf in tree_leaves(value):
        # Tensors of inference mode can't tell.
        if isinstance(leaf, Tensor) and not leaf.is_inference():
            versions.append(leaf._version)
    return versions


def _modules_beside(layer: nn.Module, module: nn.Module) -> list[nn.Module]:
    """List the largest modules within another one that do not contain a layer."""
    beside: list[nn.Module] = []
    for child in module.children():
        if all(part is not layer for part in child.modules()):
            beside.append(child)
        elif child is not layer:
            beside += _modules_beside(layer, child)
    return beside

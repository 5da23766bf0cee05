"""The graph of a forward pass, and backward passes that bring gradients to calls of layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import accumulate
from operator import mul
from typing import Any

import torch

from laplace_lora_ext.models.positions import Positions
from laplace_lora_ext.passes.calls import Call
from laplace_lora_ext.passes.order import Sizes, follows_numbers, reorders
from laplace_lora_ext.passes.unbatched import Unbatched

# Rows that a backward pass should have: with fewer, products leave the machine half idle, and what
# is done once a pass and layer counts. Measured on two cores by `python -m benchmarks cost`.
_ROWS = 512

Deliver = Callable[[int, dict[int, torch.Tensor]], None]
"""Takes the index of a layer, and gradients `(S, ...)` of its outputs by the place of the call."""


class Graph:
    """Logits, and the calls of each layer on the way to them.

    Parameters
    ----------
    logits : torch.Tensor
        `(B, C)`
    calls : sequence of lists of Call
        of each layer

    Attributes
    ----------
    logits : torch.Tensor
    calls : sequence of lists of Call
        those that the logits depend on
    """

    def __init__(self, logits: torch.Tensor, calls: Sequence[Sequence[Call]]) -> None:
        nodes = _nodes_behind(logits)
        self.logits = logits
        self._following = [node for node in nodes if follows_numbers(node)]
        self._leaves = [node.variable for node in nodes if hasattr(node, "variable")]
        self.calls = [[call for call in of_layer if call.edge.node in nodes] for of_layer in calls]

    @property
    def is_recomputed(self) -> bool:
        """Whether backward passes compute parts of the model again."""
        return any(call.is_recomputed for calls in self.calls for call in calls)

    def reorders(self, positions: Positions) -> bool:
        """Whether the batch's contents may have given examples other rows than another batch's."""
        rows = {positions.n_examples, positions.n_rows}
        seen = [call.rows for calls in self.calls for call in calls if call.rows]
        parts = {n for shape in seen for n in _parts(shape, rows)} - {*rows, positions.n_tokens}
        sizes = Sizes(rows | {shape[0] for shape in seen}, parts)
        return any(reorders(node, sizes) for node in self._following)

    @property
    def seeds_at_once(self) -> int:
        """How many seeds one backward pass should take."""
        rows = max(sum(call.rows.numel() for call in calls) for calls in self.calls)
        return max(1, _ROWS // max(1, rows))

    def back_propagate(self, vectors: torch.Tensor, deliver: Deliver, **graph: bool) -> None:
        """One backward pass with all `(S, B, C)` vectors at once.

        The gradients of each layer that they reach are delivered as soon as they are known, so
        that few are held at a time. Keywords are those of `torch.autograd.grad`.
        """
        if not any(self.calls):
            return
        waiting: dict[int, dict[int, torch.Tensor]] = {}

        def arrive(index: int, place: int, gradients: torch.Tensor) -> None:
            of_layer = waiting.setdefault(index, {})
            of_layer[place] = gradients
            if len(of_layer) == len(self.calls[index]):
                deliver(index, waiting.pop(index))
                _release(self.calls[index])

        def hook(index: int, place: int, of_node: Sequence[torch.Tensor | None]) -> None:
            gradients = of_node[self.calls[index][place].edge.output_nr]
            if gradients is None:
                return
            if len(vectors) == 1:
                arrive(index, place, gradients[None])
            else:
                Unbatched.apply(gradients, partial(arrive, index, place))

        # Asked for every output, autograd would hold all of their gradients to the end. The leaves
        # are few, and every other output lies on the way to one of them.
        def grad(vector: torch.Tensor) -> torch.Tensor:
            torch.autograd.grad(self.logits, self._leaves, vector, allow_unused=True, **graph)
            return vector.new_zeros(())

        handles = [
            call.edge.node.register_prehook(partial(hook, index, place))
            for index, calls in enumerate(self.calls)
            for place, call in enumerate(calls)
        ]
        try:
            with warnings.catch_warnings():
                # Where an operation has no batching rule, vmap runs it once a seed: as good.
                warnings.filterwarnings("ignore", "There is a performance drop")
                grad(vectors[0]) if len(vectors) == 1 else torch.func.vmap(grad)(vectors)
            for index in sorted(waiting):  # not all of the layer's calls had a gradient
                deliver(index, waiting[index])
        finally:
            for handle in handles:
                handle.remove()
            for calls in self.calls:
                _release(calls)

    def reaches(self, calls: Sequence[Call], vector: torch.Tensor) -> bool:
        """Whether a `(C,)` vector gives any of some calls a gradient other than 0."""
        gradients = torch.autograd.grad(
            self.logits,
            [call.edge for call in calls],
            vector.expand_as(self.logits),
            retain_graph=True,
            allow_unused=True,
        )
        return any(gradient is not None and bool(gradient.any()) for gradient in gradients)


def _release(calls: Sequence[Call]) -> None:
    """Let go of inputs that can be computed again."""
    for call in calls:
        call.release()


def _parts(shape: torch.Size, rows: Collection[int]) -> Iterator[int]:
    """How many windows, and how many positions of all of them, rows of a shape may have."""
    if len(shape) > 1 and (shape[0] in rows or shape[1] not in rows):  # else positions come first
        yield from accumulate(shape, mul)


def _nodes_behind(result: torch.Tensor) -> dict[Any, None]:
    """Nodes of the graph that a result comes from, in the order in which they are met."""
    nodes: dict[Any, None] = {result.grad_fn: None} if result.grad_fn is not None else {}
    waiting = list(nodes)
    while waiting:
        for following, _ in waiting.pop().next_functions:
            if following is not None and following not in nodes:
                nodes[following] = None
                waiting.append(following)
    return nodes

"""The graph of a forward pass: calls of layers, and backward passes that bring their gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

# Rows that a backward pass should have: with fewer, products leave the machine half idle, and what
# is done once a pass and layer counts. Measured on two cores by `python -m benchmarks cost`.
_ROWS = 512


class Call(NamedTuple):
    """What a layer was given, and what it has made of it."""

    input: torch.Tensor
    output: torch.Tensor
    version: int

    @property
    def is_overwritten(self) -> bool:
        """Whether the model has changed the input since, as `x += block(x)` does."""
        return _version(self.input) != self.version


def record_call(
    calls: list[Call],
    copies: bool,
    layer: nn.Module,
    args: tuple[torch.Tensor, ...],
    output: torch.Tensor,
) -> None:
    """A forward hook that keeps a call, or copies its input, and lets its output require grad."""
    if not output.requires_grad:
        output.requires_grad_()
    inputs = args[0].clone() if copies else args[0]
    calls.append(Call(inputs, output, _version(inputs)))


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
        self._leaves = [node.variable for node in nodes if hasattr(node, "variable")]
        leaves = {id(leaf) for leaf in self._leaves}
        self.calls = [
            [call for call in of_layer if call.output.grad_fn in nodes or id(call.output) in leaves]
            for of_layer in calls
        ]

    @property
    def seeds_at_once(self) -> int:
        """How many seeds one backward pass should take."""
        rows = max(sum(call.output.shape[:-1].numel() for call in calls) for calls in self.calls)
        return max(1, _ROWS // max(1, rows))

    def back_propagate(
        self, vectors: torch.Tensor, deliver: Callable[[Arrivals], None], **graph: bool
    ) -> None:
        """One backward pass with all `(S, B, C)` vectors at once.

        The gradients of each layer that they reach are delivered as soon as they are known, so
        that those of a single layer are held. Keywords are those of `torch.autograd.grad`.
        """
        if not any(self.calls):
            return

        # Asked for every output, autograd would hold all of their gradients to the end. The leaves
        # are few, and every other output lies on the way to one of them.
        def grad(vector: torch.Tensor) -> torch.Tensor:
            torch.autograd.grad(self.logits, self._leaves, vector, allow_unused=True, **graph)
            return vector.new_zeros(())

        arrivals = [Arrivals(index, calls, deliver) for index, calls in enumerate(self.calls)]
        hook = Arrivals.add if len(vectors) == 1 else Arrivals.add_batched
        handles = [
            call.output.register_hook(partial(hook, of_layer, place))
            for of_layer, calls in zip(arrivals, self.calls, strict=True)
            for place, call in enumerate(calls)
        ]
        try:
            with warnings.catch_warnings():
                # Where an operation has no batching rule, vmap runs it once a seed: as good.
                warnings.filterwarnings("ignore", "There is a performance drop")
                grad(vectors[0]) if len(vectors) == 1 else torch.func.vmap(grad)(vectors)
            for of_layer in arrivals:
                if of_layer.gradients:  # the logits don't depend on all of the layer's calls
                    deliver(of_layer)
        finally:
            for handle in handles:
                handle.remove()

    def reaches(self, calls: Sequence[Call], vector: torch.Tensor) -> bool:
        """Whether a gradient other than 0 comes to any of some calls from a `(C,)` vector."""
        gradients = torch.autograd.grad(
            self.logits,
            [call.output for call in calls],
            vector.expand_as(self.logits),
            retain_graph=True,
            allow_unused=True,
        )
        return any(gradient is not None and bool(gradient.any()) for gradient in gradients)


class Arrivals:
    """Gathers the gradients of one layer's calls, and delivers them when all are there.

    Attributes
    ----------
    index : int
        of the layer
    gradients : dict
        from the place of a call to its output's gradients `(S, ...)`
    """

    def __init__(self, index: int, calls: list[Call], deliver: Callable[[Arrivals], None]) -> None:
        self.index = index
        self.gradients: dict[int, torch.Tensor] = {}
        self._calls = calls
        self._deliver = deliver

    def taken(self) -> dict[int, torch.Tensor]:
        """The gradients, of which none stays here."""
        gradients, self.gradients = self.gradients, {}
        return gradients

    def add(self, place: int, gradients: torch.Tensor) -> None:
        """A hook: gradients of a call's output, of one seed or `(S, ...)` of several."""
        one = gradients.ndim == self._calls[place].output.ndim
        self.gradients[place] = gradients[None] if one else gradients
        if len(self.gradients) == len(self._calls):
            self._deliver(self)

    def add_batched(self, place: int, gradients: torch.Tensor) -> None:
        """A hook under `vmap` over seeds."""
        _Unbatch.apply(gradients, partial(self.add, place))


class _Unbatch(torch.autograd.Function):
    """Hands a gradient under `vmap` to a function, with its leading seed dimension."""

    @staticmethod
    def forward(gradients: torch.Tensor, receive: Callable) -> torch.Tensor:
        receive(gradients)
        return gradients.new_zeros(())

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        """Nothing is differentiated."""

    @staticmethod
    def vmap(info, in_dims, gradients, receive):
        receive(gradients if in_dims[0] is None else gradients.movedim(in_dims[0], 0))
        return gradients.new_zeros(()), None


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


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

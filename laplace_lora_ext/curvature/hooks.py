"""Captures the inputs of layers and the gradients of their outputs, and computes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

Visit = Callable[[int, list[torch.Tensor], list[torch.Tensor]], None]
"""Receives a layer's index, its inputs and its output gradients: one of each a call."""


class Tape:
    """Records the calls of linear layers within a `with` block, for backward passes after it.

    No parameter needs to require grad: the outputs of the first layers are made the leaves of
    the graph. Nothing is added to any `.grad`. Leaving the block removes every hook and lets go
    of every tensor.

    Parameters
    ----------
    layers : sequence of torch.nn.Linear
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = list(layers)
        self._handles: list[RemovableHandle] = []
        self._calls: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self._layers]

    def __enter__(self) -> Tape:
        for layer, calls in zip(self._layers, self._calls, strict=True):
            self._handles.append(layer.register_forward_hook(partial(_record, calls)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._calls.clear()

    def inputs(self, index: int) -> list[torch.Tensor]:
        """Inputs of one layer, one a call; empty where the layer was not called."""
        return [input_ for input_, _ in self._calls[index]]

    def outputs(self, index: int) -> list[torch.Tensor]:
        """Outputs of one layer, one a call."""
        return [output for _, output in self._calls[index]]

    def backward(
        self,
        logits: torch.Tensor,
        seeds: torch.Tensor,
        visit: Visit,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> None:
        """One backward pass from `(B, C)` logits with all `(S, B, C)` seeds at once.

        `visit` is called once for each layer that the gradients reach, as soon as they are known,
        with gradients of shape `(S, *output.shape)`: what needs those of all seeds together can
        be computed while those of a single layer are held.
        """
        # Asked for every output, autograd would hold all of their gradients to the end. The leaves
        # are few, and every other output lies on the way to one of them.
        leaves = _leaves(logits)

        def grad(seed: torch.Tensor) -> torch.Tensor:
            torch.autograd.grad(
                logits,
                leaves,
                seed,
                retain_graph=retain_graph,
                create_graph=create_graph,
                allow_unused=True,
            )
            return seed.new_zeros(())

        if len(seeds) == 1:
            self._run(visit, _deliver, lambda: grad(seeds[0]))
            return
        with warnings.catch_warnings():
            # Where an operation has no batching rule, vmap runs it once a seed: as good.
            warnings.filterwarnings("ignore", "There is a performance drop")
            self._run(visit, _deliver_batched, lambda: torch.func.vmap(grad)(seeds))

    def _run(self, visit: Visit, deliver: Callable, backward: Callable[[], object]) -> None:
        pending = [_Arrivals(index, calls, visit) for index, calls in enumerate(self._calls)]
        handles = [
            output.register_hook(partial(deliver, partial(arrivals.add, call)))
            for arrivals, calls in zip(pending, self._calls, strict=True)
            for call, (_, output) in enumerate(calls)
        ]
        try:
            backward()
            for arrivals in pending:
                arrivals.flush()
        finally:
            for handle in handles:
                handle.remove()


def _leaves(result: torch.Tensor) -> list[torch.Tensor]:
    """Leaf tensors of the graph that a result comes from."""
    leaves, waiting = [], [result.grad_fn]
    seen = {None, result.grad_fn}
    while waiting:
        node: Any = waiting.pop()
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return leaves


class _Arrivals:
    """Gathers the gradients of one layer's calls, and passes them on when all are there."""

    def __init__(
        self, index: int, calls: list[tuple[torch.Tensor, torch.Tensor]], visit: Visit
    ) -> None:
        self._index = index
        self._calls = calls
        self._visit = visit
        self._gradients: dict[int, torch.Tensor] = {}

    def add(self, call: int, gradients: torch.Tensor) -> None:
        self._gradients[call] = gradients
        if len(self._gradients) == len(self._calls):
            self.flush()

    def flush(self) -> None:
        """Pass on what has arrived; a call that the logits don't depend on never does."""
        gradients, self._gradients = self._gradients, {}
        if gradients:
            inputs = [self._calls[call][0] for call in gradients]
            self._visit(self._index, inputs, list(gradients.values()))


class _Unbatch(torch.autograd.Function):
    """Hands a gradient under `vmap` to a function, with its leading seed dimension."""

    @staticmethod
    def forward(gradient: torch.Tensor, receive: Callable) -> torch.Tensor:
        receive(gradient.unsqueeze(0))
        return gradient.new_zeros(())

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        """Nothing is differentiated."""

    @staticmethod
    def vmap(info, in_dims, gradient, receive):
        batched = in_dims[0] is not None
        receive(gradient.movedim(in_dims[0], 0) if batched else gradient.unsqueeze(0))
        return gradient.new_zeros(()), None


def _record(
    calls: list[tuple[torch.Tensor, torch.Tensor]],
    layer: nn.Module,
    args: tuple[torch.Tensor, ...],
    output: torch.Tensor,
) -> None:
    if not output.requires_grad:
        output.requires_grad_()
    calls.append((args[0], output))


def _deliver(receive: Callable[[torch.Tensor], None], gradient: torch.Tensor) -> None:
    receive(gradient.unsqueeze(0))


def _deliver_batched(receive: Callable[[torch.Tensor], None], gradient: torch.Tensor) -> None:
    _Unbatch.apply(gradient, receive)

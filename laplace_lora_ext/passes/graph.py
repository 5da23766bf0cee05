"""The graph of a forward pass, and backward passes that bring gradients to calls of layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.weights import Block

# Rows that a backward pass should have: with fewer, products leave the machine half idle, and what
# is done once a pass and layer counts. Measured on two cores by `python -m benchmarks cost`.
_ROWS = 512

Deliver = Callable[[slice, int, Mapping[int, torch.Tensor]], None]
"""Takes seeds, the index of a layer, and gradients `(S, ...)` of its outputs by their calls."""


def check_logits(logits: torch.Tensor) -> None:
    """Refuse logits that are not finite."""
    # A finite sum says so many times faster, which tells for logits of a vocabulary.
    if not (torch.isfinite(logits.detach().sum()) or torch.isfinite(logits).all()):
        raise ValueError("non-finite logits: check the batch, and the model's precision")


def check_differentiable(*logits_require_grad: bool) -> None:
    """Refuse passes if no logits require grad."""
    if not any(logits_require_grad):
        raise RuntimeError(
            "No gradient of the logits reaches the LoRA layers: remove .detach() or "
            "torch.no_grad() from the model's forward pass."
        )


class Call:
    """A call of a layer."""

    def __init__(self, inputs: torch.Tensor, output: torch.Tensor) -> None:
        self.input = inputs
        self.rows = output.shape[:-1]  # shape of what it returned, without their size m
        self.edge = get_gradient_edge(output)  # where its gradients arrive
        self.version = _version(inputs)


class Graph:
    """Logits `(B, C)`, and the calls of each layer that they depend on."""

    def __init__(self, logits: torch.Tensor, calls: Sequence[Sequence[Call]]) -> None:
        nodes = _nodes_behind(logits)
        self.logits = logits
        self.calls = [[call for call in of_layer if call.edge.node in nodes] for of_layer in calls]
        self._leaves = [node.variable for node in nodes if hasattr(node, "variable")]

    @property
    def seeds_at_once(self) -> int:
        """How many seeds one backward pass should take."""
        rows = max(sum(call.rows.numel() for call in calls) for calls in self.calls)
        return max(1, _ROWS // max(1, rows))

    def back_propagate(
        self,
        vectors: torch.Tensor,
        at_once: int,
        deliver: Deliver,
        *,
        retain_graph: bool,
        create_graph: bool = False,
    ) -> None:
        """Backward passes with `(S, B, C)` vectors, `at_once` of them in each.

        The gradients of each layer that they reach are delivered as soon as they are known, so
        that few are in memory at a time.
        """
        for start in range(0, len(vectors) if any(self.calls) else 0, at_once):
            seeds = slice(start, start + at_once)
            again = retain_graph or seeds.stop < len(vectors)
            options = {"retain_graph": again, "create_graph": create_graph}
            self._pass(vectors[seeds], partial(deliver, seeds), options)

    def _pass(self, vectors: torch.Tensor, deliver: Callable, options: dict[str, bool]) -> None:
        waiting: dict[int, dict[int, torch.Tensor]] = {}

        def arrive(index: int, place: int, gradients: torch.Tensor) -> None:
            of_layer = waiting.setdefault(index, {})
            of_layer[place] = gradients
            if len(of_layer) == len(self.calls[index]):
                deliver(index, waiting.pop(index))

        def hook(index: int, place: int, of_node: Sequence[torch.Tensor | None]) -> None:
            gradients = of_node[self.calls[index][place].edge.output_nr]
            if gradients is None:
                return
            if len(vectors) == 1:
                arrive(index, place, gradients[None])
            else:
                _OutsideVmap.apply(gradients, partial(arrive, index, place))

        # Asked for every output, autograd would keep all of their gradients to the end. The leaves
        # are few, and every other output lies on the way to one of them.
        def grad(vector: torch.Tensor) -> torch.Tensor:
            torch.autograd.grad(self.logits, self._leaves, vector, allow_unused=True, **options)
            return vector.new_zeros(())

        with ExitStack() as hooks, warnings.catch_warnings():
            # Where an operation has no batching rule, vmap runs it once a seed: as good.
            warnings.filterwarnings("ignore", "There is a performance drop")
            for index, calls in enumerate(self.calls):
                for place, call in enumerate(calls):
                    handle = call.edge.node.register_prehook(partial(hook, index, place))
                    hooks.callback(handle.remove)
            grad(vectors[0]) if len(vectors) == 1 else torch.func.vmap(grad)(vectors)
            for index in sorted(waiting):  # not all of the layer's calls had a gradient
                deliver(index, waiting[index])


class _OutsideVmap(torch.autograd.Function):
    """Hands a tensor to a function that then runs outside of `torch.func.vmap`.

    The tensor gets a leading dimension: that of `vmap`, or one of size 1.
    """

    @staticmethod
    def forward(tensor: torch.Tensor, receive: Callable) -> torch.Tensor:
        receive(tensor[None])
        return tensor.new_zeros(())

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        """Nothing is differentiated."""

    @staticmethod
    def vmap(info, in_dims, tensor, receive):
        receive(tensor[None] if in_dims[0] is None else tensor.movedim(in_dims[0], 0))
        return tensor.new_zeros(()), None


def run(model: LogitsModel, blocks: Sequence[Block], x: Any) -> Graph:
    """Call a model on a batch, and note the calls of the blocks' layers; errors as of `record`."""
    calls: list[list[Call]] = [[] for _ in blocks]
    called: set[int] = set()

    def hear(
        index: int, _: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> torch.Tensor:
        called.add(index)
        if not torch.is_grad_enabled():  # as where an indexer of sparse attention picks keys
            return output
        if not output.requires_grad:  # nothing trainable comes before the layer
            output = output + output.new_zeros((), requires_grad=True)
        calls[index].append(Call(args[0], output))
        return output

    with ExitStack() as hooks:
        for index, block in enumerate(blocks):  # before the user's hooks, which may change outputs
            handle = block.layer.register_forward_hook(partial(hear, index), prepend=True)
            hooks.callback(handle.remove)
        logits = model(x)
    check_logits(logits)
    if called:
        check_differentiable(logits.requires_grad)
    for block, of_layer in zip(blocks, calls, strict=True):
        if any(_version(call.input) != call.version for call in of_layer):
            raise NotImplementedError(
                f"The model overwrites what LoRA layer {block.name} was given: write x = x + y in "
                "place of x += y, or leave the layer out with target_modules."
            )
    return Graph(logits, calls)


def _nodes_behind(result: torch.Tensor) -> set[Any]:
    """Nodes of the graph that a result comes from."""
    nodes: set[Any] = {result.grad_fn} - {None}
    waiting = list(nodes)
    while waiting:
        before = {node for node, _ in waiting.pop().next_functions}
        waiting += before - nodes - {None}
        nodes |= before
    return nodes - {None}


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version

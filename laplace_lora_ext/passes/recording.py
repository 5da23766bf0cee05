"""Records the calls of LoRA layers in a forward pass, and brings back their output gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from laplace_lora_ext.likelihoods import Seeds
from laplace_lora_ext.messages import naming
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import Block
from laplace_lora_ext.models.positions import Positions
from laplace_lora_ext.passes.checks import (
    check_activations,
    check_called,
    check_differentiable,
    check_logits,
)

# Rows that a backward pass should have: with fewer, products leave the machine half idle, and what
# is done once a pass and layer counts. Measured on two cores by `python -m benchmarks cost`.
_ROWS = 512


@dataclass(frozen=True)
class Rows:
    """What one layer has seen, and what came back to it: by example, in the statistics' dtype.

    Attributes
    ----------
    index : int
        of the block
    a : torch.Tensor
        inputs, `(B, T, n)`; T counts the positions of all calls of the layer
    g : torch.Tensor
        gradients of the outputs, `(S, B, T, m)`; without any where inputs are visited alone
    """

    index: int
    a: torch.Tensor
    g: torch.Tensor
    _n_calls: int
    _positions: Positions

    def valid(self) -> torch.Tensor | None:
        """`(B, T)` booleans, false at padding; None where nothing is padded.

        Raises
        ------
        NotImplementedError
            If the layer does not see the positions of a padded batch's mask.
        """
        mask = self._positions.valid(self.a.shape[1] // self._n_calls)
        return None if mask is None else mask.repeat(1, self._n_calls)


class Recording:
    """A forward pass whose LoRA layers are recorded; made by `record`.

    No parameter needs to require grad: the outputs of the first layers are the leaves of the
    graph. Nothing is added to any `.grad`.

    Attributes
    ----------
    blocks : sequence of Block
    logits : torch.Tensor
        `(B, C)`, part of the graph
    """

    logits: torch.Tensor
    _positions: Positions

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks
        self._calls: list[list[_Call]] = [[] for _ in blocks]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record calls within; on leaving, no hook is left and no tensor kept."""
        handles = [
            block.layer.register_forward_hook(partial(_record, calls))
            for block, calls in zip(self.blocks, self._calls, strict=True)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._calls.clear()

    def run(self, model: LogitsModel, x: Any) -> None:
        """Call the model on a batch, and check what it did."""
        self.logits = model(x)
        check_called(self.blocks, [len(calls) for calls in self._calls])
        if not torch.isfinite(self.logits).all():
            for block, calls in zip(self.blocks, self._calls, strict=True):
                for call in calls:
                    check_activations(block, *call)
        check_logits(self.logits)
        check_differentiable(self.logits.requires_grad)
        self._positions = model.positions(x, len(self.logits))

    def visit_inputs(self, visit: Callable[[list[int], Rows], None]) -> None:
        """Call `visit(indices, rows)` for each call of the layers of blocks `indices`.

        Blocks whose layers were given the same tensors, as `lora_A` of query, key and value
        projections are, come together.
        """
        sharing: dict[tuple[Any, ...], list[int]] = {}
        for index, block in enumerate(self.blocks):
            calls = tuple(id(call.input) for call in self._calls[index])
            sharing.setdefault((block.statistics_dtype, *calls), []).append(index)
        for indices in sharing.values():
            first = indices[0]
            for call in self._calls[first]:
                with self._mathematics(first, call.input.device):
                    a = self._joined(first, [call.input.detach()])
                    visit(indices, Rows(first, a, a.new_empty(0), 1, self._positions))

    def backward(self, seeds: Seeds, visit: Callable[[Rows], None]) -> None:
        """Back-propagate seeds, and visit each layer with gradients that the weights have scaled.

        Each pass takes one seed, unless so few rows go through the layers that more at once make
        it faster.
        """
        rows = max(sum(a.shape[:-1].numel() for a, _ in calls) for calls in self._calls)
        at_once = max(1, _ROWS // max(1, rows))
        groups = list(zip(*(part.split(at_once) for part in seeds), strict=True))
        for number, (vectors, weights) in enumerate(groups):
            self._pass(vectors, weights, visit, retain_graph=number < len(groups) - 1)

    def backward_every_output(self, visit: Callable[[Rows], None], create_graph: bool) -> None:
        """Back-propagate all outputs at once: `g` is `(C, B, T, m)`."""
        n_samples, n_outputs = self.logits.shape
        identity = torch.eye(n_outputs).to(self.logits)[:, None].expand(-1, n_samples, -1)
        self._pass(identity, None, visit, create_graph=create_graph)

    def _pass(
        self,
        vectors: torch.Tensor,
        weights: torch.Tensor | None,
        visit: Callable[[Rows], None],
        **graph: bool,
    ) -> None:
        """One backward pass with all `(S, B, C)` vectors at once.

        Each layer that gradients reach is visited as soon as they are known, so that those of a
        single layer are held.
        """
        # Asked for every output, autograd would hold all of their gradients to the end. The leaves
        # are few, and every other output lies on the way to one of them.
        leaves = _leaves(self.logits)

        def grad(vector: torch.Tensor) -> torch.Tensor:
            torch.autograd.grad(self.logits, leaves, vector, allow_unused=True, **graph)
            return vector.new_zeros(())

        deliver = partial(self._deliver, weights, visit)
        arrivals = [_Arrivals(index, calls, deliver) for index, calls in enumerate(self._calls)]
        hook = _Arrivals.add if len(vectors) == 1 else _Arrivals.add_batched
        handles = [
            call.output.register_hook(partial(hook, of_layer, place))
            for of_layer, calls in zip(arrivals, self._calls, strict=True)
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

    def _deliver(
        self, weights: torch.Tensor | None, visit: Callable[[Rows], None], arrived: _Arrivals
    ) -> None:
        """Arrange what a layer's calls saw and got by example, join the calls, and scale."""
        index, gradients, arrived.gradients = arrived.index, arrived.gradients, {}
        with self._mathematics(index, next(iter(gradients.values())).device):
            inputs = [self._calls[index][place].input for place in gradients]
            a, g = self._joined(index, inputs), self._joined(index, gradients.values(), n_leading=1)
            if weights is not None:
                g = g * weights.to(g)[..., None, None]
            visit(Rows(index, a, g, len(inputs), self._positions))

    def _joined(
        self, index: int, calls: Iterable[torch.Tensor], n_leading: int = 0
    ) -> torch.Tensor:
        """Rows of a layer's calls by example, one after the other, in the statistics' dtype."""
        parts = [self._positions.arrange(call, n_leading) for call in calls]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
        return rows.to(self.blocks[index].statistics_dtype)

    @contextmanager
    def _mathematics(self, index: int, device: torch.device) -> Iterator[None]:
        """Full precision within; what goes wrong names the layer."""
        name = f"LoRA layer {self.blocks[index].name}"
        with naming(name), torch.autocast(device.type, enabled=False):
            yield


@contextmanager
def record(model: LogitsModel, blocks: Sequence[Block], x: Any) -> Iterator[Recording]:
    """Run the model on a batch and record the calls of the blocks' layers.

    Within the `with` block the model is in evaluation mode, and no parameter requires grad.

    Raises
    ------
    RuntimeError
        If a layer was not called, or the logits carry no gradient.
    ValueError
        If an activation or a logit is not finite.
    """
    recording = Recording(blocks)
    model.settle(x)
    with (
        model.prepared(),
        torch.inference_mode(False),
        torch.enable_grad(),
        recording.listening(),
    ):
        recording.run(model, x)
        yield recording


class _Call(NamedTuple):
    input: torch.Tensor
    output: torch.Tensor


class _Arrivals:
    """Gathers the gradients of one layer's calls, and delivers them when all are there."""

    def __init__(
        self, index: int, calls: list[_Call], deliver: Callable[[_Arrivals], None]
    ) -> None:
        self.index = index
        self.gradients: dict[int, torch.Tensor] = {}
        self._calls = calls
        self._deliver = deliver

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


def _record(
    calls: list[_Call], layer: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor
) -> None:
    if not output.requires_grad:
        output.requires_grad_()
    calls.append(_Call(args[0], output))


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

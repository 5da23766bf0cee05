"""Records the calls of LoRA layers in a forward pass, and brings back their output gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from laplace_lora_ext.likelihoods import Seeds
from laplace_lora_ext.messages import naming
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import Block
from laplace_lora_ext.models.positions import Positions
from laplace_lora_ext.passes.assignment import Assignment
from laplace_lora_ext.passes.calls import Heard, Listener
from laplace_lora_ext.passes.checks import (
    blame,
    check_differentiable,
    check_logits,
    is_finite,
)
from laplace_lora_ext.passes.graph import Graph
from laplace_lora_ext.passes.layouts import Layout

Directions = Callable[[torch.Tensor], torch.Tensor]
"""Takes logits `(B, C)`, and returns vectors `(S, B, C)` to back-propagate."""


def every_output(logits: torch.Tensor) -> torch.Tensor:
    """Each output by itself."""
    n_examples, n_outputs = logits.shape
    return torch.eye(n_outputs).to(logits)[:, None].expand(-1, n_examples, -1)


@dataclass(frozen=True)
class Rows:
    """Inputs of one layer and gradients of its outputs, by example, in the statistics' dtype.

    The examples are those of the batch, or one of them where they come one at a time.

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
    _calls: Sequence[tuple[Layout, int]]
    _positions: Positions

    def valid(self) -> torch.Tensor | None:
        """`(B, T)` booleans, false at padding; None where nothing is padded.

        A `NotImplementedError` if the mask can't be applied to the layer's rows, which may be in no
        fixed order or shared by examples.
        """
        masks = [layout.valid(length, self._positions) for layout, length in self._calls]
        if all(mask is None for mask in masks):
            return None
        everywhere = torch.ones(self.a.shape[:2], dtype=torch.bool, device=self.a.device)
        of_calls = everywhere.split([length for _, length in self._calls], dim=1)
        pairs = zip(of_calls, masks, strict=True)
        return torch.cat([call if mask is None else mask.to(call) for call, mask in pairs], dim=1)


class Recording:
    """A forward pass whose LoRA layers were recorded; made by `recorded`.

    No parameter needs to require grad: the outputs of the first layers are the leaves of the
    graph. Nothing is added to any `.grad`.

    Attributes
    ----------
    logits : torch.Tensor
        `(B, C)`, part of the graph
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        heard: Heard,
        graph: Graph,
        positions: Positions,
        assignment: Assignment,
    ) -> None:
        self.logits = graph.logits
        self._blocks = blocks
        self._heard = heard
        self._graph = graph
        self._positions = positions
        self._assignment = assignment

    @property
    def shares_rows(self) -> bool:
        """Whether some rows belong to several examples, which are back-propagated one at a time."""
        return self._assignment.shared is not None

    def forget(self) -> None:
        """Let go of all tensors but the logits' values; nothing can be back-propagated then."""
        self.logits = self.logits.detach()
        self._heard.forget()
        for name in ("_graph", "_assignment"):
            vars(self).pop(name, None)

    def visit_inputs(self, visit: Callable[[list[int], Rows], None]) -> None:
        """Call `visit(indices, rows)` for each call of the layers of blocks `indices`.

        Blocks whose layers were given the same tensors, as `lora_A` of query, key and value
        projections are, come together, unless they are convolutions with other patches.
        """
        if self._graph.is_recomputed:  # one backward pass brings all inputs

            def deliver(index: int, _: dict[int, torch.Tensor]) -> None:
                self._visit_inputs_of([index], visit)

            zeros = torch.zeros_like(self.logits)[None]
            return self._graph.back_propagate(zeros, deliver, retain_graph=True)
        sharing: dict[tuple[Any, ...], list[int]] = {}
        for index, block in enumerate(self._blocks):
            calls = tuple(call.input_key for call in self._graph.calls[index])
            rows = block.statistics_dtype, block.rows.input_map, *calls
            sharing.setdefault(rows, []).append(index)
        for indices in sharing.values():
            self._visit_inputs_of(indices, visit)

    def _visit_inputs_of(
        self, indices: list[int], visit: Callable[[list[int], Rows], None]
    ) -> None:
        """Visit inputs of layers that were given the same ones."""
        first = indices[0]
        for place, call in enumerate(self._graph.calls[first]):
            with self._mathematics(first, call.input.device):
                visit(indices, self._rows(first, {place: call.input.detach()}, {}))

    def backward(self, seeds: Seeds, visit: Callable[[Rows], None]) -> None:
        """Back-propagate seeds, and visit each layer with gradients that the weights have scaled.

        Each pass takes one seed, unless so few rows go through the layers that more at once make
        it faster. Where examples share rows, each pass takes the seeds of one of them.
        """
        at_once = self._graph.seeds_at_once
        groups = [
            group
            for part in self._apart(seeds)
            for group in zip(*(tensor.split(at_once) for tensor in part), strict=True)
        ]
        for number, (vectors, weights) in enumerate(groups):
            deliver = partial(self._deliver, weights, visit)
            self._graph.back_propagate(vectors, deliver, retain_graph=number < len(groups) - 1)

    def backward_every_output(
        self,
        visit: Callable[[Rows], None],
        create_graph: bool,
        directions: Directions = every_output,
    ) -> None:
        """Back-propagate all outputs, or S combinations of them, at once: `g` is `(S, B, T, m)`.

        Where examples share rows, it is `(S, 1, T, m)` of one example after the other.
        """
        vectors = directions(self.logits.detach())
        groups = self._apart(Seeds(vectors, vectors.new_ones(vectors.shape[:2])))
        deliver = partial(self._deliver, None, visit)
        for number, (vectors, _) in enumerate(groups):
            again = create_graph or number < len(groups) - 1
            self._graph.back_propagate(
                vectors, deliver, retain_graph=again, create_graph=create_graph
            )

    def _apart(self, seeds: Seeds) -> list[Seeds]:
        """The seeds, or those of each example where examples share rows."""
        if not self.shares_rows:
            return [seeds]
        n_examples = self._positions.n_examples
        itself = torch.eye(n_examples, dtype=torch.bool, device=self.logits.device)
        weights = seeds.weights.expand(-1, n_examples)
        return [
            Seeds(seeds.vectors * one[:, None], weights[:, n : n + 1])
            for n, one in enumerate(self._positions.logits_of(itself))
        ]

    def _deliver(
        self,
        weights: torch.Tensor | None,
        visit: Callable[[Rows], None],
        index: int,
        gradients: dict[int, torch.Tensor],
    ) -> None:
        """Arrange a layer's inputs and gradients by example, join its calls, and scale."""
        with self._mathematics(index, next(iter(gradients.values())).device):
            inputs = {place: self._graph.calls[index][place].input for place in gradients}
            rows = self._rows(index, inputs, gradients)
            if weights is not None:
                rows = replace(rows, g=rows.g * weights.to(rows.g)[..., None, None])
            visit(rows)

    def _rows(
        self, index: int, inputs: Mapping[int, torch.Tensor], gradients: Mapping[int, torch.Tensor]
    ) -> Rows:
        """Inputs and gradients of a layer's calls by example, one call after the other."""
        block, layouts = self._blocks[index], self._assignment.layouts[index]
        a = [
            layouts[place].arrange(block.rows.input_rows(of_call), self._positions)
            for place, of_call in inputs.items()
        ]
        g = [
            layouts[place].arrange(block.rows.output_rows(of_call), self._positions, n_leading=1)
            for place, of_call in gradients.items()
        ]
        calls = [(layouts[place], part.shape[1]) for place, part in zip(inputs, a, strict=True)]
        dtype = block.statistics_dtype
        return Rows(index, _joined(a, dtype), _joined(g, dtype), calls, self._positions)

    @contextmanager
    def _mathematics(self, index: int, device: torch.device) -> Iterator[None]:
        """Full precision within; what goes wrong names the layer."""
        name = f"LoRA layer {self._blocks[index].name}"
        with naming(name), torch.autocast(device.type, enabled=False):
            yield


def _joined(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Positions of several calls, one after the other; nothing where there is none."""
    if not parts:
        return torch.empty(0, dtype=dtype)
    return (parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=-2)).to(dtype)


def recorded(model: LogitsModel, blocks: Sequence[Block], listener: Listener, x: Any) -> Recording:
    """Call the model on a batch, check what it did, and find out whose rows are whose."""
    logits, heard = _passed(model, blocks, listener, x)
    try:
        if not is_finite(logits):
            blame(model, blocks, x)
            check_logits(logits)
        if heard.called:
            check_differentiable(logits.requires_grad)
        graph, positions = Graph(logits, heard.calls), model.positions(x, len(logits))
        assignment = Assignment(graph, blocks, positions, model.layouts)
    except BaseException:
        heard.forget()
        raise
    return Recording(blocks, heard, graph, positions, assignment)


def _passed(
    model: LogitsModel, blocks: Sequence[Block], listener: Listener, x: Any
) -> tuple[torch.Tensor, Heard]:
    """Logits, and the calls on the way; once more if the model overwrites a layer's inputs."""
    copied: set[str] = model.layouts.setdefault("copied inputs", set())
    while True:
        with listener.recording(copied) as heard:
            logits = model(x)
        overwritten = {
            block.name
            for block, calls in zip(blocks, heard.calls, strict=True)
            if any(call.is_overwritten for call in calls)
        }
        if overwritten <= copied:
            return logits, heard
        copied |= overwritten
        heard.forget()

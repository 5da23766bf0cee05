"""Records a forward pass, and brings back inputs and gradients of its LoRA layers by example."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from laplace_lora_ext.messages import naming
from laplace_lora_ext.models.batches import Positions, number_of_rows, part_of
from laplace_lora_ext.models.locks import unfused_attention
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.weights import Block
from laplace_lora_ext.passes.graph import Arrived, Graph, Taps, tapped
from laplace_lora_ext.passes.proof import is_proven

# What models raise on inputs that are no example, or not alone.
_NO_EXAMPLE = (RuntimeError, ValueError, TypeError, LookupError, AssertionError)

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
    """

    index: int  # of the block
    a: torch.Tensor  # inputs `(B, T, n)`; T counts the positions of all calls of the layer
    g: torch.Tensor  # gradients of outputs `(S, B, T, m)`; none where inputs are visited alone
    lengths: Sequence[int]  # positions of each call
    positions: Positions | None  # None where rows of other examples are among them
    example: int | None = None  # its number, where they come one at a time
    seeds: slice | None = None  # which of the vectors g belongs to

    def valid(self) -> torch.Tensor | None:
        """`(B, T)` booleans, false at padding; None where nothing is padded.

        A `NotImplementedError` if the mask can't be applied to the layer's rows.
        """
        if self.positions is None:
            raise NotImplementedError(
                "logits of an example depend on rows of others: use "
                'kfac_approx="gradient", or leave this layer out with target_modules'
            )
        masks = [self.positions.valid(length) for length in self.lengths]
        if all(mask is None for mask in masks):
            return None
        everywhere = torch.ones(self.a.shape[:2], dtype=torch.bool, device=self.a.device)
        of_calls = zip(everywhere.split(list(self.lengths), dim=1), masks, strict=True)
        return torch.cat([call if mask is None else mask.to(call) for call, mask in of_calls], 1)


@dataclass(frozen=True)
class _Part:
    """Examples that are back-propagated together: those of the batch, or one of them."""

    graph: Graph
    positions: Positions | None  # None if the graph is of other examples too, and all rows count
    example: int | None = None  # its number in the batch, if it is one
    logits: torch.Tensor | None = None  # `(N,)` booleans: the example's own among the batch's

    def vectors(self, of_batch: torch.Tensor) -> torch.Tensor:
        """`(S, N, C)` vectors for the logits of the graph."""
        if self.logits is None:
            return of_batch
        in_batch = self.positions is None
        return of_batch * self.logits[:, None] if in_batch else of_batch[:, self.logits]

    def weights(self, of_batch: torch.Tensor | None) -> torch.Tensor | None:
        """`(S, B)` weights of its examples."""
        if of_batch is None or self.example is None or of_batch.shape[1] == 1:
            return of_batch
        return of_batch[:, [self.example]]


class Recording:
    """A batch whose LoRA layers are recorded; made by `record`.

    No parameter needs to require grad: the outputs of the first layers are the leaves of the
    graph. Nothing is added to any `.grad`. Where examples come one at a time, all layers are
    visited for one of them before the next one is recorded.
    """

    def __init__(
        self, logits: torch.Tensor, blocks: Sequence[Block], parts: Callable[[], Iterable[_Part]]
    ) -> None:
        self.logits = logits  # (B, C)
        self._blocks = blocks
        self._parts = parts

    def backward(
        self,
        vectors: torch.Tensor,
        weights: torch.Tensor | None,
        visit: Callable[[Rows], None],
        *,
        visit_inputs: Callable[[list[int], Rows], None] | None = None,
        at_once: int | None = None,
        create_graph: bool = False,
    ) -> None:
        """Back-propagate `Seeds`, and visit each layer with its inputs and scaled gradients.

        Without weights, gradients are not scaled. `visit_inputs` is called before, with the inputs
        of each call of the layers of some blocks: those whose layers were given the same tensors,
        as `lora_A` of query, key and value projections are, come together. A pass takes `at_once`
        vectors, by default one, unless so few rows go through the layers that more are faster.
        """
        for part in self._parts():
            if visit_inputs is not None:
                self._visit_inputs(part, visit_inputs)
            part.graph.back_propagate(
                part.vectors(vectors),
                at_once or part.graph.seeds_at_once,
                partial(self._deliver, part, part.weights(weights), visit),
                retain_graph=create_graph or part.positions is None,
                create_graph=create_graph,
            )
            del part  # before the next one is recorded

    @torch.no_grad()
    def _visit_inputs(self, part: _Part, visit: Callable[[list[int], Rows], None]) -> None:
        sharing: dict[tuple[Any, ...], list[int]] = {}
        for index, block in enumerate(self._blocks):
            inputs = (id(call.inputs) for call in part.graph.calls[index])
            sharing.setdefault((block.statistics_dtype, *inputs), []).append(index)
        for indices in sharing.values():
            for call in part.graph.calls[indices[0]]:
                assert call.inputs is not None  # `record` was asked to keep them
                with self._mathematics(indices[0], call.inputs.device):
                    visit(indices, self._rows(part, indices[0], [call.inputs], []))

    def _deliver(
        self,
        part: _Part,
        weights: torch.Tensor | None,
        visit: Callable[[Rows], None],
        seeds: slice,
        index: int,
        arrived: Arrived,
    ) -> None:
        """Arrange a layer's inputs and gradients by example, join its calls, and scale."""
        inputs = [inputs for inputs, _ in arrived.values()]
        gradients = [gradient for _, gradient in arrived.values()]
        with self._mathematics(index, gradients[0].device):
            rows = replace(self._rows(part, index, inputs, gradients), seeds=seeds)
            if weights is not None:
                rows = replace(rows, g=rows.g * weights[seeds, :, None, None].to(rows.g))
            visit(rows)

    def _rows(
        self,
        part: _Part,
        index: int,
        inputs: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
    ) -> Rows:
        """Inputs and gradients of a layer's calls by example, one call after the other."""
        block = self._blocks[index]
        n_examples = 1 if part.positions is None else part.positions.n_examples
        a = [rows.reshape(n_examples, -1, rows.shape[-1]) for rows in inputs]
        g = [rows.reshape(len(rows), n_examples, -1, rows.shape[-1]) for rows in gradients]
        lengths = [rows.shape[1] for rows in a]
        dtype = block.statistics_dtype
        of_layer = _joined(a, dtype), _joined(g, dtype)
        return Rows(index, *of_layer, lengths, part.positions, part.example)

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


@contextmanager
def record(
    model: LogitsModel,
    blocks: Sequence[Block],
    x: Any,
    create_graph: bool = False,
    keeps_inputs: bool = False,
) -> Iterator[Recording]:
    """Run the model on a batch and record the calls of the blocks' layers.

    Where the rows of some layer were not each example's own, as in DeBERTa or where a router picks
    them, examples are recorded one at a time. One whose logits are others than in the batch is
    back-propagated through the batch.

    With `create_graph`, gradients can be differentiated: torch's attention then runs without its
    fused kernels, which have no second derivatives, and nothing is checkpointed. Otherwise layers
    that the user's training checkpoints are checkpointed here too; who visits inputs before
    gradients asks for their being kept.

    Within the `with` block the model is in evaluation mode, and no parameter requires grad. A
    `RuntimeError` if the logits carry no gradient to the layers that were called; a `ValueError` if
    a number is not finite.
    """
    attention = unfused_attention() if create_graph else nullcontext()
    listening = tapped(model, blocks, checkpointed=not create_graph, keeps_inputs=keeps_inputs)
    with (
        model.prepared(),
        torch.inference_mode(False),
        torch.enable_grad(),
        attention,
        listening as taps,
    ):
        part = _whole(model, blocks, taps, x)
        if part is not None:
            yield Recording(part.graph.logits, blocks, lambda: [part])
        else:
            with torch.set_grad_enabled(create_graph):
                logits = model(x)
            yield Recording(logits, blocks, partial(_one_at_a_time, model, taps, x, logits))


def _whole(model: LogitsModel, blocks: Sequence[Block], taps: Taps, x: Any) -> _Part | None:
    """The batch as one part, unless its rows are not proven to be each example's own."""
    layouts = model.layouts
    if layouts.examples_apart and number_of_rows(x) != 1:
        return None
    graph = taps.run(x)
    positions = model.positions(x, len(graph.logits))
    if is_proven(graph, blocks, positions, layouts.proven):
        return _Part(graph, positions)
    layouts.examples_apart = True
    return None


def _one_at_a_time(model: LogitsModel, taps: Taps, x: Any, logits: torch.Tensor) -> Iterator[_Part]:
    """Each example by itself, or through the batch if it has other logits there, or only there."""
    positions, of_batch = model.positions(x, len(logits)), None
    itself = torch.eye(positions.n_examples, dtype=torch.bool, device=logits.device)
    for number, own in enumerate(positions.logits_of(itself)):
        if not own.any():  # a text without a label
            continue
        example = part_of(x, slice(number, number + 1), len(itself))
        graph, alone = None, logits.detach().clone()
        try:
            graph = taps.run(example)
            alone[own] = graph.logits.detach()
        except _NO_EXAMPLE:
            alone.fill_(torch.nan)
        if graph is not None and model.agree(logits.detach(), alone):
            yield _Part(graph, model.positions(example, len(graph.logits)), number, own)
        else:
            of_batch = of_batch or taps.run(x)
            yield _Part(of_batch, None, number, own)
        del graph

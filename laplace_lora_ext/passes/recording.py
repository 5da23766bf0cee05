"""Recorded batches: backward passes bring visitors what each example gave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laplace_lora_ext.messages import naming
from laplace_lora_ext.models.batches import Positions
from laplace_lora_ext.models.weights import Block
from laplace_lora_ext.passes.graph import Arrived, Graph
from laplace_lora_ext.tasks.task import Seeds


@dataclass(frozen=True)
class Turns:
    """Back-propagates one row of logits of each text at a time.

    So logits that share a text have gradients of their own.

    Attributes
    ----------
    owners : torch.Tensor
        `(N,)`, the text of each row
    numbers : torch.Tensor
        `(N,)`, in which turn each row has its vectors: its number among those of its
        text
    n_texts : int
        B
    n_turns : int
        as many as the text with the most rows has
    """

    owners: Tensor
    numbers: Tensor
    n_texts: int
    n_turns: int

    @classmethod
    def of(cls, positions: Positions) -> Turns | None:
        """Let the rows of a batch take turns; None where each text has one row."""
        owners = positions.owners_of_logits
        if owners is None:
            return None
        counts = owners.bincount(minlength=positions.n_examples)
        firsts = counts.cumsum(0) - counts
        # The rows of a text follow each other.
        numbers = torch.arange(len(owners), device=owners.device) - firsts[owners]
        return cls(owners, numbers, positions.n_examples, int(counts.max()))

    def vectors(self, of_rows: Tensor) -> Tensor:
        """Spread vectors `(S, N, C)` over the turns, `(turns S, N, C)`."""
        turns = torch.arange(self.n_turns, device=self.numbers.device)
        has_turn = (self.numbers == turns[:, None]).to(of_rows)
        return (has_turn[:, None, :, None] * of_rows).flatten(0, 1)

    def seeds(self, of_rows: Seeds) -> Seeds:
        """Spread seeds of rows over turns, with weights `(turns S, B)` of texts.

        Seeds with one weight for all rows belong together, and stay.
        """
        vectors, weights = of_rows
        if weights.shape[1] == 1:
            return of_rows
        of_texts = weights.new_zeros(self.n_turns, self.n_texts, len(weights))
        of_texts[self.numbers, self.owners] = weights.T
        of_turns = of_texts.transpose(1, 2).flatten(0, 1)
        return Seeds(self.vectors(vectors), of_turns)

    def of_rows(self, of_texts: Tensor) -> Tensor:
        """Take each row's part `(N, S, ...)` of all turns' `(B, turns S, ...)`."""
        by_turn = of_texts.unflatten(1, (self.n_turns, -1))
        return by_turn[
            self.owners.to(of_texts.device), self.numbers.to(of_texts.device)
        ]


@dataclass(frozen=True)
class RowPositions:
    """Where the rows of a layer's calls stand in texts, one call after another."""

    lengths: list[int]  # how many of each call
    of_batch: Positions | None  # None where rows of other examples are among them

    def valid(self, x: Tensor) -> Tensor:
        """Select the rows `(N, d)` of `(S, B, T, d)` that are no padding.

        A `NotImplementedError` if the mask can't be applied to the layer's rows.
        """
        if self.of_batch is None:
            raise NotImplementedError(
                "logits of an example depend on rows of others: use "
                'kfac_approx="gradient", or leave this layer out with target_modules'
            )
        _, n_examples, n_positions, _ = x.shape
        is_valid = torch.ones(
            n_examples,
            n_positions,
            dtype=torch.bool,
            device=x.device,
        )
        is_padded = False
        start = 0
        for length in self.lengths:
            mask = self.of_batch.valid(length)
            if mask is not None:
                is_valid[:, start : start + length] = mask
                is_padded = True
            start += length
        if not is_padded:  # selecting by booleans would wait for an accelerator
            return x.flatten(0, 2)
        return x[:, is_valid].flatten(0, 1)


@dataclass(frozen=True)
class Inputs:
    """One call's inputs, for all blocks that were given them.

    They are in the statistics' dtype.
    """

    indices: list[int]  # of the blocks
    a: Tensor  # `(B, T, n)`
    positions: RowPositions


@dataclass(frozen=True)
class Gradients:
    """A block's scaled gradients, by example, in the statistics' dtype.

    The examples are those of the batch, or one of them where they come one at a time.
    """

    index: int  # of the block
    example: int | None  # its number, where they come one at a time
    seeds: slice  # which of the vectors they belong to

    def of_weight(self) -> Tensor:
        """Return the gradients of the matrix, `(S, B, m, n)`."""
        raise NotImplementedError


@dataclass(frozen=True)
class GradientsOfRows(Gradients):
    """A layer's inputs, and gradients of its outputs."""

    # Inputs `(B, T, n)`; T counts the positions of all calls of the layer.
    a: Tensor
    g: Tensor  # gradients of outputs `(S, B, T, m)`
    positions: RowPositions

    def of_weight(self) -> Tensor:
        """Compute `Σ_t g_t a_tᵀ`."""
        return self.g.mT @ self.a


class Visitor:
    """Takes what a recorded batch brings to each block."""

    sees_inputs = False  # whether `inputs` is called, before any gradients

    def inputs(self, inputs: Inputs) -> None:
        """Take the inputs of one call, of all blocks that share them."""

    def gradients(self, gradients: Gradients) -> None:
        """Take a block's gradients of one or more seeds."""
        raise NotImplementedError


@dataclass(frozen=True)
class Part:
    """Examples that are back-propagated together: all of a batch, or one."""

    graph: Graph
    # None if the graph is of other examples too, and all rows count.
    positions: Positions | None
    example: int | None = None  # its number in the batch, if it is one
    # `(N,)` booleans: the example's own among the batch's.
    logits: Tensor | None = None

    def vectors(self, of_batch: Tensor) -> Tensor:
        """Select or blank out the `(S, N, C)` vectors for the logits of the graph."""
        if self.logits is None:
            return of_batch
        if self.positions is None:  # the graph has the logits of the whole batch
            # Zeros in place of the other examples' vectors: their logits get no
            # gradient.
            return of_batch * self.logits[:, None]
        return of_batch[:, self.logits]

    def weights(self, of_batch: Tensor) -> Tensor:
        """Select the `(S, B)` weights of its examples."""
        is_for_all = of_batch.shape[1] == 1
        if self.example is None or is_for_all:
            return of_batch
        return of_batch[:, [self.example]]

    @property
    def n_examples(self) -> int:
        """Count the examples: one if the graph is of others too."""
        return 1 if self.positions is None else self.positions.n_examples


class Recording:
    """A batch whose LoRA layers are recorded; `Recorder.record` makes it.

    No parameter needs to require grad: the outputs of the first layers are the leaves
    of the graph. Nothing is added to any `.grad`. Where examples come one at a time,
    all layers are visited for one of them before the next one is recorded.
    """

    def __init__(
        self,
        logits: Tensor,
        blocks: Sequence[Block],
        parts: Callable[[], Iterable[Part]],
        create_graph: bool,
    ) -> None:
        self.logits = logits  # (B, C)
        self._blocks = blocks
        self._parts = parts
        self._create_graph = create_graph

    def backward(
        self,
        vectors: Tensor,
        visitor: Visitor,
        *,
        weights: Tensor | None = None,
        at_once: int | None = None,
    ) -> None:
        """Back-propagate `(S, B, C)` vectors, and bring visitors what layers get.

        Gradients are scaled by `(S, B)` weights. A pass takes `at_once` vectors, by
        default one, unless so few rows go through the layers that more are faster.
        """
        for part in self._parts():
            with torch.autocast(vectors.device.type, enabled=False):
                self._backward(part, vectors, visitor, weights, at_once)
            del part  # before the next one is recorded

    def _backward(
        self,
        part: Part,
        vectors: Tensor,
        visitor: Visitor,
        weights: Tensor | None,
        at_once: int | None,
    ) -> None:
        if visitor.sees_inputs:
            self._visit_inputs(part, visitor)
        of_examples = None if weights is None else part.weights(weights)
        # The graph of a batch may be needed again, for the next of its examples.
        part.graph.back_propagate(
            part.vectors(vectors),
            at_once or part.graph.seeds_at_once,
            partial(self._visit_gradients, part, of_examples, visitor),
            retain_graph=self._create_graph or part.positions is None,
            create_graph=self._create_graph,
        )

    @torch.no_grad()
    def _visit_inputs(self, part: Part, visitor: Visitor) -> None:
        # Query, key and value projections, say, are given the same tensor.
        sharing: dict[tuple[Any, ...], list[int]] = {}
        for index, block in enumerate(self._blocks):
            tensors = [id(call.inputs) for call in part.graph.calls[index]]
            key = block.statistics_dtype, *tensors
            sharing.setdefault(key, []).append(index)
        for indices in sharing.values():
            first = indices[0]
            block = self._blocks[first]
            for call in part.graph.calls[first]:
                of_call = call.inputs
                assert of_call is not None  # `record` was asked to keep them
                with naming(f"weight {block.name}"):
                    a = of_call.reshape(part.n_examples, -1, of_call.shape[-1])
                    a = a.to(block.statistics_dtype)
                    positions = RowPositions([a.shape[1]], part.positions)
                    visitor.inputs(Inputs(indices, a, positions))

    def _visit_gradients(
        self,
        part: Part,
        weights: Tensor | None,
        visitor: Visitor,
        arrived: Arrived,
    ) -> None:
        """Arrange a layer's inputs and gradients by example, joined and scaled."""
        block = self._blocks[arrived.index]
        seeds = arrived.seeds
        m, n = block.shape
        # A layer that is called several times has one weight: its gradient is the sum
        # over all calls, as over positions, so that calls are joined as if they were
        # more positions.
        inputs: list[Tensor] = []
        gradients: list[Tensor] = []
        lengths: list[int] = []
        with naming(f"weight {block.name}"):
            for a, g in zip(arrived.inputs, arrived.gradients, strict=True):
                inputs.append(a.reshape(part.n_examples, -1, n))
                gradients.append(g.reshape(len(g), part.n_examples, -1, m))
                lengths.append(inputs[-1].shape[1])
            g = _joined(gradients).to(block.statistics_dtype)
            # After the pass: in half precision, the weights of confident examples would
            # underflow.
            if weights is not None:
                g = g * weights[seeds, :, None, None].to(g)
            visitor.gradients(
                GradientsOfRows(
                    index=arrived.index,
                    example=part.example,
                    seeds=seeds,
                    a=_joined(inputs).to(block.statistics_dtype),
                    g=g,
                    positions=RowPositions(lengths, part.positions),
                )
            )


def _joined(of_calls: list[Tensor]) -> Tensor:
    """Join the positions of several calls, one after the other."""
    # Most layers are called once, and nothing needs to be copied.
    if len(of_calls) == 1:
        return of_calls[0]
    return torch.cat(of_calls, dim=-2)

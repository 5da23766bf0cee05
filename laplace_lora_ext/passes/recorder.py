"""Record passes of one model through its weights, and make Jacobians."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laplace_lora_ext.models.batches import number_of_rows, number_of_tokens, part_of
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.running import unfused_attention
from laplace_lora_ext.models.weights import (
    Block,
    Place,
    check_in_place,
    read,
    without_rows,
)
from laplace_lora_ext.passes.graph import Layouts, Taps, tapped
from laplace_lora_ext.passes.memory import Memory
from laplace_lora_ext.passes.proof import is_proven
from laplace_lora_ext.passes.recording import Gradients, Part, Recording, Turns, Visitor
from laplace_lora_ext.passes.whole_gradients import WholeRecording

# What models raise on inputs that are no example, or not alone.
_NO_EXAMPLE = (RuntimeError, ValueError, TypeError, LookupError, AssertionError)

# Rows that go through a layer in one backward pass of all outputs, unless a single
# example has more: on a CPU, where more are no faster, and on an accelerator.
_ON_CPU = 768
_ON_ACCELERATOR = 2**13

# Of Jacobians in all weights, which are there together where the tokens of a text take
# turns: 0.5 GB in float32, or one token's.
_NUMBERS = 2**27

Directions = Callable[[Tensor], Tensor]
"""Takes logits `(B, C)`, and returns vectors `(S, B, C)` to back-propagate."""

Outputs = Callable[[Any, Tensor | None], Tensor]
"""Computes what is back-propagated from, `(B, C)`: of a batch, or of one of its
examples, whose rows `(B,)` booleans mark."""


def every_output(logits: Tensor) -> Tensor:
    """Return a direction for each output by itself."""
    n_examples, n_outputs = logits.shape
    identity = torch.eye(n_outputs).to(logits)
    return identity[:, None].expand(-1, n_examples, -1)


class Recorder:
    """Records passes through some blocks' layers, and remembers what they showed.

    A posterior makes one, for its fits and its predictions alike.

    Attributes
    ----------
    model : LogitsModel
    blocks : list of Block
    layouts : Layouts
        what passes have shown of the model so far
    """

    def __init__(
        self,
        model: LogitsModel,
        blocks: Sequence[Block],
    ) -> None:
        self.model = model
        self.blocks = list(blocks)
        # A whole weight's gradient is of all examples that a pass has.
        self._by_whole_gradients = bool(without_rows(blocks))
        self.layouts = Layouts(examples_apart=self._by_whole_gradients)
        # A prediction's backward pass has more vectors at once than a fit's.
        self._of_fits = Memory(model)
        self._of_predictions = Memory(model)

    @property
    def places(self) -> list[Place]:
        """List where statistics belong now: those of all blocks, then each block's.

        The former belong on the model's device.
        """
        places = [(self.model.device, self.blocks[0].statistics_dtype)]
        for block in self.blocks:
            places.append(block.place)
        return places

    @contextmanager
    def record(
        self,
        batch: Any,
        *,
        outputs: Outputs | None = None,
        create_graph: bool = False,
        keeps_inputs: bool = False,
    ) -> Iterator[Recording | WholeRecording]:
        """Run the model on a batch and record the calls of the blocks' layers.

        What is back-propagated from are the model's logits, unless other `outputs` are
        given.

        Where the rows of some layer were not each example's own, as in DeBERTa or where
        a router picks them, or where no rows can be seen, examples are recorded one at
        a time. One whose logits are others than in the batch is back-propagated through
        the batch.

        With `create_graph`, gradients can be differentiated: torch's attention then
        runs without its fused kernels, which have no second derivatives, and nothing is
        checkpointed. Otherwise layers that the user's training checkpoints are
        checkpointed here too; who visits inputs before gradients asks for their being
        kept.

        Within the `with` block the model is in evaluation mode, and no parameter
        requires grad. A `RuntimeError` if the logits carry no gradient to the layers
        that were called; a `ValueError` if a number is not finite.
        """
        attention = unfused_attention() if create_graph else nullcontext()
        weights: list[Tensor] = []  # to be differentiated in
        if self._by_whole_gradients:
            check_in_place(self.blocks, "A gradient in a whole matrix")
            weights = [block.weight for block in self.blocks]
        listening = tapped(
            self.model,
            [] if weights else self.blocks,
            self.layouts,
            checkpointed=not create_graph,
            keeps_inputs=keeps_inputs,
        )
        compute = self._logits if outputs is None else outputs
        # Hooks come last, when `prepared` makes other threads wait: these must not be
        # heard.
        with (
            self.model.prepared(weights),
            torch.inference_mode(False),
            torch.enable_grad(),
            attention,
            listening as taps,
        ):
            whole = self._whole(taps, batch, compute)
            if whole is not None:
                logits = whole.graph.logits
                parts = partial(iter, [whole])
            else:
                # A graph of the whole batch, which nothing is back-propagated through,
                # is only needed where somebody differentiates the logits themselves.
                with torch.set_grad_enabled(create_graph):
                    logits = compute(batch, None)
                parts = partial(self._one_at_a_time, taps, batch, logits, compute)
            if not weights:
                yield Recording(logits, self.blocks, parts, create_graph)
                return
            yield WholeRecording(logits, self.blocks, parts, create_graph, self.layouts)

    def _logits(self, batch: Any, own: Tensor | None) -> Tensor:
        return self.model(batch)

    def _whole(
        self,
        taps: Taps,
        batch: Any,
        outputs: Outputs,
    ) -> Part | None:
        """Record a batch at once, unless its rows aren't proven each example's own."""
        layouts = self.layouts
        # What one batch showed holds for the model. A single example needs no proof.
        if layouts.examples_apart and number_of_rows(batch) != 1:
            return None
        graph = taps.run(partial(outputs, batch, None))
        positions = self.model.positions(batch, len(graph.logits))
        if positions.n_examples > 1 and self._by_whole_gradients:
            return None
        if is_proven(graph, self.blocks, positions, layouts.proven):
            return Part(graph, positions)
        layouts.examples_apart = True
        return None

    def _one_at_a_time(
        self,
        taps: Taps,
        batch: Any,
        logits: Tensor,
        outputs: Outputs,
    ) -> Iterator[Part]:
        """Record each example by itself, or within the batch if its logits differ."""
        of_batch = None
        for each in self._examples(batch, logits):
            number, example, own = each.number, each.inputs, each.logits
            graph = None
            # The other examples' logits are the batch's own, and can't make a
            # difference.
            alone = logits.detach().clone()
            try:
                graph = taps.run(partial(outputs, example, own))
                alone[own] = graph.logits.detach()
            except _NO_EXAMPLE:  # it may only exist in the batch
                alone.fill_(torch.nan)
            if graph is not None and self.model.agree(logits.detach(), alone):
                positions_alone = self.model.positions(example, len(graph.logits))
                yield Part(graph, positions_alone, number, own)
            else:
                # As where a model normalises a batch: the example is not the same
                # alone. One graph of the batch serves all such examples.
                of_batch = of_batch or taps.run(partial(outputs, batch, None))
                yield Part(of_batch, None, number, own)
            del graph  # before the next example is recorded

    def check_called(self, called: Collection[int]) -> None:
        """Refuse a fit whose layers were never called, and so have no curvature."""
        silent: list[str] = []
        for index, block in enumerate(self.blocks):
            if index not in called:
                silent.append(block.name)
        if not silent:
            return
        n_blocks = len(self.blocks)
        advice = (
            "A fused kernel may replace their layers: pass the model as it was before "
            "fusion."
        )
        if len(silent) < n_blocks:
            advice += (
                " If the data don't need them, leave them out with target_modules, or "
                "fit on data that do."
            )
        raise RuntimeError(
            f"No batch used {len(silent)} of {n_blocks} weights, such as {silent[0]}. "
            f"{advice}"
        )

    def visit_jacobians(
        self,
        batch: Any,
        visit: Callable[[int, Tensor], None],
        directions: Directions = every_output,
        enable_backprop: bool = False,
    ) -> Tensor:
        """Make Jacobians block by block, by one forward and one batched backward pass.

        `visit` receives a block's index and its Jacobian `(B, C, r, d)`, small side
        first, 0 where the logits don't depend on the block. Only one is in memory at a
        time, unless examples come one at a time; that all are finite is known at the
        end. The method returns the logits `(B, C)`. With other `directions`, Jacobians
        are those of S combinations of the logits, in place of C. With
        `enable_backprop`, Jacobians and logits are differentiable in the inputs. Errors
        are those of `record`.
        """
        with self.record(batch, create_graph=enable_backprop) as recording:
            logits = recording.logits
            vectors = directions(logits.detach())
            positions = self.model.positions(batch, len(logits))
            turns = Turns.of(positions)
            at_once = len(vectors)
            if turns is not None:
                vectors = turns.vectors(vectors)
                at_once = max(1, self._at_once // positions.n_rows)
                visit = partial(_visit_rows, turns, visit)
            visitor = _Jacobians(self.blocks, positions.n_examples, len(vectors), visit)
            recording.backward(vectors, visitor, at_once=at_once)
            visitor.finish()
        return logits if enable_backprop else logits.detach()

    def jacobians(
        self,
        batch: Any,
        directions: Directions = every_output,
        enable_backprop: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Make Jacobians `(B, C, parameters)` of the logits, and the logits.

        With other `directions` they are `(B, S, parameters)`.
        """
        of_blocks: dict[int, Tensor] = {}
        device = self.model.device

        def keep(index: int, jacobian: Tensor) -> None:
            weights = self.blocks[index].small_side_first(jacobian)
            of_blocks[index] = weights.flatten(-2).to(device)

        f = self.visit_jacobians(batch, keep, directions, enable_backprop)
        in_order = [of_blocks[index] for index in range(len(self.blocks))]
        return torch.cat(in_order, dim=-1), f

    def in_parts(
        self,
        batch: Any,
        n_outputs: int,
        evaluate: Callable[[Any, slice], Any],
        n_examples: int | None = None,
    ) -> list[Any]:
        """Predict a few examples at a time, or all where parts would differ.

        Windows of texts, say, lie in rows of their own: parts then have another number
        of logits than of rows. Logits may also depend on the other examples, as where a
        model normalises a batch.

        `evaluate` takes a part, and its place in the batch; what it returns has their
        logits `f_mu`. `n_outputs` vectors are back-propagated at once. A text of whose
        tokens many have logits is evaluated again and again, for some of them each
        time. Where labels tell `n_examples`, inputs with another number of rows stay
        undivided. Parts that do not fit into memory are halved, and how much does fit
        is remembered; a `torch.OutOfMemoryError` says what to do where one example does
        not.
        """
        n_rows = number_of_rows(batch)
        owners = self.model.owners(batch)
        is_empty = owners is not None and not len(owners)  # which the model refuses
        if n_rows is None or n_examples not in (None, n_rows) or is_empty:
            return [evaluate(batch, slice(None))]
        if self.model.is_divisible is False:  # an earlier batch has shown it
            return [evaluate(batch, slice(None))]
        rows_of_example = n_outputs * (number_of_tokens(batch) or 1)
        most_examples = n_rows
        # Rows of logits whose Jacobians may be in memory at once.
        n_params = sum(block.n_params for block in self.blocks)
        logits_at_once = max(1, _NUMBERS // (n_outputs * n_params))
        if owners is not None:  # each token of a text has vectors of its own
            most_logits = int(owners.bincount().max())
            rows_of_example *= most_logits
            most_examples = logits_at_once // most_logits
        at_most = min(self._at_once // max(1, rows_of_example), most_examples)

        def of_part(part: Any, place: slice) -> list[Any]:
            if self.model.n_without_labels(part):
                return []
            parts = self.model.few_rows_at_a_time(part, logits_at_once)
            return [evaluate(each, place) for each in parts]

        parts = self._of_predictions.parts(
            batch, n_rows, rows_of_example, max(1, at_most), of_part
        )
        results: list[Any] = []
        for place, found in parts:
            results += found
            # One part is the whole batch, and can't differ from it.
            if place == slice(0, n_rows):
                return results
            n_logits = place.stop - place.start
            if owners is not None:
                is_in_part = (owners >= place.start) & (owners < place.stop)
                n_logits = int(is_in_part.sum())
            if sum(len(result.f_mu) for result in found) != n_logits:
                return [evaluate(batch, slice(None))]
        f_mu = torch.cat([result.f_mu for result in results])
        if not self.model.divides(batch, lambda _: f_mu):
            return [evaluate(batch, slice(None))]
        return results

    @property
    def _at_once(self) -> int:
        """Say how many rows go through a layer in one backward pass of a prediction."""
        return _ON_CPU if self.model.device.type == "cpu" else _ON_ACCELERATOR

    def in_parts_that_fit(
        self,
        batch: Any,
        n_examples: int,
        evaluate: Callable[[Any, slice], Any],
    ) -> list[Any]:
        """Learn from a batch with `n_examples` labels, in parts that fit into memory.

        `evaluate` takes a part, and its place in the batch. Errors are those of
        `in_parts`. One whose examples' logits depend on each other has no parts: what
        was learnt is of no use then.
        """
        if number_of_rows(batch) != n_examples:
            return [evaluate(batch, slice(None))]
        n_tokens = number_of_tokens(batch) or 1
        parts = self._of_fits.parts(batch, n_examples, n_tokens, n_examples, evaluate)
        results = [result for _, result in parts]
        # Asked only where it matters: the answer takes further passes, once.
        is_divided = len(results) > 1
        if is_divided and not self.model.divides(batch, partial(self._alone, batch)):
            raise torch.OutOfMemoryError(
                f"The batch does not fit into the memory of {self.model.device}, and "
                "its examples' logits depend on each other: pass smaller batches."
            )
        return results

    def _alone(
        self,
        batch: Any,
        whole: Tensor,
    ) -> Tensor:
        """Compute a batch's logits, which are `whole` together, example by example."""
        alone = torch.full_like(whole, torch.nan)
        for example in self._examples(batch, whole):
            alone[example.logits] = self.model.summary(example.inputs)
        return alone

    def _examples(
        self,
        batch: Any,
        logits: Tensor,
    ) -> Iterator[_Example]:
        """Take a batch with these logits apart; texts without a label are left out."""
        positions = self.model.positions(batch, len(logits))
        itself = torch.eye(
            positions.n_examples,
            dtype=torch.bool,
            device=logits.device,
        )
        for number, own in enumerate(positions.logits_of(itself)):
            if own.any():
                place = slice(number, number + 1)
                yield _Example(number, part_of(batch, place, positions.n_examples), own)


@dataclass(frozen=True)
class _Example:
    """An example of a batch."""

    number: int
    inputs: Any
    logits: Tensor  # `(N,)` booleans: its own among the batch's


def _visit_rows(
    turns: Turns,
    visit: Callable[[int, Tensor], None],
    index: int,
    jacobian: Tensor,
) -> None:
    """Bring a visitor the Jacobians of rows of logits, which have taken turns."""
    visit(index, turns.of_rows(jacobian))


class _Jacobians(Visitor):
    """Completes each block's Jacobian from examples and seeds in turn."""

    def __init__(
        self,
        blocks: Sequence[Block],
        n_examples: int,
        n_seeds: int,
        visit: Callable[[int, Tensor], None],
    ) -> None:
        self._blocks = blocks
        self._size = torch.Size((n_examples, n_seeds))
        self._visit = visit
        self._incomplete: dict[int, Tensor] = {}
        self._n_rows: Counter[int] = Counter()  # of them that are there, by block
        # Of complete ones, to see if they are finite.
        self._sums: dict[int, Tensor] = {}

    def gradients(self, gradients: Gradients) -> None:
        index = gradients.index
        jacobian = gradients.of_weight().transpose(0, 1)
        if jacobian.shape[:2] == self._size:
            self._complete(index, jacobian)
            return
        if index not in self._incomplete:  # some examples may not reach the layer
            self._incomplete[index] = self._zeros(index)
        examples = slice(None)
        if gradients.example is not None:
            examples = slice(gradients.example, gradients.example + 1)
        self._incomplete[index][examples, gradients.seeds] = jacobian
        self._n_rows[index] += jacobian.shape[:2].numel()
        if self._n_rows[index] == self._size.numel():
            self._complete(index, self._incomplete.pop(index))

    def finish(self) -> None:
        """Complete Jacobians that some gradients never reached; check all."""
        for index in range(len(self._blocks)):
            if index in self._incomplete:
                self._complete(index, self._incomplete.pop(index))
            elif index not in self._sums:
                self._complete(index, self._zeros(index))
        sums = read(list(self._sums.values()))
        for index, total in zip(self._sums, sums, strict=True):
            if not math.isfinite(total):
                raise ValueError(
                    f"Weight {self._blocks[index].name}: non-finite gradients"
                )

    def _complete(
        self,
        index: int,
        jacobian: Tensor,
    ) -> None:
        # Asking each block whether its numbers are finite would wait for an accelerator
        # each time: a sum of numbers is finite only if they are, and all sums are read
        # at once.
        self._sums[index] = jacobian.detach().sum()
        self._visit(index, self._blocks[index].small_side_first(jacobian))

    def _zeros(self, index: int) -> Tensor:
        block = self._blocks[index]
        shape = (*self._size, *block.shape)
        return block.values.new_zeros(shape, dtype=block.statistics_dtype)

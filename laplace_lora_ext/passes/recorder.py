"""Record batches, prove which rows belong to which example, and make Jacobians."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from laplace_lora_ext.models.batches import Positions, number_of_rows
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.weights import (
    Block,
    Place,
    check_in_place,
    read,
    without_rows,
)
from laplace_lora_ext.passes.graph import Graph, Layouts, Rows, Taps, tapped
from laplace_lora_ext.passes.parts import Parts, examples_of, rows_at_once
from laplace_lora_ext.tasks.task import Seeds

# What models raise on inputs that are no example, or not alone.
_NO_EXAMPLE = (RuntimeError, ValueError, TypeError, LookupError, AssertionError)

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


@dataclass(frozen=True)
class Rounds:
    """Back-propagates one row of logits of each text at a time.

    So logits that share a text have gradients of their own.

    Attributes
    ----------
    owners : torch.Tensor
        `(N,)`, the text of each row
    numbers : torch.Tensor
        `(N,)`, in which round each row has its vectors: its number among those of its
        text
    n_texts : int
        B
    n_rounds : int
        as many as the text with the most rows has
    """

    owners: Tensor
    numbers: Tensor
    n_texts: int
    n_rounds: int

    @classmethod
    def of(cls, positions: Positions) -> Rounds | None:
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
        """Spread vectors `(S, N, C)` over the rounds, `(rounds S, N, C)`."""
        rounds = torch.arange(self.n_rounds, device=self.numbers.device)
        has_round = (self.numbers == rounds[:, None]).to(of_rows)
        return (has_round[:, None, :, None] * of_rows).flatten(0, 1)

    def seeds(self, of_rows: Seeds) -> Seeds:
        """Spread seeds of rows over rounds, with weights `(rounds S, B)` of texts.

        Seeds with one weight for all rows belong together, and stay.
        """
        vectors, weights = of_rows
        if weights.shape[1] == 1:
            return of_rows
        of_texts = weights.new_zeros(self.n_rounds, self.n_texts, len(weights))
        of_texts[self.numbers, self.owners] = weights.T
        of_rounds = of_texts.transpose(1, 2).flatten(0, 1)
        return Seeds(self.vectors(vectors), of_rounds)

    def of_rows(self, of_texts: Tensor) -> Tensor:
        """Take each row's part `(N, S, ...)` of all rounds' `(B, rounds S, ...)`."""
        by_round = of_texts.unflatten(1, (self.n_rounds, -1))
        return by_round[
            self.owners.to(of_texts.device), self.numbers.to(of_texts.device)
        ]


@dataclass(frozen=True)
class Part:
    """Examples that are back-propagated together: all of a batch, or one."""

    graph: Graph
    # None if the graph is of other examples too, and all rows count.
    positions: Positions | None
    examples: slice  # of the batch
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

    def valid(self, rows: Rows, x: Tensor) -> Tensor:
        """Select the rows `(N, d)` of `(S, B, T, d)` that are no padding.

        A `NotImplementedError` if the mask can't be applied to the layer's rows.
        """
        if self.positions is None:
            raise NotImplementedError(
                "logits of an example depend on rows of others: use "
                'kfac_approx="gradient", or leave this layer out with target_modules'
            )
        masks = [self.positions.valid(length) for length in rows.lengths]
        if all(mask is None for mask in masks):
            # Selecting by booleans would wait for an accelerator.
            return x.flatten(0, 2)
        is_valid = torch.cat(
            [
                x.new_ones(x.shape[1], length, dtype=torch.bool)
                if mask is None
                else mask.to(x.device)
                for mask, length in zip(masks, rows.lengths, strict=True)
            ],
            dim=1,
        )
        return x[:, is_valid].flatten(0, 1)


@dataclass(frozen=True)
class Recording:
    """A batch whose blocks' layers are recorded; `Recorder.record` makes it.

    Nothing is added to any `.grad`. Where examples come one at a time, all blocks are
    passed back through for one of them before the next one is recorded.
    """

    logits: Tensor  # (N, C)
    positions: Positions
    _parts: Callable[[], Iterable[Part]]
    _create_graph: bool

    def backward(
        self,
        vectors: Tensor,
        take: Callable[[Part, Rows], None],
        *,
        weights: Tensor | None = None,
        at_once: int | None = None,
    ) -> None:
        """Back-propagate `(S, N, C)` vectors, and hand on what each block gets.

        Gradients are scaled by `(S, B)` weights, or `(S, 1)` for all examples. A pass
        takes `at_once` vectors, as `Graph.back_propagate` has it.
        """
        for part in self._parts():
            positions = part.positions
            with torch.autocast(vectors.device.type, enabled=False):
                part.graph.back_propagate(
                    part.vectors(vectors),
                    1 if positions is None else positions.n_examples,
                    partial(take, part)
                    if weights is None
                    else partial(_scale, part, weights, take),
                    at_once=at_once,
                    # The graph of a batch may be needed for the next of its examples.
                    retain_graph=self._create_graph or positions is None,
                    create_graph=self._create_graph,
                )
            del part  # before the next one is recorded


def _scale(
    part: Part, weights: Tensor, take: Callable[[Part, Rows], None], rows: Rows
) -> None:
    """Hand on rows of a part, scaled by its examples' weights."""
    # After the pass: in half precision, the weights of confident examples would
    # underflow.
    of_seeds = weights[rows.seeds]
    if of_seeds.shape[1] > 1:
        of_seeds = of_seeds[:, part.examples]
    g = rows.g * of_seeds[:, :, None, None].to(rows.g)
    take(part, replace(rows, g=g))


class Recorder:
    """Records passes through some blocks' layers, and remembers what they showed.

    A posterior makes one, for its fits and its predictions alike.

    Attributes
    ----------
    model : LogitsModel
    blocks : list of Block
    layouts : Layouts
        what passes have shown of the model so far
    parts : Parts
        to learn and predict batches in parts that fit into memory
    """

    def __init__(self, model: LogitsModel, blocks: Sequence[Block]) -> None:
        self.model = model
        self.blocks = list(blocks)
        # A whole weight's gradient is of all examples that a pass has.
        self._by_whole_gradients = bool(without_rows(blocks))
        self.layouts = Layouts(examples_apart=self._by_whole_gradients)
        self.parts = Parts(model, self.blocks, self.layouts)

    @property
    def places(self) -> list[Place]:
        """List where statistics belong now: those of all blocks, then each block's.

        The former belong on the model's device.
        """
        of_all = self.model.device, self.blocks[0].statistics_dtype
        return [of_all, *(block.place for block in self.blocks)]

    @contextmanager
    def record(
        self, batch: Any, *, outputs: Outputs | None = None, create_graph: bool = False
    ) -> Iterator[Recording]:
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
        checkpointed here too.

        Within the `with` block the model is in evaluation mode, and no parameter
        requires grad. A `RuntimeError` if the logits carry no gradient to the layers
        that were called; a `ValueError` if a number is not finite.
        """
        # Fused kernels have no second derivatives.
        attention = sdpa_kernel(SDPBackend.MATH) if create_graph else nullcontext()
        weights: list[Tensor] = []  # to be differentiated in
        if self._by_whole_gradients:
            check_in_place(self.blocks, "A gradient in a whole matrix")
            weights = [block.weight for block in self.blocks]
        # Hooks come last, when `prepared` makes other threads wait: these must not be
        # heard.
        with (
            self.model.prepared(weights),
            torch.inference_mode(False),
            torch.enable_grad(),
            attention,
            tapped(
                self.model, self.blocks, self.layouts, checkpointed=not create_graph
            ) as taps,
        ):
            compute = self._logits if outputs is None else outputs
            whole = self._whole(taps, batch, compute)
            if whole is not None and whole.positions is not None:
                logits, positions = whole.graph.logits, whole.positions
                parts = partial(iter, [whole])
            else:
                # A graph of the whole batch, which nothing is back-propagated through,
                # is only needed where somebody differentiates the logits themselves.
                with torch.set_grad_enabled(create_graph):
                    logits = compute(batch, None)
                positions = self.model.positions(batch, len(logits))
                parts = partial(self._one_at_a_time, taps, batch, logits, compute)
            yield Recording(logits, positions, parts, create_graph)

    def _logits(self, batch: Any, own: Tensor | None) -> Tensor:
        return self.model(batch)

    def _whole(self, taps: Taps, batch: Any, outputs: Outputs) -> Part | None:
        """Record a batch at once, unless its rows aren't proven each example's own."""
        layouts = self.layouts
        # What one batch showed holds for the model. A single example needs no proof.
        if layouts.examples_apart and number_of_rows(batch) != 1:
            return None
        graph = taps.run(partial(outputs, batch, None))
        positions = self.model.positions(batch, len(graph.logits))
        if positions.n_examples > 1 and self._by_whole_gradients:
            return None
        if is_proven(graph, self.blocks, positions, layouts):
            return Part(graph, positions, slice(None))
        layouts.examples_apart = True
        return None

    def _one_at_a_time(
        self, taps: Taps, batch: Any, logits: Tensor, outputs: Outputs
    ) -> Iterator[Part]:
        """Record each example by itself, or within the batch if its logits differ."""
        of_batch = None
        for number, example, own in examples_of(self.model, batch, logits):
            graph = None
            # The other examples' logits are the batch's own, and can't make a
            # difference.
            alone = logits.detach().clone()
            try:
                graph = taps.run(partial(outputs, example, own))
                alone[own] = graph.logits.detach()
            except _NO_EXAMPLE:  # it may only exist in the batch
                alone.fill_(torch.nan)
            place = slice(number, number + 1)
            if graph is not None and self.model.agree(logits.detach(), alone):
                positions = self.model.positions(example, len(graph.logits))
                yield Part(graph, positions, place, own)
            else:
                # As where a model normalises a batch: the example is not the same
                # alone. One graph of the batch serves all such examples.
                of_batch = of_batch or taps.run(partial(outputs, batch, None))
                yield Part(of_batch, None, place, own)
            del graph  # before the next example is recorded

    def check_called(self, called: Collection[int]) -> None:
        """Refuse a fit whose layers were never called, and so have no curvature."""
        silent = [
            block.name for index, block in enumerate(self.blocks) if index not in called
        ]
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
                "fit on data that do. If torch.utils.checkpoint calls them, pass "
                "use_reentrant=False there."
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
        time, unless examples or vectors come one at a time; that all are finite is
        known at the end. The method returns the logits `(B, C)`. With other
        `directions`, Jacobians are those of S combinations of the logits, in place of
        C. With `enable_backprop`, Jacobians and logits are differentiable in the
        inputs. Errors are those of `record`.
        """
        with self.record(batch, create_graph=enable_backprop) as recording:
            logits, positions = recording.logits, recording.positions
            vectors = directions(logits.detach())
            rounds = Rounds.of(positions)
            at_once = len(vectors)
            if rounds is not None:
                vectors = rounds.vectors(vectors)
                at_once = max(1, rows_at_once(self.model) // positions.n_rows)
            size = torch.Size((positions.n_examples, len(vectors)))
            jacobians = _Jacobians(self.blocks, size, rounds, visit)
            recording.backward(vectors, jacobians.take, at_once=at_once)
            jacobians.finish()
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


class _Jacobians:
    """Completes each block's Jacobian from examples and vectors in turn."""

    def __init__(
        self,
        blocks: Sequence[Block],
        size: torch.Size,
        rounds: Rounds | None,
        visit: Callable[[int, Tensor], None],
    ) -> None:
        self._blocks = blocks
        self._size = size  # (B, S)
        self._rounds = rounds
        self._visit = visit
        self._incomplete: dict[int, Tensor] = {}
        # Of complete ones, to see if they are finite.
        self._sums: dict[int, Tensor] = {}

    def take(self, part: Part, rows: Rows) -> None:
        """Take what a backward pass brings a block."""
        jacobian = rows.gradient().transpose(0, 1)
        if jacobian.shape[:2] == self._size:
            self._complete(rows.index, jacobian)
            return
        if rows.index not in self._incomplete:
            self._incomplete[rows.index] = self._zeros(rows.index)
        self._incomplete[rows.index][part.examples, rows.seeds] = jacobian

    def finish(self) -> None:
        """Complete Jacobians that came in parts or not at all; check all."""
        for index in range(len(self._blocks)):
            if index in self._incomplete:
                self._complete(index, self._incomplete.pop(index))
            elif index not in self._sums:
                self._complete(index, self._zeros(index))
        sums = read(list(self._sums.values()))
        for index, total in zip(self._sums, sums, strict=True):
            if not math.isfinite(total):
                raise _non_finite(self._blocks[index])

    def _complete(self, index: int, jacobian: Tensor) -> None:
        # Asking each block whether its numbers are finite would wait for an accelerator
        # each time: a sum of numbers is finite only if they are, and all sums are read
        # at once.
        self._sums[index] = jacobian.detach().sum()
        if self._rounds is not None:
            jacobian = self._rounds.of_rows(jacobian)
        self._visit(index, self._blocks[index].small_side_first(jacobian))

    def _zeros(self, index: int) -> Tensor:
        block = self._blocks[index]
        shape = (*self._size, *block.shape)
        return block.values.new_zeros(shape, dtype=block.statistics_dtype)


# --- proof that rows are each example's own -------------------------------------------
#  A layer's rows `(n, ..., d)` are taken for `(B, n / B, ..., d)`. Sizes don't show
# whether they are, but gradients do: those of some examples' logits must leave exactly
# nothing in the rows of all others.


def is_proven(
    graph: Graph, blocks: Sequence[Block], positions: Positions, layouts: Layouts
) -> bool:
    """Prove that the rows of a pass are each example's own, or find that they are not.

    Texts are proven in the first batch, in the first one of two, four, eight and so on
    or more examples, and in each until every layer has had a gradient. Sizes don't tell
    what rows other batches have, such as those of images: each of them is proven.

    The layouts note the size of the largest batch that proved a site. A gradient that
    is not finite is a `ValueError`.
    """
    n_examples = positions.n_examples
    if n_examples == 1:
        return True
    size = n_examples.bit_length()  # 2 for 2 and 3 examples, 3 for 4 to 7, and so on
    is_known = True
    lasting: set[int] = set()  # blocks
    for index, calls in enumerate(graph.shapes):
        # Cheap, and surely wrong: as where a router has picked any number of rows.
        if any(not shape or shape[0] % n_examples for shape in calls):
            return False
        site = blocks[index].rows.site
        if all(_lasts(site, shape, positions) for shape in calls):
            lasting.add(index)
            is_known &= not calls or layouts.proven.get((site, len(calls)), 0) >= size
        else:
            is_known = False
    if is_known:
        return True
    words = codewords(n_examples)
    strays: list[Tensor] = []  # whether seeds of some examples arrive at others
    non_finite: dict[int, Tensor] = {}
    reached: dict[int, Tensor] = {}  # rows `(B, T)` of a block's calls
    lengths: dict[int, list[int]] = {}

    def look(rows: Rows) -> None:
        non_finite[rows.index] = ~torch.isfinite(rows.g).all()
        # Exactly nothing, not little: no sum of other examples' numbers has gone in.
        arrives = rows.g.detach().any(-1)
        is_other = ~words.to(rows.g.device)[rows.seeds, :, None]
        strays.append((arrives & is_other).any())
        reached[rows.index] = reached.get(rows.index, False) | arrives.any(0)
        lengths[rows.index] = rows.lengths

    # Random numbers, so that gradients do not cancel to 0 but by chance.
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(graph.logits.shape[1], generator=generator)
    chosen = positions.logits_of(words).to(graph.logits)  # (S, N)
    vectors = chosen[..., None] * vector.to(graph.logits)
    graph.back_propagate(vectors, n_examples, look, retain_graph=True)
    for index, is_wrong in zip(
        non_finite, read(list(non_finite.values())), strict=True
    ):
        if is_wrong:
            raise _non_finite(blocks[index])
    if any(read(strays)):
        return False
    for index in lasting & reached.keys():
        calls = reached[index].split(lengths[index], dim=1)
        # Others of its calls may have had no gradient.
        is_whole = len(calls) == len(graph.shapes[index])
        if is_whole and all(map(_tells_layouts_apart, calls)):
            layouts.proven[blocks[index].rows.site, len(calls)] = size
    return True


def codewords(n_examples: int) -> Tensor:
    """Choose seeds `(S, B)` of examples: of any two, some seed has the first alone."""
    n_bits = max(1, (n_examples - 1).bit_length())
    bits = torch.arange(n_examples) >> torch.arange(n_bits)[:, None] & 1
    return torch.cat([bits, 1 - bits]).bool()


def _lasts(site: str, shape: torch.Size, positions: Positions) -> bool:
    """Tell whether later batches of this size have rows in the same order.

    Which row a token has does not depend on what the text says.
    """
    # A router picks their rows.
    if not positions.is_text or "experts" in site.split("."):
        return False
    # Rows of examples, or of all tokens in one dimension. Any others, such as windows,
    # may be in another order next time.
    by_example = shape[0] in (positions.n_examples, positions.n_rows)
    return by_example or shape.numel() == positions.n_tokens


def _tells_layouts_apart(reached: Tensor) -> bool:
    """Tell whether gradients came, at rows `(B, T)` that tell layouts apart."""
    if reached.shape[0] == reached.shape[1]:
        # `(T, B)` and `(B, T)` have the same row on the diagonal.
        reached = reached & ~torch.eye(
            len(reached), dtype=torch.bool, device=reached.device
        )
    return bool(reached.any())


def _non_finite(block: Block) -> ValueError:
    return ValueError(f"Weight {block.name}: non-finite gradients")

"""Batches are recorded, whole or example by example, and predicted in small parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from laplace_lora_ext.models.batches import (
    IGNORED,
    Positions,
    number_of_rows,
    number_of_tokens,
    part_of,
)
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.weights import Block, Home, check_in_place, device_of, read
from laplace_lora_ext.passes.graph import (
    Graph,
    Rows,
    Take,
    Taps,
    is_proven,
    non_finite_gradients,
)
from laplace_lora_ext.tasks.task import Outputs, Seeds

# Rows that go through a layer in one backward pass of all outputs, unless a single
# example has more: on a CPU, where more are no faster, and on an accelerator.
_ON_CPU = 768
_ON_ACCELERATOR = 2**13

# Of Jacobians in all weights, which are there together where the tokens of a text take
# turns: 0.5 GB in float32, or one token's.
_NUMBERS = 2**27

# Of rows that wait for those of other blocks, to be multiplied together: 1 MB in
# float32. Of a small text, each product takes longer to start than to compute.
_WAITING = 2**18

Directions = Callable[[Tensor], Tensor]
"""Takes logits `(B, C)`, and returns vectors `(S, B, C)` to back-propagate."""

Visit = Callable[[list[int], Tensor], None]
"""Takes indices of blocks of one shape, and their Jacobians `(blocks, B, C, r, d)`."""


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
        `(N,)`, in which round each row has its vectors
    has_round : torch.Tensor
        `(rounds, N)` booleans that say the same. There are as many rounds as the text
        with the most rows has
    n_texts : int
        B
    """

    owners: Tensor
    numbers: Tensor
    has_round: Tensor
    n_texts: int

    @classmethod
    def of(cls, positions: Positions) -> Rounds | None:
        """Let the rows of a batch take turns; None where each text has one row."""
        owners = positions.owners_of_logits
        if owners is None:
            return None
        # The rows of a text follow each other, and are no more than rounds.
        rounds = torch.arange(int(owners.bincount().max()), device=owners.device)
        numbers = torch.arange(len(owners), device=owners.device) % len(rounds)
        return cls(owners, numbers, numbers == rounds[:, None], positions.n_examples)

    def vectors(self, of_rows: Tensor) -> Tensor:
        """Spread vectors `(S, N, C)` over the rounds, `(rounds S, N, C)`."""
        return (self.has_round[:, None, :, None] * of_rows).flatten(0, 1)

    def seeds(self, of_rows: Seeds) -> Seeds:
        """Spread seeds of rows over rounds, with weights `(rounds S, B)` of texts.

        Seeds with one weight for all rows belong together, and stay.
        """
        vectors, weights = of_rows
        if weights.shape[1] == 1:
            return of_rows
        is_of_text = one_hot(self.owners, self.n_texts).to(weights)
        of_rounds = (self.has_round[:, None] * weights) @ is_of_text
        return Seeds(self.vectors(vectors), of_rounds.flatten(0, 1))

    def of_rows(self, of_texts: Tensor) -> Tensor:
        """Take rows' parts `(blocks, N, S, ...)` of `(blocks, B, rounds S, ...)`."""
        by_round = of_texts.unflatten(2, (len(self.has_round), -1))
        owners, numbers = self.owners, self.numbers
        return by_round[:, owners.to(by_round.device), numbers.to(by_round.device)]


@dataclass(frozen=True)
class Recording:
    """A batch whose blocks' layers are recorded; `Recorder.record` makes it.

    It is passed back through once, and nothing is added to any `.grad`. Where examples
    come one at a time, all blocks are passed back through for one of them before the
    next one is recorded.
    """

    logits: Tensor  # (N, C)
    positions: Positions
    _graphs: Iterable[Graph]

    def backward(
        self,
        vectors: Tensor,
        take: Take,
        weights: Tensor | None = None,
        at_once: int | None = None,
    ) -> None:
        """Back-propagate `(S, N, C)` vectors as `Graph.back_propagate` has it.

        Without autocast, as is what `take` computes.
        """
        for graph in self._graphs:
            with torch.autocast(vectors.device.type, enabled=False):
                graph.back_propagate(vectors, take, weights=weights, at_once=at_once)
            del graph  # before the next one is recorded


class Recorder:
    """Records passes through some blocks' layers, and remembers what they showed.

    A posterior makes one, for its fits and its predictions alike.

    Attributes
    ----------
    model : LogitsModel
    blocks : list of Block
    taps : Taps
        on the blocks' layers, with what passes have shown of the model so far
    """

    def __init__(self, model: LogitsModel, blocks: Sequence[Block]) -> None:
        self.model = model
        self.blocks = list(blocks)
        self.taps = Taps(model, self.blocks)

    @property
    def homes(self) -> list[Home]:
        """List where statistics belong now: those of all blocks, then each block's.

        The former belong on the model's device, a block's where its layer computes.
        """
        of_all = self.model.device, self.blocks[0].statistics_dtype
        of_blocks = [(device_of(b.module), b.statistics_dtype) for b in self.blocks]
        return [of_all, *of_blocks]

    def prepared(self) -> AbstractContextManager[None]:
        """Evaluate the model, with gradients for the blocks' weights alone."""
        return self.model.prepared([block.weight for block in self.blocks])

    # --- recordings -------------------------------------------------------------------

    @contextmanager
    def record(self, batch: Any, outputs: Outputs) -> Iterator[Recording]:
        """Run the model on a batch and record the calls of the blocks' layers.

        Backward passes start from what `outputs` returns.

        Where the rows of some layer were not each example's own, as in DeBERTa or where
        a router picks them, or where no rows can be seen, examples are recorded one at
        a time. An example whose logits differ from those that it has in the batch is
        back-propagated through the batch.

        Within the `with` block the model is in evaluation mode, and no parameter
        requires grad. A `RuntimeError` if the logits carry no gradient to the layers
        that were called; a `ValueError` if a number is not finite.
        """
        taps = self.taps
        weights: list[Tensor] = []  # to be differentiated in
        if taps.without_rows:
            check_in_place(self.blocks, "A gradient in a whole matrix")
            weights = [block.weight for block in self.blocks]
        # Hooks come last, when `prepared` makes other threads wait: these must not be
        # heard.
        with (
            self.model.prepared(weights),
            torch.inference_mode(False),
            torch.enable_grad(),
            taps.on_layers(),
        ):
            # What one batch showed holds for the model. A single example needs no
            # proof.
            if not taps.examples_apart or number_of_rows(batch) == 1:
                graph = taps.run(outputs, batch)
                if is_proven(graph):
                    assert graph.positions is not None
                    yield Recording(graph.logits, graph.positions, [graph])
                    return
                del graph
                taps.examples_apart = True
            with torch.no_grad():
                logits = outputs(batch, None)
            positions = self.model.positions(batch, len(logits))
            graphs = self._one_at_a_time(batch, logits, positions, outputs)
            yield Recording(logits, positions, graphs)

    def _one_at_a_time(
        self, batch: Any, logits: Tensor, positions: Positions, outputs: Outputs
    ) -> Iterator[Graph]:
        """Record each example by itself, or within the batch if its logits differ."""
        of_batch = None
        n_examples = positions.n_examples
        itself = torch.eye(n_examples, dtype=torch.bool, device=logits.device)
        # `(N,)` booleans mark an example's own logits.
        for number, own in enumerate(positions.logits_of(itself)):
            if not own.any():  # a text without a label
                continue
            place = slice(number, number + 1)
            example = part_of(batch, place, n_examples)
            graph = None
            # The other examples' logits are the batch's own, and can't make a
            # difference.
            alone = logits.detach().clone()
            try:
                graph = self.taps.run(outputs, example, own)
                alone[own] = graph.logits.detach()
            except Exception:  # it may only exist in the batch
                alone.fill_(torch.nan)
            if graph is not None and self.model.agree(logits.detach(), alone):
                yield replace(graph, examples=place, own=own)
            else:
                # As where a model normalises a batch: the example is not the same
                # alone. One graph of the batch serves all such examples.
                of_batch = of_batch or self.taps.run(outputs, batch)
                yield replace(of_batch, positions=None, examples=place, own=own)
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

    # --- Jacobians --------------------------------------------------------------------

    def visit_jacobians(
        self, batch: Any, visit: Visit, directions: Directions = every_output
    ) -> Tensor:
        """Make Jacobians of a few blocks at a time, by one forward pass.

        `visit`, without autocast, receives indices of blocks of one shape and place,
        and their Jacobians `(blocks, B, C, r, d)`, small side first, 0 where the logits
        don't depend on a block. These are few at a time, unless examples or vectors
        come one at a time; that all are finite is known at the end. The method returns
        the logits `(B, C)`. With other `directions`, Jacobians are those of S
        combinations of the logits, in place of C. Errors are those of `record`.
        """
        apart: dict[int, Tensor] = {}  # Jacobians that come in parts
        waiting: dict[tuple[object, ...], list[Rows]] = {}  # of blocks of one kind
        sums: dict[int, Tensor] = {}  # of Jacobians that were visited

        def zeros(index: int) -> Tensor:
            block = self.blocks[index]
            shape = (*size, *block.shape)
            return block.values.new_zeros(shape, dtype=block.statistics_dtype)

        def complete(indices: list[int], jacobians: Tensor) -> None:
            # Asking each block whether its numbers are finite would wait for an
            # accelerator each time: a sum of numbers is finite only if they are, and
            # all sums are read at once.
            totals = jacobians.detach().sum((1, 2, 3, 4))
            sums.update(zip(indices, totals.unbind(), strict=True))
            if rounds is not None:
                jacobians = rounds.of_rows(jacobians)
            visit(indices, self.blocks[indices[0]].small_side_first(jacobians))

        def multiply(alike: list[Rows]) -> None:
            if len(alike) == 1:  # large rows are not copied
                jacobians = alike[0].gradient()[None]
            else:
                # In the order of blocks, which a backward pass reverses.
                alike.sort(key=lambda rows: rows.index)
                a = torch.stack([rows.a for rows in alike])
                g = torch.stack([rows.g for rows in alike])
                jacobians = g.mT @ a[:, None]
            complete([rows.index for rows in alike], jacobians.transpose(1, 2))
            alike.clear()

        def take(rows: Rows) -> None:
            index = rows.index
            n_seeds, n_examples, *_ = rows.g.shape
            if (n_examples, n_seeds) != size:
                if index not in apart:
                    apart[index] = zeros(index)
                part = rows.gradient().transpose(0, 1)
                apart[index][rows.graph.examples, rows.seeds] = part
                return
            a, g = rows.a, rows.g
            kind = self.blocks[index].small_output, a.shape, g.shape, a.dtype, a.device
            alike = waiting.setdefault(kind, [])
            alike.append(rows)
            if len(alike) * (a.numel() + g.numel()) > _WAITING:
                multiply(alike)

        with self.record(batch, self.model) as recording:
            logits, positions = recording.logits, recording.positions
            vectors = directions(logits.detach())
            rounds = Rounds.of(positions)
            if rounds is not None:
                vectors = rounds.vectors(vectors)
            n_rows = positions.n_tokens or positions.n_rows
            at_once = max(1, self._rows_at_once // n_rows)
            size = torch.Size((positions.n_examples, len(vectors)))
            recording.backward(vectors, take, at_once=at_once)
            # As within a backward pass.
            without_autocast = torch.autocast(logits.device.type, enabled=False)
            with torch.no_grad(), without_autocast:
                for alike in waiting.values():
                    if alike:
                        multiply(alike)
                for index in range(len(self.blocks)):
                    if index not in sums:
                        jacobian = apart.pop(index) if index in apart else zeros(index)
                        complete([index], jacobian[None])
            totals = read(list(sums.values()))
            for index, total in zip(sums, totals, strict=True):
                if not math.isfinite(total):
                    raise non_finite_gradients(self.blocks[index])
        return logits.detach()

    def jacobians(
        self, batch: Any, directions: Directions = every_output
    ) -> tuple[Tensor, Tensor]:
        """Make Jacobians `(B, C, parameters)` of the logits, and the logits.

        With other `directions` they are `(B, S, parameters)`.
        """
        of_blocks: dict[int, Tensor] = {}
        device = self.model.device

        def keep(indices: list[int], jacobians: Tensor) -> None:
            weights = self.blocks[indices[0]].small_side_first(jacobians)
            of_all = weights.flatten(-2).to(device)
            of_blocks.update(zip(indices, of_all, strict=True))

        f = self.visit_jacobians(batch, keep, directions)
        in_order = [of_blocks[index] for index in range(len(self.blocks))]
        return torch.cat(in_order, dim=-1), f

    # --- parts that fit into memory ---------------------------------------------------

    @property
    def _rows_at_once(self) -> int:
        """Say how many rows go through a layer in one backward pass of a prediction."""
        return _ON_CPU if self.model.device.type == "cpu" else _ON_ACCELERATOR

    def predict(
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
        undivided.
        """
        model = self.model
        n_rows = number_of_rows(batch)
        owners = model.owners(batch)
        is_empty = owners is not None and not len(owners)  # which the model refuses
        if (
            n_rows is None
            or n_examples not in (None, n_rows)
            or is_empty
            or self.taps.is_divisible is False  # an earlier batch has shown it
        ):
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
        at_most = min(self._rows_at_once // max(1, rows_of_example), most_examples)

        n_parts = math.ceil(n_rows / max(1, at_most))
        size = math.ceil(n_rows / n_parts)  # all are about as large
        results: list[Any] = []
        for first in range(0, n_rows, size):
            place = slice(first, min(first + size, n_rows))
            part = batch if size == n_rows else part_of(batch, place, n_rows)
            in_turn = [part]
            if owners is not None:
                in_turn = _labelled_in_turn(model, part, logits_at_once)
            found = [evaluate(each, place) for each in in_turn]
            if size == n_rows:  # the whole batch can't differ from itself
                return found
            n_logits = place.stop - place.start
            if owners is not None:
                is_in_part = (owners >= place.start) & (owners < place.stop)
                n_logits = int(is_in_part.sum())
            if sum(len(result.f_mu) for result in found) != n_logits:
                return [evaluate(batch, slice(None))]
            results += found
        if self.taps.is_divisible is None:  # the first batch in parts tells
            f_mu = torch.cat([result.f_mu for result in results])
            with model.forward_passes():
                whole = model(batch)
            self.taps.is_divisible = model.agree(whole, f_mu.to(whole))
        return results if self.taps.is_divisible else [evaluate(batch, slice(None))]


def _labelled_in_turn(model: LogitsModel, batch: Any, n_rows: int) -> Iterator[Any]:
    """Repeat a long text, labelling at most `n_rows` of its tokens each time.

    Several texts stay together. Those without a label are left out.
    """
    mask = model.token_mask(batch)
    assert mask is not None
    tokens = mask.nonzero()[:, 1]
    if len(mask) > 1 or len(tokens) <= n_rows:
        if len(tokens):
            yield batch
        return
    X, y = model.split_if_labelled(batch)
    # Where nobody has labelled a token, any class marks that it is asked for.
    labels = torch.zeros_like(mask, dtype=torch.long) if y is None else y
    for some in tokens.split(n_rows):
        of_some = torch.full_like(labels, IGNORED)
        of_some[0, some] = labels[0, some]
        yield {**X, model.dict_key_y: of_some}

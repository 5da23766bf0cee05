"""Batches in parts that fit into memory, found as accelerate finds batch sizes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor

from laplace_lora_ext.models.batches import (
    IGNORED,
    number_of_rows,
    number_of_tokens,
    part_of,
)
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.running import is_shared
from laplace_lora_ext.models.weights import Block
from laplace_lora_ext.passes.graph import Layouts

# Rows that go through a layer in one backward pass of all outputs, unless a single
# example has more: on a CPU, where more are no faster, and on an accelerator.
_ON_CPU = 768
_ON_ACCELERATOR = 2**13

# Of Jacobians in all weights, which are there together where the tokens of a text take
# turns: 0.5 GB in float32, or one token's.
_NUMBERS = 2**27


def rows_at_once(model: LogitsModel) -> int:
    """Say how many rows go through a layer in one backward pass of a prediction."""
    return _ON_CPU if model.device.type == "cpu" else _ON_ACCELERATOR


class Example(NamedTuple):
    """An example of a batch."""

    number: int
    inputs: Any
    logits: Tensor  # `(N,)` booleans: its own among the batch's


def examples_of(model: LogitsModel, batch: Any, logits: Tensor) -> Iterator[Example]:
    """Take a batch with these logits apart; texts without a label are left out."""
    positions = model.positions(batch, len(logits))
    n_examples = positions.n_examples
    itself = torch.eye(n_examples, dtype=torch.bool, device=logits.device)
    for number, own in enumerate(positions.logits_of(itself)):
        if own.any():
            place = slice(number, number + 1)
            yield Example(number, part_of(batch, place, n_examples), own)


class Parts:
    """Divides batches for fits and for predictions, and remembers what fits.

    A prediction's backward pass has more vectors at once than a fit's.
    """

    def __init__(
        self, model: LogitsModel, blocks: Sequence[Block], layouts: Layouts
    ) -> None:
        self._model = model
        self._n_params = sum(block.n_params for block in blocks)
        self._layouts = layouts
        # How many rows of layers fit, in passes of each kind.
        self._most_rows = {"fit": sys.maxsize, "prediction": sys.maxsize}

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
        undivided. Parts that do not fit into memory are halved; a
        `torch.OutOfMemoryError` says what to do where one example does not fit.
        """
        model = self._model
        n_rows = number_of_rows(batch)
        owners = model.owners(batch)
        is_empty = owners is not None and not len(owners)  # which the model refuses
        if n_rows is None or n_examples not in (None, n_rows) or is_empty:
            return [evaluate(batch, slice(None))]
        if model.is_divisible is False:  # an earlier batch has shown it
            return [evaluate(batch, slice(None))]
        rows_of_example = n_outputs * (number_of_tokens(batch) or 1)
        most_examples = n_rows
        # Rows of logits whose Jacobians may be in memory at once.
        logits_at_once = max(1, _NUMBERS // (n_outputs * self._n_params))
        if owners is not None:  # each token of a text has vectors of its own
            most_logits = int(owners.bincount().max())
            rows_of_example *= most_logits
            most_examples = logits_at_once // most_logits
        at_most = min(rows_at_once(model) // max(1, rows_of_example), most_examples)

        def of_part(part: Any, place: slice) -> list[Any]:
            if owners is None:
                return [evaluate(part, place)]
            some = _labelled_in_turn(model, part, logits_at_once)
            return [evaluate(each, place) for each in some]

        results: list[Any] = []
        for place, found in self._evaluate(
            "prediction", batch, n_rows, rows_of_example, max(1, at_most), of_part
        ):
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
        if not model.divides(batch, lambda _: f_mu):
            return [evaluate(batch, slice(None))]
        return results

    def learn(
        self, batch: Any, n_examples: int, evaluate: Callable[[Any, slice], Any]
    ) -> None:
        """Learn from a batch with `n_examples` labels, in parts that fit into memory.

        `evaluate` takes a part, and its place in the batch. Errors are those of
        `predict`. One whose examples' logits depend on each other has no parts: what
        was learnt is of no use then.
        """
        if number_of_rows(batch) != n_examples:
            evaluate(batch, slice(None))
            return
        n_tokens = number_of_tokens(batch) or 1
        n_parts = 0
        for _ in self._evaluate(
            "fit", batch, n_examples, n_tokens, n_examples, evaluate
        ):
            n_parts += 1

        def alone(whole: Tensor) -> Tensor:
            logits = torch.full_like(whole, torch.nan)
            for example in examples_of(self._model, batch, whole):
                logits[example.logits] = self._model.summary(example.inputs)
            return logits

        # Asked only where it matters: the answer takes further passes, once.
        if n_parts > 1 and not self._model.divides(batch, alone):
            raise torch.OutOfMemoryError(
                f"The batch does not fit into the memory of {self._model.device}, and "
                "its examples' logits depend on each other: pass smaller batches."
            )

    def _evaluate(
        self,
        kind: str,
        batch: Any,
        n_examples: int,
        rows_of_example: int,
        at_most: int,
        evaluate: Callable[[Any, slice], Any],
    ) -> Iterator[tuple[slice, Any]]:
        """Evaluate a batch in parts of `at_most` examples, or fewer if these don't fit.

        Where one does not fit, its vectors go one by one.
        """
        first = 0
        while first < n_examples:
            n_that_fit = max(1, self._most_rows[kind] // rows_of_example)
            n_parts = math.ceil((n_examples - first) / min(at_most, n_that_fit))
            size = math.ceil((n_examples - first) / n_parts)  # all are about as large
            place = slice(first, first + size)
            part = batch if size == n_examples else part_of(batch, place, n_examples)
            try:
                result = evaluate(part, place)
            except RuntimeError as error:
                if not should_reduce_batch_size(error):
                    raise
                # Ranks that share a model must make the same passes.
                is_smallest = size == 1 and self._layouts.seeds_at_most == 1
                if is_smallest or is_shared(self._model):
                    raise _too_large(self._model, part, size, error) from error
            else:
                yield place, result
                first = place.stop
                continue
            # Only here, where the error has gone, does nothing hold what did not fit.
            clear_device_cache(garbage_collection=True)
            if size == 1:
                self._layouts.seeds_at_most = 1
            else:
                self._most_rows[kind] = size // 2 * rows_of_example


def _labelled_in_turn(model: LogitsModel, batch: Any, n_rows: int) -> Iterator[Any]:
    """Repeat a long text, labelling at most `n_rows` of its tokens each time.

    Several texts stay together. Those without a label are left out.
    """
    places = model.places(batch)
    assert places is not None
    tokens = places.nonzero()[:, 1]
    if len(places) > 1 or len(tokens) <= n_rows:
        if len(tokens):
            yield batch
        return
    X, y = model.split_if_labelled(batch)
    # Where nobody has labelled a token, any class marks that it is asked for.
    labels = torch.zeros_like(places, dtype=torch.long) if y is None else y
    for some in tokens.split(n_rows):
        of_some = torch.full_like(labels, IGNORED)
        of_some[0, some] = labels[0, some]
        yield {**X, model.dict_key_y: of_some}


def _too_large(
    model: LogitsModel, part: Any, size: int, error: RuntimeError
) -> torch.OutOfMemoryError:
    what = "One example" if size == 1 else f"A batch of {size} examples"
    n_tokens = number_of_tokens(part)
    of_length = "" if n_tokens is None else f" of {n_tokens} tokens"
    return torch.OutOfMemoryError(
        f"{what}{of_length} does not fit into the memory of {model.device}: cut texts "
        "shorter, switch on gradient checkpointing (model.gradient_checkpointing_"
        "enable), or load the base model in 4-bit (transformers.BitsAndBytesConfig). "
        f"({error})"
    )

"""Answers of several tokens behind a prompt, whose log-probabilities add up."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from laplace_lora_ext.messages import warn
from laplace_lora_ext.models.answers import (
    Answers,
    AnswerTokens,
    are_tokens,
    decoder_start,
    decoder_text,
    divided,
    first_places,
    in_full,
    is_masked,
    last_real_position,
    reading_at,
    without_cache,
)
from laplace_lora_ext.models.batches import IGNORED, text_first
from laplace_lora_ext.models.vocabulary import (
    LastStates,
    Reading,
    Span,
    logits_at,
    parts_of,
    read_in_parts,
)
from laplace_lora_ext.processes.exchange import count

SCORE_MASK = "score_mask"
_CACHES = ("cache", "past_key_values")  # in newer transformers, and in older ones


@dataclass(frozen=True)
class _Rows:
    """A model's rows: K choices of each of B texts, padded behind."""

    inputs: dict[str, Any]  # tensors `(B K, ...)`, and what is no tensor of rows
    # `(B K, T)` tokens that logits at their places predict, or `IGNORED`.
    targets: Tensor
    n_texts: int

    def by_text(self, of_rows: Tensor) -> Tensor:
        """Arrange what belongs to rows, `(B K, ...)`, by text: `(B, K, ...)`."""
        return of_rows.unflatten(0, (self.n_texts, -1))

    @property
    def n_shared(self) -> int:
        """Count the tokens that all choices of each text begin with.

        They end where the first token of a score is predicted, or with the shortest
        prompt.
        """
        of_texts = self.by_text(self.inputs["input_ids"])
        is_shared = (of_texts == of_texts[:, :1]) & self.by_text(
            self.targets == IGNORED
        )
        mask = self.inputs.get("attention_mask")
        if mask is not None:
            is_shared = is_shared & self.by_text(mask.bool())
        return int(is_shared.int().cumprod(-1).sum(-1).min())


@dataclass(frozen=True)
class _Scores:
    """What a pass says of choices."""

    logits: Tensor  # `(B, K)`
    # Logits `(B, V)` where the first choice's first token is predicted.
    at_first: Tensor


class Choices(Answers):
    """Answers that each batch brings, other ones for each text.

    A batch has `input_ids` `(B, K, T)`, in which each of the K choices of a text stands
    behind its prompt, and a `score_mask` of that shape, true for the tokens that count.
    With an encoder-decoder both are of `decoder_input_ids`, which begin with the start
    token, and `input_ids` are `(B, T)` or `(B, K, T)`. The logit of a choice is the sum
    of its tokens' log-probabilities, each given all that stands before it, or their
    mean with `normalised`.

    Each choice is a row of its own. After `economise` a decoder with a plain cache
    reads once what all choices of a text begin with, as far as in each text of a batch:
    if the first batch has the same logits by whole rows.
    """

    def __init__(
        self,
        transformer: PreTrainedModel | None,
        normalised: bool = False,
    ) -> None:
        super().__init__()
        self._divides_vocabulary = False
        self._shares_prompts = False
        self._is_proven = False  # that shared prompts change nothing
        self.normalised = normalised
        self._transformer = transformer
        self._decodes = (
            transformer is not None and transformer.config.is_encoder_decoder
        )

    def rows(self, inputs: Any) -> Any:
        rows = self._rows(inputs)
        n_rows = len(rows.targets)
        by_text: dict[str, Any] = {}
        for key, value in rows.inputs.items():
            if isinstance(value, Tensor) and value.shape[:1] == (n_rows,):
                value = rows.by_text(value)
            by_text[key] = value
        return by_text

    def logits(
        self,
        inputs: Any,
        call: Callable[..., Any],
        **kwargs: Any,
    ) -> Tensor:
        return self.scores(inputs, call, **kwargs).logits

    def log_probs(
        self,
        inputs: Any,
        call: Callable[..., Any],
    ) -> Tensor:
        scores = self.scores(inputs, call)
        return scores.logits.log_softmax(-1)

    def scores(
        self,
        inputs: Any,
        call: Callable[..., Any],
        **kwargs: Any,
    ) -> _Scores:
        """Pass over a batch of choices; `call` calls the model."""
        rows = self._rows(inputs)
        keywords = without_cache(self._transformer, rows.inputs) | kwargs
        whole = partial(self._read, rows.inputs, rows.targets, call, **keywords)
        read = None
        if self._may_share(rows, kwargs) and (n_shared := rows.n_shared):
            read = self._read_behind(rows, n_shared, call)
            if not self._is_proven:
                # What a cache does is a model's own affair.
                with torch.no_grad():
                    self._is_proven = read is not None and self._agree(read, whole())
                self._shares_prompts = self._is_proven
        if read is None or not self._shares_prompts:
            read = whole()
        log_p, at_first = read
        if self.normalised:
            log_p = log_p / (rows.targets != IGNORED).sum(-1).to(log_p.device)
        at_first = rows.by_text(at_first)[:, 0]  # of a text's first choice
        return _Scores(rows.by_text(log_p), at_first)

    def economise(self) -> None:
        self._divides_vocabulary = self._transformer is not None
        self._shares_prompts = self._transformer is not None and not self._decodes

    def _may_share(self, rows: _Rows, kwargs: Mapping[str, Any]) -> bool:
        """Tell whether a prompt may be read once, as far as is known before a pass."""
        if not self._shares_prompts or kwargs:
            return False
        assert self._transformer is not None
        # Checkpointed layers keep no cache; dropout is never alike in two passes; ranks
        # that share layers must make the same passes. Of other inputs nobody knows
        # which belong to the prompt alone.
        return (
            not any(
                getattr(module, "gradient_checkpointing", False)
                for module in self._transformer.modules()
            )
            and not self._transformer.training
            and count() == 1
            and rows.inputs.keys() <= {"input_ids", "attention_mask"}
        )

    def _read_behind(
        self, rows: _Rows, n_shared: int, call: Callable[..., Any]
    ) -> tuple[Tensor, Tensor] | None:
        """Read shared tokens once, and choices behind them, as `_read` does.

        None if the model's cache may forget, or write where gradients don't follow.
        """
        ids = rows.inputs["input_ids"]
        prompts = rows.by_text(ids)[:, 0, :n_shared]
        last = torch.full((len(prompts), 1), n_shared - 1, device=ids.device)
        with reading_at(self._transformer, last, n_shared):
            output = call({"input_ids": prompts}, use_cache=True)
        name, cache = next(
            ((name, output[name]) for name in _CACHES if name in output), ("", None)
        )
        layers = getattr(cache, "layers", [])
        are_plain = {type(layer).__name__ for layer in layers} == {"DynamicLayer"}
        if type(cache) is not DynamicCache or not are_plain:
            return None
        cache.batch_repeat_interleave(len(ids) // len(prompts))
        behind = rows.inputs | {"input_ids": ids[:, n_shared:]}
        keywords = {"use_cache": True, name: cache}
        return self._read(behind, rows.targets[:, n_shared:], call, **keywords)

    def _agree(self, read: tuple[Tensor, Tensor], whole: tuple[Tensor, Tensor]) -> bool:
        """Tell whether log-probabilities differ by rounding alone."""
        (found, _), (expected, _) = read, whole
        assert self._transformer is not None
        eps = torch.finfo(next(self._transformer.parameters()).dtype).eps
        # Sums of many layers differ by tens of units, and other positions by far more.
        rounding = min(1000 * eps, 0.02)
        distance = (found.detach() - expected).abs().max()
        return bool(distance <= rounding * expected.abs().max())

    def _read(
        self,
        inputs: Any,
        targets: Tensor,
        call: Callable[..., Any],
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Sum log-probabilities `(N,)` of targets `(N, T)`.

        Also returns logits `(N, V)` where each row's first one is predicted.
        """
        predicts = targets != IGNORED
        if self._divides_vocabulary and count() == 1:
            parts = parts_of(predicts)
            if len(parts) > 1:
                return self._read_in_parts(inputs, targets, parts, call, **kwargs)
        index, counts = first_places(predicts)
        with reading_at(self._transformer, index, targets.shape[1]) as read_off:
            output = call(inputs, **kwargs)
            of_vocabulary = in_full(read_off(output))
        tokens = targets.take_along_dim(index, dim=1).where(counts, IGNORED)
        log_p = _log_probs(of_vocabulary, tokens)
        return log_p.sum(-1), of_vocabulary[:, 0]

    def _read_in_parts(
        self,
        inputs: Any,
        targets: Tensor,
        parts: Sequence[Span],
        call: Callable[..., Any],
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Read as `_read`, a part of the places at a time."""
        assert self._transformer is not None
        predicts = targets != IGNORED
        tokens = targets[predicts]
        calls = partial(LastStates(self._transformer).call, call, inputs, **kwargs)

        def logits(part: Span) -> Tensor:
            places = part.of(predicts)
            return in_full(logits_at(self._transformer, places, calls))

        def reading(rows: Tensor) -> Reading:
            return partial(_log_probs, tokens=tokens[rows])

        log_p, at_first = read_in_parts(predicts, parts, logits, reading)
        places = predicts.to(log_p.device)
        by_place = log_p.new_zeros(places.shape).masked_scatter(places, log_p)
        return by_place.sum(-1), at_first

    def _rows(self, inputs: Any) -> _Rows:
        """Arrange a batch of choices as rows, and find what each place predicts."""
        tokens, counts = self._choices_in(inputs)
        flat = _flattened(inputs, tokens)
        if self._decodes:
            flat = dict(text_first(flat))
            text = decoder_text(flat)
        else:
            # Padding that is moved behind the text takes the mask along.
            flat[SCORE_MASK] = counts.flatten(0, 1)
            flat = dict(text_first(flat))
            counts = flat.pop(SCORE_MASK).unflatten(0, counts.shape[:2])
            text = flat
        targets = _targets(text, counts)
        # What stands behind the last token to be predicted changes nothing.
        is_needed = (targets != IGNORED).any(0)
        n_needed = int(is_needed.nonzero().max()) + 1
        for key, value in flat.items():
            is_of_text = key.startswith("decoder_") or not self._decodes
            if is_of_text and _has_row_and_place(value, targets.shape):
                flat[key] = value[:, :n_needed]
        return _Rows(flat, targets[:, :n_needed], n_texts=len(tokens))

    def _choices_in(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """Return tokens `(B, K, T)` of a batch, and which of them count."""
        text = inputs if isinstance(inputs, Mapping) else {}
        counts = text.get(SCORE_MASK)
        key = "decoder_input_ids" if self._decodes else "input_ids"
        tokens = text.get(key)
        if counts is None:
            raise ValueError(
                f"{type(self._transformer).__name__} is a language model: pass "
                "class_token_ids, the tokens of the answers, as "
                "tokenizer.convert_tokens_to_ids gives them, or class_texts and the "
                "tokenizer. Where each text has choices of its own, pass batches of "
                f"{key} (texts, choices, tokens) with a score_mask of the tokens that "
                'count. For free text, use the likelihood "language_modeling" and '
                'hessian_structure="lowrank_kron".'
            )
        if tokens is None or tokens.ndim != 3 or tokens.shape[1] < 2:
            found = None if tokens is None else tuple(tokens.shape)
            raise ValueError(
                f"With a score_mask, {key} must be of shape (texts, choices, tokens) "
                f"with two choices or more, not {found}."
            )
        if counts.shape != tokens.shape:
            raise ValueError(
                f"score_mask has shape {tuple(counts.shape)}, and {key} "
                f"{tuple(tokens.shape)}: say for each token whether it counts."
            )
        return tokens, counts.bool()


class AnswerTexts(Answers):
    """A language model's answers, of several tokens, the same for all texts.

    Each answer is read behind the prompt, or in an encoder-decoder by the decoder, as a
    choice of `Choices`. There must be two or more distinct answers of one or more
    tokens.
    """

    def __init__(
        self,
        class_token_ids: Sequence[Sequence[int]],
        transformer: PreTrainedModel | None,
        normalised: bool = False,
    ) -> None:
        super().__init__()
        answers = [list(answer) for answer in class_token_ids]
        for number, answer in enumerate(answers):
            if not answer:
                raise ValueError(
                    f"Class {number} has no token: give each answer in class_token_ids "
                    "or class_texts at least one."
                )
        tokens = [token for answer in answers for token in answer]
        are_distinct = len({tuple(answer) for answer in answers}) == len(answers)
        if len(answers) < 2 or not are_distinct or not are_tokens(tokens, transformer):
            raise ValueError(
                "class_token_ids must be two or more distinct answers in tokens of the "
                f"model's vocabulary, as its tokenizer has them, not {answers}."
            )
        if transformer is not None and is_masked(transformer):
            raise ValueError(
                f"{type(transformer).__name__} is a masked language model, which "
                f"answers with one token: give each class one, rather than {answers}."
            )
        self.class_token_ids = answers
        self.normalised = normalised
        self._answers = answers
        self._first_tokens = sorted({answer[0] for answer in answers})
        self._transformer = transformer
        self._decodes = (
            transformer is not None and transformer.config.is_encoder_decoder
        )
        self._choices = Choices(transformer, normalised)

    def economise(self) -> None:
        self._choices.economise()

    def rows(self, inputs: Any) -> Any:
        return self._choices.rows(self._as_choices(inputs))

    def logits(
        self,
        inputs: Any,
        call: Callable[..., Any],
        **kwargs: Any,
    ) -> Tensor:
        scores = self._scores(inputs, call, **kwargs)
        self._weigh(scores.at_first, self._first_tokens)
        return scores.logits

    def log_probs(
        self,
        inputs: Any,
        call: Callable[..., Any],
    ) -> Tensor:
        """Compute log-probabilities `(B, C + 1)` of the answers, and of all else.

        All else are texts that begin with other tokens than any answer.
        """
        scores = self._scores(inputs, call)
        of_first, of_others = divided(scores.at_first, self._first_tokens)
        among_answers = scores.logits.log_softmax(-1)
        of_any_answer = of_first.logsumexp(-1, keepdim=True)
        return torch.cat([among_answers + of_any_answer, of_others], dim=1)

    def warn_if_answered(self, inputs: Any) -> None:
        # A decoder's text begins anew, whatever the encoder's ends with.
        if self._decodes or not isinstance(inputs, Mapping):
            return
        tokens = inputs.get("input_ids")
        if tokens is None or tokens.ndim != 2:
            return
        last = last_real_position(inputs).tolist()
        for text, end in zip(tokens.tolist(), last, strict=True):
            read = text[: end + 1]
            is_answered = any(
                read[-len(answer) :] == answer for answer in self._answers
            )
            if not is_answered:
                return
        warn(
            "Every text of the batch ends with one of the answers, but the model "
            "predicts what comes next: leave the answers out of the prompts."
        )

    def _scores(
        self,
        inputs: Any,
        call: Callable[..., Any],
        **kwargs: Any,
    ) -> _Scores:
        return self._choices.scores(self._as_choices(inputs), call, **kwargs)

    def _as_choices(self, inputs: Any) -> dict[str, Any]:
        """Put each answer behind each prompt of a batch, `(B, K, T)`."""
        if not isinstance(inputs, Mapping):
            raise TypeError(
                "Answers of several tokens need batches that are mappings with "
                f"input_ids, not {type(inputs).__name__}."
            )
        if SCORE_MASK in inputs:
            raise ValueError(
                "The batch has a score_mask, and so choices of its own: leave out "
                "class_token_ids and class_texts."
            )
        if not self._decodes:
            return _continued(inputs, self._answers)
        assert self._transformer is not None
        given = {**inputs, **decoder_start(self._transformer, inputs)}
        continued = _continued(decoder_text(given), self._answers)
        counts = continued.pop(SCORE_MASK)
        of_decoder = {f"decoder_{key}": value for key, value in continued.items()}
        return {**given, **of_decoder, SCORE_MASK: counts}


def answers_of(
    class_token_ids: Any,
    transformer: PreTrainedModel | None,
    mask_token_id: int | None,
    normalised: bool,
) -> Answers:
    """Make the answers of classes that have one token each, or several."""
    listed = _listed(class_token_ids)
    answers = [
        tokens for answer in listed if (tokens := _as_sequence(answer)) is not None
    ]
    if not listed or len(answers) < len(listed):
        # It says what is wrong with them.
        return AnswerTokens(class_token_ids, transformer, mask_token_id)
    if all(len(answer) == 1 for answer in answers):
        tokens = [answer[0] for answer in answers]
        return AnswerTokens(tokens, transformer, mask_token_id)
    return AnswerTexts(answers, transformer, normalised)


def class_tokens(
    class_token_ids: Sequence[Any] | None,
    class_texts: Sequence[str] | None,
    tokenizer: Any,
) -> Sequence[Any] | None:
    """Return the answers' tokens, if any are given: texts are tokenized as they stand.

    They get no special tokens. A `ValueError` if there is no tokenizer, or an answer
    has no token.
    """
    if class_texts is None:
        return class_token_ids
    if class_token_ids is not None:
        raise ValueError("Pass class_token_ids or class_texts, not both.")
    are_texts = all(isinstance(text, str) for text in class_texts)
    if isinstance(class_texts, str) or not are_texts:
        raise ValueError(
            f"class_texts must be a list of texts, one a class, not {class_texts!r}: "
            "tokens go to class_token_ids."
        )
    if tokenizer is None:
        raise ValueError(
            "class_texts need the model's tokenizer: pass "
            "tokenizer=AutoTokenizer.from_pretrained(...)."
        )
    answers = [
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in class_texts
    ]
    for text, answer in zip(class_texts, answers, strict=True):
        if not answer:
            raise ValueError(
                f"The answer {text!r} in class_texts has no token: give it a text."
            )
    return answers


def _listed(class_token_ids: Any) -> list[Any]:
    """Return the answers as a list, empty if there is none to make."""
    if isinstance(class_token_ids, Tensor):
        return class_token_ids.tolist()
    is_sequence = isinstance(class_token_ids, Sequence) and not isinstance(
        class_token_ids, str
    )
    return list(class_token_ids) if is_sequence else []


def _as_sequence(answer: Any) -> list[int] | None:
    """Return an answer's tokens, one or more; None if they are no whole numbers."""
    tokens = answer if isinstance(answer, list | tuple | Tensor) else [answer]
    try:
        return [operator.index(token) for token in tokens]
    except TypeError:
        return None


def _flattened(
    inputs: Mapping[str, Any],
    choices: Tensor,
) -> dict[str, Any]:
    """Give each of the choices `(B, K, T)` a row, with all that its text has.

    What lies by choice has the shape of the choices, or of an encoder's texts of them.
    """
    n_texts, n_choices = choices.shape[:2]
    shapes = [choices.shape]
    of_encoder = inputs.get("input_ids")
    if of_encoder is not None and of_encoder.ndim == 3:
        shapes.append(of_encoder.shape)
    rows: dict[str, Any] = {}
    for key, value in inputs.items():
        if key == SCORE_MASK:
            continue
        if not isinstance(value, Tensor) or value.ndim == 0:
            rows[key] = value
        elif value.shape in shapes:
            rows[key] = value.flatten(0, 1)
        elif len(value) == n_texts:
            rows[key] = value.repeat_interleave(n_choices, dim=0)
        else:
            rows[key] = value
    return rows


def _targets(
    text: Mapping[str, Any],
    counts: Tensor,
) -> Tensor:
    """Return the tokens `(B K, T)` that logits at their places predict, or `IGNORED`.

    A `ValueError` if a choice has no token that counts, or one that nothing predicts.
    """
    n_choices = counts.shape[1]
    empty = (~counts.any(-1)).nonzero().tolist()
    if empty:
        row, choice = empty[0]
        raise ValueError(
            f"Choice {choice} of text {row} has no token that counts: score_mask is 0 "
            "everywhere. Give each text as many choices as the others, each with a "
            "token."
        )
    counts = counts.flatten(0, 1)
    mask = text.get("attention_mask")
    real = torch.ones_like(counts) if mask is None else mask.bool()
    follows_real = pad(real[:, :-1], (1, 0), value=False)
    predictable = real & follows_real
    unpredicted = (counts & ~predictable).nonzero().tolist()
    if unpredicted:
        row, place = unpredicted[0]
        raise ValueError(
            f"score_mask counts token {place} of choice {row % n_choices} of text "
            f"{row // n_choices}, which is padding, or the first of its text, which "
            "nothing predicts: count the tokens of answers alone."
        )
    labels = text["input_ids"].where(counts, IGNORED)
    return pad(labels[:, 1:], (0, 1), value=IGNORED)


def _has_row_and_place(value: Any, shape: torch.Size) -> bool:
    """Tell whether a value is a tensor with a number for each token."""
    return isinstance(value, Tensor) and value.shape[:2] == shape


def _log_probs(
    logits: Tensor,
    tokens: Tensor,
) -> Tensor:
    """Compute log-probabilities `(...)` of tokens, given logits `(..., V)`.

    Those of `IGNORED` are 0.
    """
    tokens = tokens.to(logits.device)
    counts = tokens != IGNORED
    tokens = tokens.where(counts, 0)
    vocabulary = logits.shape[-1]
    if tokens.max() >= vocabulary:
        raise ValueError(
            f"Answers have tokens up to {tokens.max()}, but the model's output layer "
            f"has only {vocabulary}: pass the numbers that they have in it."
        )
    chosen = logits.gather(-1, tokens[..., None])[..., 0]
    log_p = chosen - logits.logsumexp(-1)
    return log_p.where(counts, 0)


def _padded(
    answers: Sequence[Sequence[int]],
    like: Tensor,
) -> tuple[Tensor, Tensor]:
    """Make tokens `(K, L)` of K answers, and mark those that are no padding."""
    longest = max(map(len, answers))
    tokens = like.new_zeros(len(answers), longest)
    is_token = torch.zeros_like(tokens, dtype=torch.bool)
    for row, answer in enumerate(answers):
        tokens[row, : len(answer)] = like.new_tensor(answer)
        is_token[row, : len(answer)] = True
    return tokens, is_token


def _continued(
    text: Mapping[str, Any],
    answers: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Put K answers behind the real tokens of texts, and mark them: `(B, K, T + L)`.

    What is no tensor of tokens stays as it is.
    """
    ids = text.get("input_ids")
    if ids is None or ids.ndim != 2:
        raise ValueError(
            "Answers of several tokens are put behind the input_ids of texts, of shape "
            "(texts, tokens), and the batch has "
            f"{None if ids is None else tuple(ids.shape)}."
        )
    tokens, is_token = _padded(answers, ids)
    longest = tokens.shape[1]
    steps = torch.arange(longest, device=ids.device)
    last = last_real_position(text)[:, None]
    places = last + 1 + steps  # (B, L)
    places = places[:, None].expand(-1, len(answers), -1)

    def grown(
        value: Tensor,
        more: Tensor,
    ) -> Tensor:
        """Put `more`, `(B, K, L)` or less, behind the texts of each row and place."""
        room = pad(value, (0, longest))[:, None]
        room = room.expand(-1, len(answers), -1)
        more = more.to(value.dtype).expand(places.shape)
        return room.scatter(2, places, more)

    continued: dict[str, Any] = {
        "input_ids": grown(ids, tokens),
        SCORE_MASK: grown(torch.zeros_like(ids), is_token),
    }
    mask = text.get("attention_mask")
    if mask is not None:
        continued["attention_mask"] = grown(mask, is_token)
    elif not is_token.all():
        # Shorter answers are padded, which their texts were not.
        continued["attention_mask"] = grown(torch.ones_like(ids), is_token)
    for key, value in text.items():
        if key in continued or not _has_row_and_place(value, ids.shape):
            continue
        if value.ndim == 2 and key == "position_ids":
            at_last = value.take_along_dim(last, dim=1)[..., None]
            continued[key] = grown(value, at_last + 1 + steps)
        elif value.ndim == 2 and key == "token_type_ids":
            at_last = value.take_along_dim(last, dim=1)[..., None]
            continued[key] = grown(value, at_last)
        else:
            raise ValueError(
                f"The batch has {key} for each token, and the tokens of answers have "
                "none: leave it out, or pass batches of choices with a score_mask."
            )
    return {**text, **continued}

"""Answers of several tokens behind a prompt, whose log-probabilities add up."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from laplace_lora_ext.likelihoods import IGNORED
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
from laplace_lora_ext.models.batches import text_first
from laplace_lora_ext.models.vocabulary import (
    Part,
    Reading,
    logits_at,
    parts_of,
    read_in_parts,
)
from laplace_lora_ext.processes.exchange import count

SCORE_MASK = "score_mask"
_CACHES = ("cache", "past_key_values")  # in newer transformers, and in older ones

# How far rounding may move logits, in units of the precision of a model's weights: sums
# of many layers differ by tens of them, and other positions by far more.
_ROUNDING = 1000
_ROUNDING_OF_HALF = 0.02  # relative, whatever the precision


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
    def real(self) -> Tensor:
        """Mark tokens that are no padding, `(B K, T)`."""
        mask = self.inputs.get("attention_mask")
        if mask is None:
            return torch.ones_like(self.targets, dtype=torch.bool)
        return mask.bool()


@dataclass(frozen=True)
class _Scores:
    """What a pass says of choices."""

    logits: Tensor  # `(B, K)`
    # Logits `(B, V)` where the first choice's first token is predicted.
    at_first: Tensor


@dataclass(frozen=True)
class _Divided:
    """The same rows, divided into what a text's choices share, and the rest."""

    prompts: dict[str, Tensor]  # C tokens of each text, `(B, C)`
    ends: Tensor  # `(B,)` how many of them are real
    # `(B, K)` tokens that are predicted at the last one, or `IGNORED`.
    at_end: Tensor
    # L tokens of each choice, `(B K, L)`, and a mask with prompts.
    behind: dict[str, Tensor]
    targets: Tensor  # `(B K, L)` tokens that logits there predict, or `IGNORED`

    @property
    def kind(self) -> tuple[bool, bool]:
        """Tell whether prompts are padded, and whether anything stands behind them."""
        is_padded = bool((self.ends != self.ends[0]).any())
        return is_padded, self.goes_on

    @property
    def goes_on(self) -> bool:
        """Tell whether anything that is read stands behind the prompts."""
        return self.targets.shape[1] > 0


class Choices(Answers):
    """Answers that each batch brings, other ones for each text.

    A batch has `input_ids` `(B, K, T)`, in which each of the K choices of a text stands
    behind its prompt, and a `score_mask` of that shape, true for the tokens that count.
    With an encoder-decoder both are of `decoder_input_ids`, which begin with the start
    token, and `input_ids` are `(B, T)` or `(B, K, T)`. The logit of a choice is the sum
    of its tokens' log-probabilities, each given all that stands before it, or their
    mean with `normalised`.

    Each choice is a row of its own. After `share_prompts` a decoder reads once what the
    choices of a text share, keeps it in its cache, with gradients, and reads what
    stands behind it for each choice: only where the first batch of a kind then has the
    same logits as by rows of its own.
    """

    def __init__(
        self,
        transformer: PreTrainedModel | None,
        normalised: bool = False,
    ) -> None:
        super().__init__()
        self._shares_prompts = False
        self._proven: dict[tuple[bool, bool], bool] = {}  # by kind of batch
        self._divides_vocabulary = False
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
        divided_rows = self._divided(rows) if self._may_share(kwargs) else None
        if divided_rows is None or self._proven.get(divided_rows.kind) is False:
            return self._by_rows(rows, call, **kwargs)
        scores = self._by_prompts(rows, divided_rows, call, **kwargs)
        is_same = scores is not None
        if scores is not None and divided_rows.kind not in self._proven:
            # One more pass, once a kind of batch: what a cache does is the model's own
            # affair.
            with torch.no_grad():
                expected = self._by_rows(rows, call, **kwargs)
            is_same = _agree(scores.logits.detach(), expected.logits, self._dtype)
        self._proven[divided_rows.kind] = is_same
        if scores is None or not is_same:
            return self._by_rows(rows, call, **kwargs)
        return scores

    def share_prompts(self) -> None:
        # Not yet for certain: the first batch of each kind proves it, or not.
        self._shares_prompts = True

    def divide_vocabulary(self) -> None:
        self._divides_vocabulary = self._transformer is not None

    def _may_share(self, kwargs: Mapping[str, Any]) -> bool:
        """Tell whether a prompt may be read once, as far as is known before a pass."""
        transformer = self._transformer
        if not self._shares_prompts or transformer is None or self._decodes or kwargs:
            return False
        # Two passes with dropout are never alike, and could prove nothing.
        if transformer.training:
            return False
        # Sharded layers wait for other ranks, whose batches may be of other kinds.
        if count() > 1:
            return False
        # Checkpointed layers keep no cache.
        if any(
            getattr(layer, "gradient_checkpointing", False)
            for layer in transformer.modules()
        ):
            return False
        parameters = inspect.signature(transformer.forward).parameters
        takes_places = {"position_ids", "use_cache"} <= set(parameters)
        return takes_places and self._cache is not None

    @property
    def _cache(self) -> str | None:
        """Name the cache of keys and values that a decoder takes; None without one."""
        assert self._transformer is not None
        parameters = inspect.signature(self._transformer.forward).parameters
        return next((name for name in _CACHES if name in parameters), None)

    @property
    def _dtype(self) -> torch.dtype:
        assert self._transformer is not None
        return next(self._transformer.parameters()).dtype

    def _by_rows(
        self,
        rows: _Rows,
        call: Callable[..., Any],
        **kwargs: Any,
    ) -> _Scores:
        """Read each choice with its prompt."""
        model_kwargs = without_cache(self._transformer, rows.inputs) | kwargs
        log_p, at_first = self._read(rows.inputs, rows.targets, call, **model_kwargs)
        at_first = rows.by_text(at_first)[:, 0]  # of a text's first choice
        return self._scored(rows, rows.by_text(log_p), at_first)

    def _by_prompts(
        self,
        rows: _Rows,
        parts: _Divided,
        call: Callable[..., Any],
        **kwargs: Any,
    ) -> _Scores | None:
        """Read each prompt once, and choices behind it; None if that is impossible.

        A cache may not be plain.
        """
        index = (parts.ends - 1)[:, None]
        _, n_positions = parts.prompts["input_ids"].shape
        with reading_at(self._transformer, index, n_positions) as read_off:
            output = call(parts.prompts, use_cache=parts.goes_on, **kwargs)
            at_end = in_full(read_off(output))
        targets = parts.at_end[:, None].to(at_end.device)  # all predicted at one place
        log_p = _log_probs(at_end, targets)[:, 0]
        if parts.goes_on:
            assert self._cache is not None
            cache = getattr(output, self._cache, None)
            if not isinstance(cache, Cache) or not _is_plain(cache):
                return None
            _, n_choices = parts.at_end.shape
            cache.batch_repeat_interleave(n_choices)
            with_cache = {"use_cache": True, self._cache: cache}
            behind, _ = self._read(
                parts.behind,
                parts.targets,
                call,
                **with_cache,
                **kwargs,
            )
            log_p = log_p + rows.by_text(behind)
        return self._scored(rows, log_p, at_end[:, 0])

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
        # One is predicted at each place.
        tokens = tokens[..., None].to(of_vocabulary.device)
        log_p = _log_probs(of_vocabulary, tokens)[..., 0]
        return log_p.sum(-1), of_vocabulary[:, 0]

    def _read_in_parts(
        self,
        inputs: Any,
        targets: Tensor,
        parts: Sequence[Part],
        call: Callable[..., Any],
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Read as `_read`, a part of the places at a time."""
        assert self._transformer is not None
        predicts = targets != IGNORED
        tokens = targets[predicts][:, None, None]
        calls = partial(call, inputs, **kwargs)

        def logits(part: Part) -> Tensor:
            places = part.of(predicts)
            return in_full(logits_at(self._transformer, places, calls))

        def reading(rows: Tensor) -> Reading:
            def read(logits: Tensor) -> Tensor:
                own = tokens[rows].to(logits.device)
                return _log_probs(logits[:, None], own).flatten()

            return read

        log_p, at_first = read_in_parts(
            self._transformer, predicts, parts, logits, reading
        )
        places = predicts.to(log_p.device)
        by_place = log_p.new_zeros(places.shape).masked_scatter(places, log_p)
        return by_place.sum(-1), at_first

    def _scored(
        self,
        rows: _Rows,
        log_p: Tensor,
        at_first: Tensor,
    ) -> _Scores:
        """Make logits `(B, K)` of the sums of choices' log-probabilities."""
        if self.normalised:
            counts = rows.targets != IGNORED
            n_tokens = rows.by_text(counts.sum(-1))
            log_p = log_p / n_tokens.to(log_p.device)
        return _Scores(log_p, at_first)

    def _divided(self, rows: _Rows) -> _Divided | None:
        """Divide rows behind what each text's choices share; None if nothing is."""
        # Of other inputs nobody knows which belong to the prompt alone.
        if not rows.inputs.keys() <= {"input_ids", "attention_mask"}:
            return None
        real = rows.real
        # A real token behind padding: then a place is no count of tokens.
        follows_padding = ~real[:, :-1]
        if (real[:, 1:] & follows_padding).any():
            return None
        ends = _shared_ends(rows)
        if not ends.all():
            return None
        ids = rows.inputs["input_ids"]
        n_rows, n_positions = ids.shape
        n_choices = n_rows // rows.n_texts
        steps = torch.arange(n_positions, device=ids.device)

        # The prompts: a text's choices have the same, so that the first one's is read.
        n_shared = int(ends.max())
        shared_steps = steps[:n_shared]
        in_prompt = shared_steps < ends[:, None]
        first_choice = rows.by_text(ids)[:, 0, :n_shared]
        prompts = {
            "input_ids": first_choice.where(in_prompt, 0),
            "attention_mask": in_prompt.long(),
            "position_ids": shared_steps.expand(rows.n_texts, -1),
        }

        # What stands behind them, up to the last place that predicts anything.
        ends_of_rows = ends.repeat_interleave(n_choices)[:, None]
        predicts = rows.targets != IGNORED
        needed = (predicts * (steps + 1)).amax(1, keepdim=True)
        n_behind = int((needed - ends_of_rows).max().clamp_min(0))
        places = ends_of_rows + steps[:n_behind]
        is_read = places < needed
        within = places.clamp_max(n_positions - 1)
        prompt_of_rows = in_prompt.repeat_interleave(n_choices, dim=0)
        behind = {
            "input_ids": ids.take_along_dim(within, dim=1).where(is_read, 0),
            "attention_mask": torch.cat([prompt_of_rows, is_read], dim=1).long(),
            "position_ids": places,
        }

        at_end = rows.targets.take_along_dim(ends_of_rows - 1, dim=1)
        targets = rows.targets.take_along_dim(within, dim=1)
        return _Divided(
            prompts=prompts,
            ends=ends,
            at_end=rows.by_text(at_end)[..., 0],
            behind=behind,
            targets=targets.where(is_read, IGNORED),
        )

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

    def share_prompts(self) -> None:
        self._choices.share_prompts()

    def divide_vocabulary(self) -> None:
        self._choices.divide_vocabulary()

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


def _shared_ends(rows: _Rows) -> Tensor:
    """Count the tokens `(B,)` that a text's choices share from the first one on.

    Tokens that count in a score are a choice's own, even where all choices have them.
    """
    predicts = rows.targets != IGNORED
    counts = pad(predicts[:, :-1], (1, 0), value=False)
    by_text = rows.by_text(rows.inputs["input_ids"])
    is_same = (by_text == by_text[:, :1]).all(1)
    may_share = rows.by_text(rows.real & ~counts).all(1)
    is_shared = (is_same & may_share).int()
    return is_shared.cumprod(1).sum(1)


def _is_plain(cache: Cache) -> bool:
    """Tell whether a cache keeps everything, in tensors that gradients follow."""
    layers = getattr(cache, "layers", [])
    # Others forget, or write in place.
    names = {type(layer).__name__ for layer in layers}
    return names == {"DynamicLayer"}


def _has_row_and_place(value: Any, shape: torch.Size) -> bool:
    """Tell whether a value is a tensor with a number for each token."""
    return isinstance(value, Tensor) and value.shape[:2] == shape


def _log_probs(
    logits: Tensor,
    tokens: Tensor,
) -> Tensor:
    """Compute tokens' log-probabilities `(N, M, K)`; those of `IGNORED` are 0."""
    counts = tokens != IGNORED
    tokens = tokens.where(counts, 0)
    vocabulary = logits.shape[-1]
    if tokens.max() >= vocabulary:
        raise ValueError(
            f"Answers have tokens up to {tokens.max()}, but the model's output layer "
            f"has only {vocabulary}: pass the numbers that they have in it."
        )
    chosen = logits.gather(-1, tokens)
    log_p = chosen - logits.logsumexp(-1, keepdim=True)
    return log_p.where(counts, 0)


def _agree(
    logits: Tensor,
    others: Tensor,
    dtype: torch.dtype,
) -> bool:
    """Tell whether two computations of logits differ by rounding alone."""
    rounding = min(_ROUNDING * torch.finfo(dtype).eps, _ROUNDING_OF_HALF)
    difference = (logits - others).abs().max()
    return bool(difference <= rounding * others.abs().max())


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

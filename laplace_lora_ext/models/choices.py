"""Answers of several tokens behind a prompt, whose log-probabilities add up."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from laplace_lora_ext.models.answers import (
    Answers,
    AnswerTokens,
    check_tokens,
    decoder_start,
    decoder_text,
    divided,
    first_places,
    in_full,
    last_real_position,
    reading_at,
    without_cache,
)
from laplace_lora_ext.models.batches import IGNORED, text_first

SCORE_MASK = "score_mask"


class _Rows(NamedTuple):
    """A model's rows: K choices of each of B texts."""

    inputs: dict[str, Any]  # tensors `(B K, ...)`, and what is no tensor of rows
    # `(B K, T)` tokens that logits at their places predict, or `IGNORED`.
    targets: Tensor
    n_texts: int

    def by_text(self, of_rows: Tensor) -> Tensor:
        """Arrange what belongs to rows, `(B K, ...)`, by text: `(B, K, ...)`."""
        return of_rows.unflatten(0, (self.n_texts, -1))


class Choices(Answers):
    """Answers that each batch brings, other ones for each text.

    A batch has `input_ids` `(B, K, T)`, in which each of the K choices of a text stands
    behind its prompt, and a `score_mask` of that shape, true for the tokens that count.
    With an encoder-decoder both are of `decoder_input_ids`, which begin with the start
    token, and `input_ids` are `(B, T)` or `(B, K, T)`. The logit of a choice is the sum
    of its tokens' log-probabilities, each given all that stands before it, or their
    mean with `normalised`. Each choice is a row of its own.
    """

    def __init__(
        self,
        transformer: PreTrainedModel | None,
        normalised: bool = False,
        answers: Sequence[list[int]] = (),
    ) -> None:
        super().__init__(transformer, answers)
        self.normalised = normalised

    def rows(self, inputs: Any) -> Any:
        rows = self._rows(inputs)
        by_text: dict[str, Any] = {}
        for key, value in rows.inputs.items():
            lies_by_row = (
                isinstance(value, Tensor) and value.shape[:1] == rows.targets.shape[:1]
            )
            by_text[key] = rows.by_text(value) if lies_by_row else value
        return by_text

    def logits(self, inputs: Any, call: Callable[..., Any], **kwargs: Any) -> Tensor:
        logits, _ = self._scores(inputs, call, **kwargs)
        return logits

    def log_probs(self, inputs: Any, call: Callable[..., Any]) -> Tensor:
        return self.logits(inputs, call).log_softmax(-1)

    def _scores(
        self, inputs: Any, call: Callable[..., Any], **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Compute logits `(B, K)` of choices.

        Also returns logits `(B, V)` where the first choice's first token is predicted.
        """
        rows = self._rows(inputs)
        index, counts = first_places(rows.targets != IGNORED)
        keywords = without_cache(self._transformer, rows.inputs) | kwargs
        with reading_at(self._transformer, index, rows.targets.shape[1]) as read_off:
            of_vocabulary = in_full(read_off(call(rows.inputs, **keywords)))
        tokens = rows.targets.take_along_dim(index, dim=1).to(of_vocabulary.device)
        counts = counts.to(of_vocabulary.device)
        check_tokens(int(tokens.max()), of_vocabulary)
        chosen = of_vocabulary.gather(-1, tokens.where(counts, 0)[..., None])[..., 0]
        log_p = (chosen - of_vocabulary.logsumexp(-1)).where(counts, 0).sum(-1)
        if self.normalised:
            log_p = log_p / counts.sum(-1)
        return rows.by_text(log_p), rows.by_text(of_vocabulary[:, 0])[:, 0]

    def _rows(self, inputs: Any) -> _Rows:
        """Arrange a batch of choices as rows, and find what each place predicts."""
        tokens, counts = self._choices_in(inputs)
        flat = _flattened(inputs, tokens)
        if self._decodes:
            text = decoder_text(flat)
            flat = dict(text_first(flat))
        else:
            # Padding that is moved behind the text takes the mask along.
            flat = dict(text_first(flat | {SCORE_MASK: counts.flatten(0, 1)}))
            counts = flat.pop(SCORE_MASK).unflatten(0, counts.shape[:2])
            text = flat
        return _Rows(flat, _targets(text, counts), n_texts=len(tokens))

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
        is_odd = counts.ndim != 3 or counts.shape[1] < 2
        if tokens is None or tokens.shape != counts.shape or is_odd:
            shape = None if tokens is None else tuple(tokens.shape)
            raise ValueError(
                f"{key} and score_mask must be of one shape, (texts, choices, tokens), "
                f"with two choices or more, not {shape} and {tuple(counts.shape)}."
            )
        return tokens, counts.bool()


class AnswerTexts(Choices):
    """A language model's answers, of several tokens, the same for all texts.

    Each answer is read behind the prompt, or in an encoder-decoder by the decoder, as a
    choice of `Choices`.
    """

    def __init__(
        self,
        class_token_ids: list[list[int]],
        transformer: PreTrainedModel | None,
        normalised: bool = False,
    ) -> None:
        super().__init__(transformer, normalised, class_token_ids)
        self.class_token_ids = class_token_ids
        self._first_tokens = sorted({answer[0] for answer in class_token_ids})

    def logits(self, inputs: Any, call: Callable[..., Any], **kwargs: Any) -> Tensor:
        logits, at_first = self._scores(inputs, call, **kwargs)
        self._weigh(at_first, self._first_tokens)
        return logits

    def log_probs(self, inputs: Any, call: Callable[..., Any]) -> Tensor:
        """Compute log-probabilities `(B, C + 1)` of the answers, and of all else.

        All else are texts that begin with other tokens than any answer.
        """
        logits, at_first = self._scores(inputs, call)
        of_first, of_others = divided(at_first, self._first_tokens)
        of_any_answer = of_first.logsumexp(-1, keepdim=True)
        return torch.cat([logits.log_softmax(-1) + of_any_answer, of_others], dim=1)

    def _rows(self, inputs: Any) -> _Rows:
        return super()._rows(self._as_choices(inputs))

    def _as_choices(self, inputs: Any) -> dict[str, Any]:
        """Put each answer behind each prompt of a batch, `(B, K, T)`."""
        if not isinstance(inputs, Mapping) or SCORE_MASK in inputs:
            raise ValueError(
                "Answers of several tokens are put behind the input_ids of mappings "
                "without a score_mask: leave it out, or class_token_ids and "
                "class_texts where the batch has choices of its own."
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
    """Make the answers of classes that have one token each, or several.

    A `ValueError` unless they are two or more distinct ones, in tokens.
    """
    answers = _in_tokens(class_token_ids)
    are_distinct = len({tuple(answer) for answer in answers}) == len(answers)
    has_tokens = all(answer and min(answer) >= 0 for answer in answers)
    if len(answers) < 2 or not are_distinct or not has_tokens:
        raise ValueError(
            "class_token_ids must be two or more distinct answers of one or more "
            f"tokens, as the model's tokenizer has them, not {answers}."
        )
    of_one_token = all(len(answer) == 1 for answer in answers)
    is_masked = transformer is not None and _is_masked(transformer)
    if is_masked and not (of_one_token and mask_token_id is not None):
        raise ValueError(
            f"{type(transformer).__name__} is a masked language model, which answers "
            "with one token, at the mask token: give each class one, and pass "
            "mask_token_id=tokenizer.mask_token_id."
        )
    if of_one_token:
        return AnswerTokens([token for (token,) in answers], transformer, mask_token_id)
    return AnswerTexts(answers, transformer, normalised)


def class_tokens(
    class_token_ids: Sequence[Any] | None,
    class_texts: Sequence[str] | None,
    tokenizer: Any,
) -> Sequence[Any] | None:
    """Return the answers' tokens, if any are given: texts are tokenized as they stand.

    They get no special tokens. A `ValueError` if there is no tokenizer, or both are
    given.
    """
    if class_texts is None:
        return class_token_ids
    is_text = isinstance(class_texts, str)
    if class_token_ids is not None or tokenizer is None or is_text:
        raise ValueError(
            "class_texts must be a list of texts, one a class, with the model's "
            "tokenizer=AutoTokenizer.from_pretrained(...) and without class_token_ids."
        )
    return [
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in class_texts
    ]


def _in_tokens(class_token_ids: Any) -> list[list[int]]:
    """Return each answer's tokens; a `ValueError` if they are no whole numbers."""
    answers: list[list[int]] = []
    try:
        for answer in class_token_ids:
            each = answer.tolist() if isinstance(answer, Tensor) else answer
            tokens = each if isinstance(each, list | tuple) else [each]
            answers.append([operator.index(token) for token in tokens])
    except TypeError:
        raise ValueError(
            f"class_token_ids must be numbers of tokens, not {class_token_ids!r}. "
            "tokenizer.convert_tokens_to_ids gives them, and None for what is no token "
            "of the vocabulary: tokenizer.tokenize shows how answers are written there."
        ) from None
    return answers


def _is_masked(transformer: PreTrainedModel) -> bool:
    """Tell whether a model is a masked language model, and nothing else."""
    name = type(transformer).__name__
    writes = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if writes or transformer.config.is_encoder_decoder:
        return False
    return name in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()


def _flattened(inputs: Mapping[str, Any], choices: Tensor) -> dict[str, Any]:
    """Give each of the choices `(B, K, T)` a row, with all that its text has.

    What lies by choice has the shape of the choices, or of an encoder's texts of them.
    """
    n_texts, n_choices = choices.shape[:2]
    of_encoder = inputs.get("input_ids")
    shapes = [choices.shape]
    if of_encoder is not None and of_encoder.ndim == 3:
        shapes.append(of_encoder.shape)
    rows: dict[str, Any] = {}
    for key, value in inputs.items():
        rows[key] = value
        if not isinstance(value, Tensor) or value.ndim == 0:
            continue
        if value.shape in shapes:
            rows[key] = value.flatten(0, 1)
        elif len(value) == n_texts:
            rows[key] = value.repeat_interleave(n_choices, dim=0)
    del rows[SCORE_MASK]
    return rows


def _targets(text: Mapping[str, Any], counts: Tensor) -> Tensor:
    """Return the tokens `(B K, T)` that logits at their places predict, or `IGNORED`.

    A `ValueError` if a choice has no token that counts, or one that nothing predicts.
    """
    empty = (~counts.any(-1)).nonzero().tolist()
    if empty:
        row, choice = empty[0]
        raise ValueError(
            f"Choice {choice} of text {row} has no token that counts: score_mask is 0 "
            "everywhere. Give each text as many choices as the others, each with a "
            "token."
        )
    flat = counts.flatten(0, 1)
    mask = text.get("attention_mask")
    real = torch.ones_like(flat) if mask is None else mask.bool()
    follows_real = pad(real[:, :-1], (1, 0), value=False)
    unpredicted = (flat & ~(real & follows_real)).nonzero().tolist()
    if unpredicted:
        row, place = unpredicted[0]
        raise ValueError(
            f"score_mask counts token {place} of choice {row % counts.shape[1]} of "
            f"text {row // counts.shape[1]}, which is padding, or the first of its "
            "text, which nothing predicts: count the tokens of answers alone."
        )
    labels = text["input_ids"].where(flat, IGNORED)
    return pad(labels[:, 1:], (0, 1), value=IGNORED)


def _continued(
    text: Mapping[str, Any], answers: Sequence[Sequence[int]]
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
    for key, value in text.items():
        is_known = key in ("input_ids", "attention_mask")
        if not is_known and isinstance(value, Tensor) and value.shape[:2] == ids.shape:
            raise ValueError(
                f"The batch has {key} for each token, and the tokens of answers have "
                "none: leave it out, or pass batches of choices with a score_mask."
            )
    longest = max(map(len, answers))
    tokens = ids.new_zeros(len(answers), longest)
    is_token = torch.zeros_like(tokens)
    for row, answer in enumerate(answers):
        tokens[row, : len(answer)] = ids.new_tensor(answer)
        is_token[row, : len(answer)] = 1
    last = last_real_position(text)
    steps = torch.arange(longest, device=ids.device)
    places = (last[:, None] + 1 + steps)[:, None].expand(-1, len(answers), -1)

    def grown(value: Tensor, more: Tensor) -> Tensor:
        """Put `more`, `(K, L)`, behind the real tokens of each text."""
        room = pad(value, (0, longest))[:, None].expand(-1, len(answers), -1)
        return room.scatter(2, places, more.to(value.dtype).expand(places.shape))

    mask = text.get("attention_mask")
    # Shorter answers are padded, which their texts need not have been.
    mask = torch.ones_like(ids) if mask is None else mask
    return {
        **text,
        "input_ids": grown(ids, tokens),
        "attention_mask": grown(mask, is_token),
        SCORE_MASK: grown(torch.zeros_like(ids), is_token),
    }

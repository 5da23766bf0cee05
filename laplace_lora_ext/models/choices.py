"""Answers of several tokens behind a prompt, whose log-probabilities add up."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from laplace_lora_ext.models.answers import (
    Answers,
    AnswerTokens,
    Call,
    decoder_start,
    decoder_text,
    first_places,
    in_full,
    last_real_position,
    logits_at,
)
from laplace_lora_ext.models.batches import IGNORED, is_real, text_first
from laplace_lora_ext.models.running import as_tensor

SCORE_MASK = "score_mask"


class _Rows(NamedTuple):
    """A model's rows: K choices of each of B texts."""

    inputs: dict[str, Any]  # tensors `(B K, ...)`, and what is no tensor of rows
    # `(B K, T)` tokens that logits at their places predict, or `IGNORED`.
    targets: Tensor
    n_texts: int


class Choices(Answers):
    """Answers that each batch brings, other ones for each text.

    A batch has `input_ids` `(B, K, T)`, in which each of the K choices of a text stands
    behind its prompt, and a `score_mask` of that shape, true for the tokens that count.
    With an encoder-decoder both are of `decoder_input_ids`, which begin with the start
    token, and `input_ids` are `(B, T)`. The logit of a choice is the sum of its tokens'
    log-probabilities, each given all that stands before it, or their mean with
    `normalised`. Each choice is a row of its own.
    """

    def __init__(
        self,
        transformer: PreTrainedModel | None,
        normalised: bool,
        first_tokens: Sequence[int] = (),
    ) -> None:
        super().__init__(transformer, first_tokens)
        self.normalised = normalised

    def rows(self, inputs: Any) -> Any:
        flat, targets, n_texts = self._rows(inputs)
        return {
            key: value.unflatten(0, (n_texts, -1))
            if isinstance(value, Tensor) and value.shape[:1] == targets.shape[:1]
            else value
            for key, value in flat.items()
        }

    def scores(self, inputs: Any, call: Call) -> tuple[Tensor, Tensor]:
        """Compute logits `(B, K)`, and those where a text's first choice begins."""
        flat, targets, n_texts = self._rows(inputs)
        index, counts = first_places(targets != IGNORED)
        call_here = partial(call, flat)
        of_vocabulary = in_full(
            logits_at(self._transformer, index, targets.shape[1], call_here)
        )
        tokens = targets.take_along_dim(index, dim=1).to(of_vocabulary.device)
        counts = counts.to(of_vocabulary.device)
        chosen = of_vocabulary.gather(-1, tokens.where(counts, 0)[..., None])[..., 0]
        log_p = (chosen - of_vocabulary.logsumexp(-1)).where(counts, 0).sum(-1)
        if self.normalised:
            log_p = log_p / counts.sum(-1)
        n_choices = len(targets) // n_texts
        return log_p.unflatten(0, (n_texts, -1)), of_vocabulary[::n_choices, 0]

    def _rows(self, inputs: Any) -> _Rows:
        """Arrange a batch of choices as rows, and find what each place predicts."""
        counts = self._counted(inputs)
        n_texts, n_choices, _ = counts.shape
        flat = _flattened({**inputs, SCORE_MASK: counts}, counts.shape)
        if self.decodes:
            counts = flat.pop(SCORE_MASK)
            text = decoder_text(flat)
        else:
            # Padding that is moved behind the text takes the mask along.
            text = flat = dict(text_first(flat))
            counts = flat.pop(SCORE_MASK)
        return _Rows(flat, _targets(text, counts, n_choices), n_texts)

    def _counted(self, inputs: Any) -> Tensor:
        """Return which tokens of a batch's choices count, `(B, K, T)` booleans."""
        text = inputs if isinstance(inputs, Mapping) else {}
        counts = text.get(SCORE_MASK)
        key = "decoder_input_ids" if self.decodes else "input_ids"
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
        return counts.bool()


class AnswerTexts(Choices):
    """A language model's answers, of several tokens, the same for all texts.

    Each answer is read behind the prompt, or in an encoder-decoder by the decoder, as a
    choice of `Choices`.
    """

    def __init__(
        self,
        class_token_ids: list[list[int]],
        transformer: PreTrainedModel | None,
        normalised: bool,
    ) -> None:
        first_tokens = sorted({answer[0] for answer in class_token_ids})
        super().__init__(transformer, normalised, first_tokens)
        self.class_token_ids = self._answers = class_token_ids

    def _rows(self, inputs: Any) -> _Rows:
        return super()._rows(self._as_choices(inputs))

    def _as_choices(self, inputs: Any) -> dict[str, Any]:
        """Put each answer behind each prompt of a batch, `(B, K, T)`."""
        if not self.decodes:
            return _continued(inputs, self._answers)
        assert self._transformer is not None
        given = decoder_start(self._transformer, inputs)
        continued = _continued(decoder_text(given), self._answers)
        counts = continued.pop(SCORE_MASK)
        of_decoder = {f"decoder_{key}": value for key, value in continued.items()}
        return {**given, **of_decoder, SCORE_MASK: counts}


@dataclass
class DataCollatorForChoices:
    """Joins prompts and the texts of their choices to batches.

    For models that read texts once.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        prompts get its special tokens, choices none
    max_length : int, optional
        tokens to keep of a prompt with its longest choice; the prompt's beginning goes,
        behind special tokens that all prompts begin with

    Notes
    -----
    In a `transformers.Trainer`, pass `remove_unused_columns=False`.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int | None = None

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> BatchEncoding:
        """Make a batch of B examples.

        Parameters
        ----------
        features : sequence of Mapping
            "prompt", a text, "choices", as many texts in each example, which stand
            behind the prompt as they are, with a space in front where they need one,
            and perhaps "labels", the number of the right one

        Returns
        -------
        BatchEncoding
            `input_ids`, `attention_mask` and `score_mask`, `(B, K, T)`, and perhaps
            `labels` `(B,)`

        Raises
        ------
        ValueError
            If the examples have unequal numbers of choices, or one leaves no token of
            `max_length` to the prompt.
        """
        tokens: list[Tensor] = []
        counts: list[Tensor] = []
        numbers: set[int] = set()
        for feature in features:
            answers = [
                self.tokenizer(choice, add_special_tokens=False)["input_ids"]
                for choice in feature["choices"]
            ]
            numbers.add(len(answers))
            prompt = self._prompt(feature["prompt"], max(map(len, answers), default=0))
            for answer in answers:
                tokens.append(torch.tensor(prompt + answer))
                counts.append(torch.tensor([0] * len(prompt) + [1] * len(answer)))
        if len(numbers) > 1:
            raise ValueError(
                f"The examples of a batch have {sorted(numbers)} choices: put those "
                "with equally many into batches of their own."
            )
        rows = {
            "input_ids": tokens,
            "attention_mask": [torch.ones_like(text) for text in tokens],
            SCORE_MASK: counts,
        }
        # Padding may be any token, since the mask leaves it out.
        batch = {
            key: pad_sequence(of_key, True).unflatten(0, (len(features), -1))
            for key, of_key in rows.items()
        }
        if "labels" in features[0]:
            batch["labels"] = torch.tensor([feature["labels"] for feature in features])
        return BatchEncoding(batch)

    def _prompt(self, text: str, n_of_answer: int) -> list[int]:
        encoded = self.tokenizer(text, return_special_tokens_mask=True)
        tokens = encoded["input_ids"]
        if self.max_length is None:
            return tokens
        # Without the token that begins all texts, many models read none as they should.
        n_first = [*encoded["special_tokens_mask"], 0].index(0)
        n_kept = self.max_length - n_of_answer - n_first
        if n_kept < 1:
            raise ValueError(
                f"A choice has {n_of_answer} tokens, which leave none of max_length="
                f"{self.max_length} to the prompt: raise it."
            )
        return tokens[:n_first] + tokens[n_first:][-n_kept:]


def answers_of(
    class_token_ids: Any,
    transformer: PreTrainedModel | None,
    mask_token_id: int | None,
    normalised: bool,
) -> Answers:
    """Make the answers of classes that have one token each, or several.

    A `ValueError` unless they are two or more distinct ones, in tokens.
    """
    try:
        answers = [
            [operator.index(token) for token in as_tensor(answer).flatten().tolist()]
            for answer in class_token_ids
        ]
    except (TypeError, ValueError, RuntimeError):  # what is no token's number
        answers = []
    are_distinct = len({tuple(answer) for answer in answers}) == len(answers)
    has_tokens = all(answer and min(answer) >= 0 for answer in answers)
    if len(answers) < 2 or not are_distinct or not has_tokens:
        raise ValueError(
            "class_token_ids must be two or more distinct answers of one or more "
            f"tokens, not {class_token_ids!r}. tokenizer.convert_tokens_to_ids gives "
            "their numbers, and None for what is no token of the vocabulary: "
            "tokenizer.tokenize shows how answers are written there."
        )
    of_one_token = all(len(answer) == 1 for answer in answers)
    is_masked = transformer is not None and not transformer.can_generate()
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


def _flattened(inputs: Mapping[str, Any], shape: torch.Size) -> dict[str, Any]:
    """Give each choice a row, with all that its text has.

    What lies by choice has the shape of the choices, `(B, K, T)`.
    """
    n_texts, n_choices, _ = shape
    rows = dict(inputs)
    for key, value in inputs.items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            continue
        if value.shape == shape:
            rows[key] = value.flatten(0, 1)
        elif len(value) == n_texts:
            rows[key] = value.repeat_interleave(n_choices, dim=0)
    return rows


def _targets(text: Mapping[str, Any], counts: Tensor, n_choices: int) -> Tensor:
    """Return the tokens `(B K, T)` that logits at their places predict, or `IGNORED`.

    A `ValueError` if a choice has no token that counts, or one that nothing predicts.
    """
    real = is_real(text)
    follows_real = pad(real[:, :-1], (1, 0), value=False)
    unpredicted = counts & ~(real & follows_real)
    is_wrong = unpredicted.any(-1) | ~counts.any(-1)
    if is_wrong.any():
        row, choice = divmod(int(is_wrong.int().argmax()), n_choices)
        raise ValueError(
            f"The score_mask of choice {choice} of text {row} is 0 everywhere, or "
            "counts padding or the first token, which nothing predicts: count the "
            "tokens of answers alone, and give all texts equally many."
        )
    labels = text["input_ids"].where(counts, IGNORED)
    return pad(labels[:, 1:], (0, 1), value=IGNORED)


def _continued(
    text: Mapping[str, Any], answers: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Put K answers behind the real tokens of texts, and mark them: `(B, K, T + L)`.

    What is no tensor of tokens stays as it is.
    """
    ids = text.get("input_ids")
    by_token = {
        key
        for key, value in text.items()
        if ids is not None
        and isinstance(value, Tensor)
        and value.shape[:2] == ids.shape[:2]
    } - {"input_ids", "attention_mask"}
    if ids is None or ids.ndim != 2 or by_token:
        raise ValueError(
            "Answers of several tokens are put behind input_ids (texts, tokens) of a "
            f"batch, beside which it can't have {sorted(by_token) or 'other tokens'}: "
            "leave these out, or leave out class_token_ids and class_texts, and pass "
            "batches of choices with a score_mask."
        )
    tokens = pad_sequence([ids.new_tensor(answer) for answer in answers], True)
    lengths = [ids.new_ones(len(answer)) for answer in answers]
    is_token = pad_sequence(lengths, batch_first=True)

    def joined(of_texts: Tensor, of_answers: Tensor) -> Tensor:
        """Put `(K, L)` behind each row of `(B, T)`."""
        rows = of_texts[:, None].expand(-1, len(answers), -1)
        return torch.cat([rows, of_answers.expand(len(ids), -1, -1)], dim=-1)

    # Padding goes behind the answers.
    last = last_real_position(text)[:, None]
    is_behind = torch.arange(ids.shape[1], device=ids.device) > last
    order = joined(is_behind.int(), 1 - is_token).argsort(dim=-1, stable=True)
    return {
        **text,
        "input_ids": joined(ids, tokens).gather(-1, order),
        # Shorter answers are padded, which their texts need not have been.
        "attention_mask": joined(is_real(text), is_token).gather(-1, order),
        SCORE_MASK: joined(torch.zeros_like(ids), is_token).gather(-1, order),
    }

"""Batches of choices of several tokens, and logits by other means."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tests.support.models import CLASS_TOKEN_IDS, VOCABULARY, first_batch
from tests.support.posteriors import generator

Tokens: TypeAlias = Sequence[int]
Batch: TypeAlias = Mapping[str, Tensor]

# The first is a prefix of the second, and the last one begins like it.
ANSWERS = [[11], [11, 5, 30], [23, 42], [11, 5, 8]]


def prompts_of(batch: Batch) -> list[list[int]]:
    """Take the tokens of each text of a batch, without padding."""
    masks = batch["attention_mask"].bool()
    rows = zip(batch["input_ids"], masks, strict=True)
    return [row[is_real].tolist() for row, is_real in rows]


def choices_batch(
    prompts: Sequence[Tokens], choices: Sequence[Sequence[Tokens]], side: str = "right"
) -> dict[str, Tensor]:
    """Put each choice of each prompt behind it, `(B, K, T)`, and mark what counts."""
    tokens: list[Tensor] = []
    counts: list[Tensor] = []
    for prompt, answers in zip(prompts, choices, strict=True):
        for answer in answers:
            text = torch.tensor([*prompt, *answer])
            is_answer = torch.ones_like(text)
            is_answer[: len(prompt)] = 0
            tokens.append(text)
            counts.append(is_answer)
    rows_by_key = {
        "input_ids": tokens,
        # Of ones, which padding turns into 0 where there is no token.
        "attention_mask": [torch.ones_like(text) for text in tokens],
        "score_mask": counts,
    }
    n_texts = len(prompts)
    batch = {}
    for key, rows in rows_by_key.items():
        padded = pad_sequence(rows, batch_first=True, padding_side=side)
        batch[key] = padded.reshape(n_texts, -1, padded.shape[1])
    return batch


def of_prompts(
    batches: Sequence[Batch], answers: Sequence[Tokens], side: str = "right"
) -> list[dict[str, Tensor]]:
    """Make batches of choices that are the same for each text."""
    made = []
    for batch in batches:
        prompts = prompts_of(batch)
        of_batch = choices_batch(prompts, [answers] * len(prompts), side)
        made.append(of_batch | {"labels": batch["labels"]})
    return made


def some_choices(draws: torch.Generator) -> list[list[int]]:
    """Draw three choices of 1 to 4 tokens."""
    draw = partial(torch.randint, generator=draws)
    lengths = draw(1, 5, (3,)).tolist()
    # Token 0 is padding.
    return [draw(1, VOCABULARY, (length,)).tolist() for length in lengths]


def batches_of_own_choices(side: str = "right") -> list[dict[str, Tensor]]:
    """Make two batches of texts with three choices each, of 1 to 4 tokens."""
    texts = first_batch(lengths=(5, 2, 6, 3, 4), batch_size=5)
    prompts = prompts_of(texts)
    labels = texts["labels"]
    draws = generator(4)
    choices = [some_choices(draws) for _ in prompts]
    # Batches of two sizes, so that nothing kept of the first fits the second.
    return [
        choices_batch(prompts[rows], choices[rows], side) | {"labels": labels[rows]}
        for rows in (slice(0, 3), slice(3, 5))
    ]


@dataclass(frozen=True)
class Choice:
    """A text with a choice behind it, unpadded: tokens, and which of them count."""

    tokens: Tensor
    counts: Tensor


def unpadded_choices(batch: Batch) -> list[list[Choice]]:
    """Take a batch's choices, text by text."""
    is_real = batch["attention_mask"].bool()
    counts = batch["score_mask"].bool()
    tokens = batch["input_ids"]
    n_texts, n_choices, _ = tokens.shape

    def choice(place: tuple[int, int]) -> Choice:
        kept = is_real[place]
        return Choice(tokens[place][kept], counts[place][kept])

    return [
        [choice((text, number)) for number in range(n_choices)]
        for text in range(n_texts)
    ]


def logits_of_choices(
    model: nn.Module, choices: Sequence[Choice], normalised: bool = False
) -> Tensor:
    """Sum log-probabilities of tokens that count, `(K,)`, choice by choice."""
    logits = []
    for choice in choices:
        text = choice.tokens[None]
        output = model(input_ids=text, use_cache=False)
        log_p = output.logits[0].log_softmax(-1)
        (places,) = choice.counts.nonzero(as_tuple=True)
        tokens = choice.tokens[places]
        # What a place predicts is the token behind it.
        of_tokens = log_p[places - 1, tokens]
        of_choice = of_tokens.sum()
        if normalised:
            of_choice = of_choice / len(tokens)
        logits.append(of_choice)
    return torch.stack(logits)


def one_token_choices(batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """Make the choices that `CLASS_TOKEN_IDS` are of texts."""
    answers = [[token] for token in CLASS_TOKEN_IDS]
    return of_prompts(batches, answers)

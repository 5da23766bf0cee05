"""Batches of choices of several tokens, and logits by other means."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from tests.support.models import CLASS_TOKEN_IDS, VOCABULARY, ragged_batches

# The first is a prefix of the second, and the last one begins like it.
ANSWERS = [[11], [11, 5, 30], [23, 42], [11, 5, 8]]


def prompts_of(batch: Mapping[str, torch.Tensor]) -> list[list[int]]:
    """Take the tokens of each text of a batch, without padding."""
    prompts = []
    for row, is_real in enumerate(batch["attention_mask"].bool()):
        tokens = batch["input_ids"][row][is_real]
        prompts.append(tokens.tolist())
    return prompts


def choices_batch(
    prompts: Sequence[Sequence[int]],
    choices: Sequence[Sequence[Sequence[int]]],
    side: str = "right",
) -> dict[str, torch.Tensor]:
    """Put each choice of each prompt behind it, `(B, K, T)`, and mark what counts."""
    tokens: list[torch.Tensor] = []
    counts: list[torch.Tensor] = []
    for prompt, answers in zip(prompts, choices, strict=True):
        for answer in answers:
            text = torch.tensor([*prompt, *answer])
            is_answer = torch.arange(len(text)) >= len(prompt)
            tokens.append(text)
            counts.append(is_answer.long())
    rows_by_key = {
        "input_ids": tokens,
        "attention_mask": [torch.ones_like(text) for text in tokens],
        "score_mask": counts,
    }
    batch = {}
    for key, rows in rows_by_key.items():
        padded = pad_sequence(rows, batch_first=True, padding_side=side)
        batch[key] = padded.unflatten(0, (len(prompts), -1))
    return batch


def of_prompts(
    batches: Sequence[Mapping[str, torch.Tensor]],
    answers: Sequence[Sequence[int]],
    side: str = "right",
) -> list[dict[str, torch.Tensor]]:
    """Make batches of choices that are the same for each text."""
    made = []
    for batch in batches:
        prompts = prompts_of(batch)
        of_batch = choices_batch(prompts, [answers] * len(prompts), side)
        made.append(of_batch | {"labels": batch["labels"]})
    return made


def some_choices(generator: torch.Generator) -> list[list[int]]:
    """Draw three choices of 1 to 4 tokens."""
    lengths = torch.randint(1, 5, (3,), generator=generator)
    choices = []
    for length in lengths.tolist():
        tokens = torch.randint(1, VOCABULARY, (length,), generator=generator)
        choices.append(tokens.tolist())
    return choices


def batches_of_own_choices(side: str = "right") -> list[dict[str, torch.Tensor]]:
    """Make two batches of texts with three choices each, of 1 to 4 tokens."""
    (texts,) = ragged_batches(lengths=(5, 2, 6, 3, 4), batch_size=5)
    prompts = prompts_of(texts)
    labels = texts["labels"]
    generator = torch.Generator().manual_seed(4)
    choices = [some_choices(generator) for _ in prompts]
    first = choices_batch(prompts[:3], choices[:3], side)
    second = choices_batch(prompts[3:], choices[3:], side)
    return [
        first | {"labels": labels[:3]},
        second | {"labels": labels[3:]},
    ]


@dataclass(frozen=True)
class Choice:
    """A text with a choice behind it, unpadded: tokens, and which of them count."""

    tokens: torch.Tensor
    counts: torch.Tensor


def unpadded_choices(batch: Mapping[str, torch.Tensor]) -> list[list[Choice]]:
    """Take a batch's choices, text by text."""
    masks = batch["attention_mask"].bool()
    texts = []
    for text, of_choices in enumerate(masks):
        choices = []
        for row, is_real in enumerate(of_choices):
            choice = Choice(
                tokens=batch["input_ids"][text, row][is_real],
                counts=batch["score_mask"][text, row][is_real].bool(),
            )
            choices.append(choice)
        texts.append(choices)
    return texts


def logits_of_choices(
    model: nn.Module,
    choices: Sequence[Choice],
    normalised: bool = False,
) -> torch.Tensor:
    """Sum log-probabilities of tokens that count, `(K,)`, choice by choice."""
    logits = []
    for choice in choices:
        output = model(input_ids=choice.tokens[None], use_cache=False)
        log_p = output.logits[0].log_softmax(-1)
        # What a place predicts is the token behind it.
        (places,) = choice.counts.nonzero(as_tuple=True)
        of_tokens = log_p[places - 1, choice.tokens[places]]
        logits.append(of_tokens.mean() if normalised else of_tokens.sum())
    return torch.stack(logits)


def one_token_choices(
    batches: Sequence[Mapping[str, torch.Tensor]],
) -> list[dict[str, Any]]:
    """Make the choices that `CLASS_TOKEN_IDS` are of texts."""
    return of_prompts(batches, [[token] for token in CLASS_TOKEN_IDS])

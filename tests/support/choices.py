"""Batches of choices of several tokens, and logits by other means."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tests.support.models import VOCABULARY, first_batch
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
    rows: list[tuple[Tensor, ...]] = []
    for prompt, answers in zip(prompts, choices, strict=True):
        for answer in answers:
            text = torch.tensor([*prompt, *answer])
            is_answer = (torch.arange(len(text)) >= len(prompt)).long()
            # Of ones, which padding turns into 0 where there is no token.
            rows.append((text, torch.ones_like(text), is_answer))
    batch = {}
    keys = "input_ids", "attention_mask", "score_mask"
    for key, column in zip(keys, zip(*rows, strict=True), strict=True):
        padded = pad_sequence(list(column), batch_first=True, padding_side=side)
        batch[key] = padded.unflatten(0, (len(prompts), -1))
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


def batches_of_own_choices(
    side: str = "right", batch_size: int = 3
) -> list[dict[str, Tensor]]:
    """Make batches of five texts with three choices each, of 1 to 4 tokens."""
    texts = first_batch(lengths=(5, 2, 6, 3, 4), batch_size=5)
    prompts = prompts_of(texts)
    labels = texts["labels"]
    draw = partial(torch.randint, generator=generator(4))
    choices = []
    for _ in prompts:
        lengths = draw(1, 5, (3,)).tolist()
        # Token 0 is padding.
        choices.append([draw(1, VOCABULARY, (length,)).tolist() for length in lengths])
    # Of two sizes by default, so that nothing kept of the first fits the second.
    parts = [slice(start, start + batch_size) for start in range(0, 5, batch_size)]
    return [
        choices_batch(prompts[rows], choices[rows], side) | {"labels": labels[rows]}
        for rows in parts
    ]


Choice: TypeAlias = tuple[Tensor, Tensor]
"""A text with a choice behind it, unpadded: tokens, and which of them count."""


def unpadded_choices(batch: Batch) -> list[list[Choice]]:
    """Take a batch's choices, text by text."""
    columns = batch["input_ids"], batch["score_mask"].bool(), batch["attention_mask"]
    return [
        [
            (tokens[is_real > 0], counts[is_real > 0])
            for tokens, counts, is_real in zip(*of_text, strict=True)
        ]
        for of_text in zip(*columns, strict=True)
    ]


def logits_of_choices(
    model: nn.Module, choices: Sequence[Choice], normalised: bool = False
) -> Tensor:
    """Sum log-probabilities of tokens that count, `(K,)`, choice by choice."""
    logits = []
    for tokens, counts in choices:
        output = model(input_ids=tokens[None], use_cache=False)
        log_p = output.logits[0].log_softmax(-1)
        # What a place predicts is the token behind it.
        of_tokens = log_p[:-1].gather(1, tokens[1:, None])[counts[1:]]
        logits.append(of_tokens.mean() if normalised else of_tokens.sum())
    return torch.stack(logits)

"""Makes batches of prompts whose choices are texts of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchEncoding, PreTrainedTokenizerBase

from laplace_lora_ext.models.choices import SCORE_MASK


@dataclass
class DataCollatorForChoices:
    """Joins prompts and the texts of their choices to batches.

    For models that read texts once.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        prompts get its special tokens, choices none
    max_length : int, optional
        tokens to keep of a prompt with its longest choice; the prompt's beginning goes

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
            If the examples have unequal numbers of choices.
        """
        rows: list[tuple[list[int], list[int]]] = []
        numbers: set[int] = set()
        for feature in features:
            answers = [
                self.tokenizer(choice, add_special_tokens=False)["input_ids"]
                for choice in feature["choices"]
            ]
            numbers.add(len(answers))
            longest = max(map(len, answers), default=0)
            prompt = self._prompt(feature["prompt"], longest)
            rows += [(prompt, answer) for answer in answers]
        if len(numbers) > 1:
            raise ValueError(
                f"The examples of a batch have {sorted(numbers)} choices: put those "
                "with equally many into batches of their own."
            )
        padding = self.tokenizer.pad_token_id
        # Any token will do, since the mask leaves it out.
        if not isinstance(padding, int):
            padding = 0
        tokens = [torch.tensor(prompt + answer) for prompt, answer in rows]
        scored = [
            torch.tensor([0] * len(prompt) + [1] * len(answer))
            for prompt, answer in rows
        ]
        batch = {
            "input_ids": pad_sequence(tokens, True, padding),
            "attention_mask": pad_sequence(list(map(torch.ones_like, tokens)), True),
            SCORE_MASK: pad_sequence(scored, True),
        }
        by_example: dict[str, Tensor] = {}
        for key, value in batch.items():
            by_example[key] = value.unflatten(0, (len(features), -1))
        if "labels" in features[0]:
            by_example["labels"] = torch.tensor(
                [feature["labels"] for feature in features]
            )
        return BatchEncoding(by_example)

    def _prompt(self, text: str, n_of_answer: int) -> list[int]:
        tokens = self.tokenizer(text)["input_ids"]
        if self.max_length is None:
            return tokens
        n_kept = self.max_length - n_of_answer
        if n_kept < 1:
            raise ValueError(
                f"A choice has {n_of_answer} tokens, which leave none of max_length="
                f"{self.max_length} to the prompt: raise it."
            )
        return tokens[-n_kept:]

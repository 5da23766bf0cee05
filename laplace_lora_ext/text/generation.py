"""What `generate` returns, and the options of transformers' own one that matter to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from laplace_lora_ext.text.scores import TextScores


@dataclass(frozen=True)
class GeneratedText:
    """What `generate` wrote.

    Attributes
    ----------
    sequences : torch.Tensor
        `(B, T)` tokens, the prompts first; what an encoder-decoder's decoder reads and writes
    scores : TextScores
        of the generated tokens, under the same draws; an encoder-decoder's have no place for the
        first token of `sequences`, which nothing predicts
    output : Any
        what transformers' `generate` returned
    """

    sequences: torch.Tensor
    scores: TextScores
    output: Any


@dataclass(frozen=True)
class Settings:
    """Options of `generate` that matter here, wherever they are set."""

    num_beams: int
    endings: list[int]
    padding: int | None
    num_return_sequences: int = 1

    @classmethod
    def of(cls, transformer: PreTrainedModel, generation_kwargs: Mapping[str, Any]) -> Settings:
        given = generation_kwargs.get("generation_config")
        configs = [given, getattr(transformer, "generation_config", None), transformer.config]

        def setting(name: str) -> Any:
            found = [generation_kwargs.get(name), *(getattr(c, name, None) for c in configs)]
            return next((value for value in found if value is not None), None)

        end = setting("eos_token_id")
        endings = [] if end is None else torch.as_tensor(end).flatten().tolist()
        n_texts = setting("num_return_sequences") or 1
        return cls(setting("num_beams") or 1, endings, setting("pad_token_id"), n_texts)

    def is_padding(self, tokens: torch.Tensor) -> torch.Tensor:
        """Which tokens are padding; none if the token of padding also ends texts."""
        if self.padding is None or self.padding in self.endings:
            return torch.zeros_like(tokens, dtype=torch.bool)
        return tokens == self.padding

    def written(self, new: torch.Tensor) -> torch.Tensor:
        """`(B, T)` booleans, true up to the first of the generated tokens that ends the text."""
        ends = torch.isin(new, torch.tensor(self.endings, device=new.device, dtype=new.dtype))
        before_end = ends.cumsum(1) - ends.int() == 0
        more_to_come = (~self.is_padding(new)).flip(1).cumsum(1).flip(1) > 0
        return before_end & more_to_come

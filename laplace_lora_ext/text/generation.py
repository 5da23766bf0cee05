"""What `generate` returns, and the options of transformers' own one that matter to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import MaxTimeCriteria, PreTrainedModel

from laplace_lora_ext.models.default_device import as_tensor
from laplace_lora_ext.text.scores import TextScores

Stop = Callable[[torch.Tensor, Any], Any]
"""Takes sequences `(B, T)` and scores, and returns whether, or which of them, to stop."""


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
    """Options of `generate` that matter here, wherever they are set.

    Attributes
    ----------
    num_beams, num_return_sequences : int
    endings : list of int
        tokens that end a text
    padding : int or None
    stops : list of callable
        what else ends some texts of a batch before others
    """

    num_beams: int
    endings: list[int]
    padding: int | None
    num_return_sequences: int = 1
    stops: Sequence[Stop] = ()

    @classmethod
    def of(cls, transformer: PreTrainedModel, generation_kwargs: Mapping[str, Any]) -> Settings:
        given = generation_kwargs.get("generation_config")
        configs = [given, getattr(transformer, "generation_config", None), transformer.config]

        def setting(name: str) -> Any:
            found = [generation_kwargs.get(name), *(getattr(c, name, None) for c in configs)]
            return next((value for value in found if value is not None), None)

        end = setting("eos_token_id")
        endings = [] if end is None else as_tensor(end).flatten().tolist()
        criteria = generation_kwargs.get("stopping_criteria") or ()
        stops = [stop for stop in criteria if not isinstance(stop, MaxTimeCriteria)]
        tokenizer = generation_kwargs.get("tokenizer")
        if setting("stop_strings") and tokenizer is not None:
            stops.append(transformers.StopStringCriteria(tokenizer, setting("stop_strings")))
        return cls(
            setting("num_beams") or 1,
            endings,
            setting("pad_token_id"),
            setting("num_return_sequences") or 1,
            stops,
        )

    def is_padding(self, tokens: torch.Tensor) -> torch.Tensor:
        """Which tokens are padding; none if the token of padding also ends texts."""
        if self.padding is None or self.padding in self.endings:
            return torch.zeros_like(tokens, dtype=torch.bool)
        return tokens == self.padding

    def written(self, sequences: torch.Tensor, start: int) -> torch.Tensor:
        """`(B, T - start)` booleans, true at generated tokens up to the first that ends a text."""
        new = sequences[:, start:]
        ends = torch.isin(new, torch.tensor(self.endings, device=new.device, dtype=new.dtype))
        before_end = ends.cumsum(1) - ends.int() == 0
        more_to_come = (~self.is_padding(new)).flip(1).cumsum(1).flip(1) > 0
        return before_end & more_to_come & ~self._is_padded(sequences, start, ends)

    def _is_padded(self, sequences: torch.Tensor, start: int, ends: torch.Tensor) -> torch.Tensor:
        """Where a text that was stopped goes on with padding that looks like an ending."""
        padded = torch.zeros_like(ends)
        first = (ends & (sequences[:, start:] == self.padding)).int().argmax(1)
        for place in first[first > 0].unique().tolist() if self.stops else ():
            whole = sequences[:, : start + place]
            for stop in self.stops:
                padded[:, place] |= torch.as_tensor(stop(whole, None), device=ends.device)
            padded[:, place] &= first == place
        return padded

"""What transformers' `generate` is given, and what the posterior makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from laplace_lora_ext.likelihoods import IGNORED
from laplace_lora_ext.text.scores import TextScores

_LOOKED_AT = 8  # tokens of a prompt on which to compare ways to multiply with Jacobians


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

    @classmethod
    def of(cls, transformer: PreTrainedModel, generation_kwargs: Mapping[str, Any]) -> Settings:
        given = generation_kwargs.get("generation_config")
        configs = [given, getattr(transformer, "generation_config", None), transformer.config]

        def setting(name: str) -> Any:
            found = [generation_kwargs.get(name), *(getattr(c, name, None) for c in configs)]
            return next((value for value in found if value is not None), None)

        end = setting("eos_token_id")
        endings = [] if end is None else torch.as_tensor(end).flatten().tolist()
        return cls(setting("num_beams") or 1, endings, setting("pad_token_id"))

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


@dataclass(frozen=True)
class Prompt:
    """Prompts `(B, T)` with their mask, padded on the left."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor

    @classmethod
    def of(
        cls, generation_kwargs: Mapping[str, Any], settings: Settings, device: torch.device
    ) -> Prompt:
        """The prompts among `generate`'s arguments, with the mask that it takes or makes."""
        tokens = generation_kwargs.get("input_ids")
        if tokens is None:
            raise ValueError("Pass input_ids, as a tokenizer makes them.")
        mask = generation_kwargs.get("attention_mask")
        if mask is None:
            mask = (~settings.is_padding(tokens)).long()
        return cls(tokens.to(device), mask.to(device))

    def as_text(self) -> dict[str, torch.Tensor]:
        """The prompts as texts with a few labelled tokens."""
        # Repeat the last token: a single one would have nothing to predict.
        tokens = torch.cat([self.input_ids, self.input_ids[:, -1:]], dim=1)
        mask = torch.cat([self.attention_mask, torch.ones_like(self.attention_mask[:, :1])], dim=1)
        labelled = mask.bool()
        labelled[:, :-_LOOKED_AT] = False
        return _labelled(tokens, mask, labelled)

    def continued(self, sequences: torch.Tensor, settings: Settings) -> dict[str, torch.Tensor]:
        """Whole texts, with labels on generated tokens up to the first one that ends the text."""
        new = settings.written(sequences[:, self.input_ids.shape[1] :])
        mask = repeated(self.attention_mask, len(sequences))
        generated = torch.cat([torch.zeros_like(mask).bool(), new], dim=1)
        return _labelled(sequences, torch.cat([mask, new.to(mask)], dim=1), generated)


@dataclass(frozen=True)
class Source(Prompt):
    """Texts `(B, T)` for the encoder of an encoder-decoder, and what its decoder begins with."""

    decoder_input_ids: torch.Tensor | None = None

    @classmethod
    def of(
        cls, generation_kwargs: Mapping[str, Any], settings: Settings, device: torch.device
    ) -> Source:
        texts = Prompt.of(generation_kwargs, settings, device)
        begun = generation_kwargs.get("decoder_input_ids")
        begun = None if begun is None else begun.to(device)
        return cls(texts.input_ids, texts.attention_mask, begun)

    def as_text(self) -> dict[str, torch.Tensor]:
        """The texts, each with its own first tokens to be written."""
        looked_at = torch.arange(self.input_ids.shape[1], device=self.input_ids.device) < _LOOKED_AT
        labelled = self.attention_mask.bool() & looked_at
        return _labelled(self.input_ids, self.attention_mask, labelled)

    def continued(self, sequences: torch.Tensor, settings: Settings) -> dict[str, torch.Tensor]:
        """The texts, with what the decoder read and, as labels, what it wrote."""
        begun = self._n_begun(sequences)
        written = torch.zeros_like(sequences, dtype=torch.bool)
        written[:, begun:] = settings.written(sequences[:, begun:])
        return {
            "input_ids": repeated(self.input_ids, len(sequences)),
            "attention_mask": repeated(self.attention_mask, len(sequences)),
            "decoder_input_ids": sequences[:, :-1],
            "labels": torch.where(written, sequences, IGNORED)[:, 1:],
        }

    def _n_begun(self, sequences: torch.Tensor) -> int:
        """How many tokens the decoder began with: transformers may put one before those given."""
        if self.decoder_input_ids is None:
            return 1
        given = repeated(self.decoder_input_ids, len(sequences))
        return given.shape[1] + (not torch.equal(sequences[:, : given.shape[1]], given))


def repeated(values: torch.Tensor, n_rows: int) -> torch.Tensor:
    """Each row as often as `generate` repeats it, for beams or several texts of a prompt."""
    return values.repeat_interleave(n_rows // len(values), dim=0)


def _labelled(
    tokens: torch.Tensor, mask: torch.Tensor, labelled: torch.Tensor
) -> dict[str, torch.Tensor]:
    labels = torch.where(labelled, tokens, IGNORED)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}

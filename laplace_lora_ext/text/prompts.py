"""What transformers' `generate` is to continue, and the texts that come of it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from laplace_lora_ext.likelihoods import IGNORED
from laplace_lora_ext.text.generation import Settings

_LOOKED_AT = 8  # tokens of a prompt on which to compare ways to multiply with Jacobians

Inputs = dict[str, torch.Tensor]


class Given(Protocol):
    """What a model is to continue.

    Attributes
    ----------
    length : int
        tokens of a prompt, or what an encoder reads in their place
    can_join : bool
        whether draws may read it as one batch
    """

    @property
    def length(self) -> int: ...

    @property
    def can_join(self) -> bool: ...

    def inputs(self) -> dict[str, Any]:
        """Arguments for `generate`."""
        ...

    def encoded(self, n_rows: int) -> Inputs:
        """What encoders have read before the first call of the model, whose rows are so many."""
        ...

    def as_text(self) -> Inputs:
        """A batch with a few labelled tokens."""
        ...

    def continued(self, sequences: torch.Tensor, settings: Settings) -> Inputs:
        """Whole texts, with labels on generated tokens up to the first one that ends the text."""
        ...


def given(
    transformer: PreTrainedModel,
    generation_kwargs: Mapping[str, Any],
    settings: Settings,
    device: torch.device,
) -> Given:
    """The prompts, or sources of an encoder-decoder, among `generate`'s arguments.

    Raises
    ------
    ValueError
        If they are missing.
    NotImplementedError
        If what they are, or the texts that come of them, can't be scored.
    """
    kind: Any = type(transformer)
    if kind.generate.__module__.startswith("transformers.models."):
        raise NotImplementedError(
            f"{kind.__name__} has a generate of its own, whose texts the posterior "
            "can't follow: let the model write, and score what it wrote with la.score(batch)."
        )
    inputs = _model_inputs(generation_kwargs, device)
    if not transformer.config.is_encoder_decoder:
        return Prompt.of(inputs, settings)
    encoder: Any = transformer.get_encoder()
    return Source.of(encoder.main_input_name, inputs, settings)


@dataclass(frozen=True)
class Prompt:
    """Prompts `(B, T)` with their mask, padded on the left, and what else the model reads."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    others: Inputs = field(default_factory=dict)

    @classmethod
    def of(cls, inputs: Inputs, settings: Settings) -> Prompt:
        """The prompts, with the mask that `generate` takes or makes."""
        others = dict(inputs)
        tokens = others.pop("input_ids", None)
        if tokens is None or "inputs_embeds" in others:
            raise ValueError("Pass input_ids, as a tokenizer makes them, without inputs_embeds.")
        mask = others.pop("attention_mask", None)
        if mask is None:
            mask = (~settings.is_padding(tokens)).long()
        if tokens.ndim != 2 or mask.shape != tokens.shape or not tokens.numel():
            raise ValueError(
                "Pass whole texts, input_ids and attention_mask of shape (texts, positions), not "
                f"{tuple(tokens.shape)} and {tuple(mask.shape)}."
            )
        at_end = mask[:, -1] == 0
        if at_end.any():
            raise ValueError(
                f"The prompt of row {int(at_end.int().argmax())} ends with padding, after which "
                "nothing can be written: pad prompts on the left."
            )
        prompt = cls(tokens, mask, others)
        several = max(settings.num_beams, settings.num_return_sequences) > 1
        if several and not prompt.can_join:
            raise NotImplementedError(
                f"Which of {', '.join(prompt._features)} belong to which text is known only with "
                "one text a prompt: pass num_beams=1 and num_return_sequences=1, and repeat "
                "prompts where several texts are wanted."
            )
        return prompt

    @property
    def length(self) -> int:
        return self.input_ids.shape[1]

    @property
    def can_join(self) -> bool:
        return not self._features

    def inputs(self) -> dict[str, Any]:
        return {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            **self.others,
        }

    def encoded(self, n_rows: int) -> Inputs:
        return self._features

    def as_text(self) -> Inputs:
        # Repeat the last token: a single one would have nothing to predict.
        tokens = torch.cat([self.input_ids, self.input_ids[:, -1:]], dim=1)
        mask = torch.cat([self.attention_mask, torch.ones_like(self.attention_mask[:, :1])], dim=1)
        labelled = mask.bool()
        labelled[:, :-_LOOKED_AT] = False
        return self._others_of(len(tokens), 1) | _labelled(tokens, mask, labelled)

    def continued(self, sequences: torch.Tensor, settings: Settings) -> Inputs:
        new = settings.written(sequences, self.length)
        mask = _repeated(self.attention_mask, len(sequences))
        generated = torch.cat([torch.zeros_like(mask).bool(), new], dim=1)
        mask = torch.cat([mask, new.to(mask)], dim=1)
        return self._others_of(*new.shape) | _labelled(sequences, mask, generated)

    @property
    def _features(self) -> Inputs:
        """Images and the like of all prompts, which need not lie by row."""
        return {name: of for name, of in self.others.items() if not self._lies_by_token(name, of)}

    def _lies_by_token(self, name: str, of: torch.Tensor) -> bool:
        return name == "position_ids" or of.shape[:2] == self.input_ids.shape

    def _others_of(self, n_rows: int, n_new: int) -> Inputs:
        """Of so many texts with so many new tokens, as `generate` has them."""
        result = self._features
        for name, of in self.others.items():
            if name == "position_ids":  # (B, T), or (3, B, T) beside images
                later = torch.arange(1, n_new + 1, device=of.device)
                rows = of if of.ndim > 2 else _repeated(of, n_rows)
                result[name] = torch.cat([rows, rows[..., -1:] + later], dim=-1)
            elif name not in result:
                last = torch.zeros_like(of[:, -1:]) if name.startswith("mm_") else of[:, -1:]
                whole = torch.cat([of, *[last] * n_new], dim=1)
                result[name] = _repeated(whole, n_rows)
        return result


@dataclass(frozen=True)
class Source:
    """What an encoder-decoder's encoder reads, and what its decoder begins with.

    Attributes
    ----------
    main : str
        name of the texts, sounds or images among the encoder's inputs
    encoder_inputs : dict
        each with a row for each text
    decoder_input_ids : torch.Tensor or None
    """

    main: str
    encoder_inputs: Inputs
    decoder_input_ids: torch.Tensor | None = None

    can_join = True

    @classmethod
    def of(cls, main: str, inputs: Inputs, settings: Settings) -> Source:
        """The sources; of texts with the mask that `generate` takes or makes."""
        inputs = dict(inputs)
        begun = inputs.pop("decoder_input_ids", None)
        of_decoder = [name for name in inputs if name.startswith("decoder_")]
        if of_decoder:
            raise NotImplementedError(f"Begin texts with decoder_input_ids, without {of_decoder}.")
        if main not in inputs:
            raise ValueError(f"Pass {main}, as a tokenizer or processor makes them.")
        if main == "input_ids" and "attention_mask" not in inputs:
            inputs["attention_mask"] = (~settings.is_padding(inputs[main])).long()
        return cls(main, inputs, begun)

    @property
    def length(self) -> int:
        return max(self.encoder_inputs[self.main].shape[1:3])

    def inputs(self) -> dict[str, Any]:
        return self.encoder_inputs | {"decoder_input_ids": self.decoder_input_ids}

    def encoded(self, n_rows: int) -> Inputs:
        n_texts = len(self.encoder_inputs[self.main])
        return {
            name: _repeated(of, n_rows) if len(of) == n_texts else of
            for name, of in self.encoder_inputs.items()
        }

    def as_text(self) -> Inputs:
        """The sources, each with its own first tokens to be written, or any others."""
        source = self.encoder_inputs[self.main]
        labels = torch.arange(1, 1 + _LOOKED_AT, device=source.device).expand(len(source), -1)
        if self.main == "input_ids":
            mask = self.encoder_inputs["attention_mask"]
            labels = torch.where(mask.bool(), source, IGNORED)[:, :_LOOKED_AT]
        return self.encoder_inputs | {"labels": labels}

    def continued(self, sequences: torch.Tensor, settings: Settings) -> Inputs:
        """The sources, with what the decoder read and, as labels, what it wrote."""
        begun = self._n_begun(sequences)
        written = torch.zeros_like(sequences, dtype=torch.bool)
        written[:, begun:] = settings.written(sequences, begun)
        return self.encoded(len(sequences)) | {
            "decoder_input_ids": sequences[:, :-1],
            "labels": torch.where(written, sequences, IGNORED)[:, 1:],
        }

    def _n_begun(self, sequences: torch.Tensor) -> int:
        """How many tokens the decoder began with: transformers may put one before those given."""
        if self.decoder_input_ids is None:
            return 1
        given = _repeated(self.decoder_input_ids, len(sequences))
        return given.shape[1] + (not torch.equal(sequences[:, : given.shape[1]], given))


def _model_inputs(generation_kwargs: Mapping[str, Any], device: torch.device) -> Inputs:
    """Tensors that are no options of `generate`, but what the model reads."""
    mixin: Any = GenerationMixin
    options = vars(GenerationConfig()) | inspect.signature(mixin.generate).parameters
    return {
        name: value.to(device)
        for name, value in generation_kwargs.items()
        if isinstance(value, torch.Tensor) and name not in options
    }


def _repeated(values: torch.Tensor, n_rows: int) -> torch.Tensor:
    """Each row as often as `generate` repeats it, for beams or several texts of a prompt."""
    return values.repeat_interleave(n_rows // len(values), dim=0)


def _labelled(tokens: torch.Tensor, mask: torch.Tensor, labelled: torch.Tensor) -> Inputs:
    labels = torch.where(labelled, tokens, IGNORED)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}

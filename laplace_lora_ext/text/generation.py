"""What `generate` is to continue, one text at a time, and what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from laplace_lora_ext.likelihoods import IGNORED
from laplace_lora_ext.models.default_device import as_tensor
from laplace_lora_ext.text.scores import TextScores

Inputs = dict[str, torch.Tensor]

# What makes several texts of a prompt, or calls the model otherwise than token by token.
_REFUSED = (
    *("num_beams", "num_return_sequences", "guidance_scale"),
    *("past_key_values", "cache", "assistant_model"),
)


@dataclass(frozen=True)
class GeneratedText:
    """What `generate` wrote.

    Attributes
    ----------
    sequences : torch.Tensor
        `(B, T)` tokens, the prompts first, padded on the right; what an encoder-decoder's decoder
        reads and writes
    scores : TextScores
        of the generated tokens, under the same draws; an encoder-decoder's have no place for the
        first token of `sequences`, which nothing predicts
    outputs : list
        what transformers' `generate` returned for each text
    """

    sequences: torch.Tensor
    scores: TextScores
    outputs: list[Any]


@dataclass(frozen=True)
class Prompts:
    """What a model is to continue.

    Attributes
    ----------
    inputs : dict
        tensors with a row for each text
    main : str
        the name of those that are read: tokens, or what else an encoder reads
    is_encoder_decoder : bool
    padding : int
        the token that fills up shorter texts
    """

    inputs: Inputs
    main: str
    is_encoder_decoder: bool
    padding: int

    @classmethod
    def of(
        cls,
        transformer: PreTrainedModel,
        generation_kwargs: Mapping[str, Any],
        device: torch.device,
    ) -> Prompts:
        """The prompts, or sources of an encoder-decoder, among `generate`'s arguments.

        Raises
        ------
        ValueError
            If they are missing, padded on the wrong side, or not one row a text.
        NotImplementedError
            For several texts a prompt, and for what draws can't follow.
        """
        setting = partial(_setting, transformer, generation_kwargs)
        _check_options(transformer, setting)
        mixin: Any = GenerationMixin
        options = vars(GenerationConfig()) | inspect.signature(mixin.generate).parameters
        inputs = {
            name: value.to(device)
            for name, value in generation_kwargs.items()
            if isinstance(value, torch.Tensor) and name not in options
        }
        encoder: Any = transformer.get_encoder() if transformer.config.is_encoder_decoder else None
        main = "input_ids" if encoder is None else encoder.main_input_name
        if main not in inputs:
            raise ValueError(f"Pass {main}, as a tokenizer or processor makes them.")
        end = setting("eos_token_id")
        endings = [] if end is None else as_tensor(end).flatten().tolist()
        padding = setting("pad_token_id")
        if main == "input_ids" and "attention_mask" not in inputs:  # as `generate` has it
            known = padding is not None and padding not in endings
            inputs["attention_mask"] = (inputs[main] != (padding if known else -1)).long()
        _check_inputs(inputs, main, encoder is not None)
        fill = next((token for token in (padding, *endings) if token is not None), 0)
        return cls(inputs, main, encoder is not None, int(fill))

    def each(self) -> list[Inputs]:
        """The inputs of each text, as a batch of one."""
        n_texts = len(self.inputs[self.main])
        return [
            {name: of[row : row + 1] for name, of in self.inputs.items()} for row in range(n_texts)
        ]

    def continued(self, texts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Inputs]:
        """All texts `(B, T)`, and a batch with labels on what was written."""
        sequences = pad_sequence(list(texts), batch_first=True, padding_value=self.padding)
        places = torch.arange(sequences.shape[1], device=sequences.device)
        begun = torch.tensor([self._begun(text, row) for row, text in enumerate(texts)])
        ends = torch.tensor([len(text) for text in texts])
        begun, ends = (numbers.to(places)[:, None] for numbers in (begun, ends))
        labels = torch.where((places >= begun) & (places < ends), sequences, IGNORED)
        if self.is_encoder_decoder:
            decoded = {"decoder_input_ids": sequences[:, :-1], "labels": labels[:, 1:]}
            return sequences, self.inputs | decoded
        mask = (labels != IGNORED).to(self.inputs["attention_mask"])
        mask[:, : self.inputs[self.main].shape[1]] = self.inputs["attention_mask"]
        return sequences, {"input_ids": sequences, "attention_mask": mask, "labels": labels}

    def _begun(self, text: torch.Tensor, row: int) -> int:
        """How many tokens of a text were there before the first that was written."""
        given = self.inputs.get("decoder_input_ids" if self.is_encoder_decoder else "input_ids")
        if given is None:
            return 1
        # An encoder-decoder's `generate` may put a token before those given.
        return len(given[row]) + (not torch.equal(text[: len(given[row])], given[row]))


def _setting(transformer: PreTrainedModel, generation_kwargs: Mapping[str, Any], name: str) -> Any:
    """An option of `generate`, wherever it is set."""
    given = generation_kwargs.get("generation_config")
    configs = given, getattr(transformer, "generation_config", None), transformer.config
    found = generation_kwargs.get(name), *(getattr(config, name, None) for config in configs)
    return next((value for value in found if value is not None), None)


def _check_options(transformer: PreTrainedModel, setting: Callable[[str], Any]) -> None:
    kind: Any = type(transformer)
    if kind.generate.__module__.startswith("transformers.models."):
        raise NotImplementedError(
            f"{kind.__name__} has a generate of its own, whose texts the posterior "
            "can't follow: let the model write, and score what it wrote with la.score(batch)."
        )
    refused = [name for name in _REFUSED if setting(name) not in (None, 1)]
    if refused:
        raise NotImplementedError(
            "generate writes one text a prompt, token by token from the first one on: leave out "
            f"{', '.join(refused)}, or pass 1 where the model's own default is another number."
        )


def _check_inputs(inputs: Inputs, main: str, encodes: bool) -> None:
    shapes = {name: tuple(of.shape) for name, of in inputs.items()}
    n_texts = len(inputs[main])
    if not inputs[main].numel() or any(shape[:1] != (n_texts,) for shape in shapes.values()):
        raise ValueError(f"Pass tensors with a row for each text, not of shapes {shapes}.")
    if encodes:
        others = [name for name in inputs if name.startswith("decoder_")]
        others = [name for name in others if name != "decoder_input_ids"]
    else:
        others = [name for name in inputs if name not in (main, "attention_mask")]
    if others:
        raise NotImplementedError(
            f"generate continues texts, and does not know how {', '.join(others)} go on: leave "
            "them out, or let the model write, and score what it wrote with la.score(batch)."
        )
    if encodes:
        return
    mask = inputs["attention_mask"]
    if inputs[main].ndim != 2 or mask.shape != inputs[main].shape:
        raise ValueError(
            "Pass whole texts, input_ids and attention_mask of shape (texts, positions), not "
            f"{shapes}."
        )
    at_end = mask[:, -1] == 0
    if at_end.any():
        raise ValueError(
            f"The prompt of row {int(at_end.int().argmax())} ends with padding, after which "
            "nothing can be written: pad prompts on the left."
        )

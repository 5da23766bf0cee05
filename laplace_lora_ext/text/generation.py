"""What `generate` continues, and the posterior predictive of each next token."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from laplace_lora_ext.likelihoods import IGNORED
from laplace_lora_ext.models.adapters import only_active
from laplace_lora_ext.models.locks import as_tensor, exclusive
from laplace_lora_ext.models.weights import Values, called_with
from laplace_lora_ext.text.scores import TextScores, draws_of, scores_under

Inputs = dict[str, torch.Tensor]

Draw = tuple[Any, Values]
"""A posterior, and LoRA weights in place of its own."""

# What makes several texts of a prompt, or calls the model otherwise than token by token.
_REFUSED = (
    *("num_beams", "num_return_sequences", "guidance_scale"),
    *("past_key_values", "cache", "assistant_model"),
)

_CACHES = ("cache", "past_key_values", "cache_params")  # what transformers' versions call theirs
_STATES = ("state", "mems", "past_buckets_states")  # other things that models keep


class GeneratedText(NamedTuple):
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


@exclusive
@torch.inference_mode(False)
@torch.no_grad()
def generate_texts(
    la: Any,
    *,
    n_samples: int = 10,
    generator: torch.Generator | None = None,
    **generation_kwargs: Any,
) -> GeneratedText:
    """Write texts, choosing each next token by the posterior predictive.

    This runs transformers' own `generate`, greedy or sampling, with its stopping, its logits
    processors and its caches, for one text after the other. A whole text keeps the same draws, so
    each draw is one model reading that text. Without draws the texts equal those of the model's own
    `generate`, and of a mixture those of the mixture of its trained models.

    Parameters
    ----------
    n_samples, generator
        as for `score`; each token takes `1 + S` forward passes
    **generation_kwargs
        for `generate`: `input_ids` and `attention_mask` as a tokenizer makes them, padded on the
        left unless an encoder reads them, `max_new_tokens` and so on

    Returns
    -------
    GeneratedText

    Raises
    ------
    NotImplementedError
        For beams, several texts a prompt, `past_key_values`, images beside text, and models with a
        `generate` of their own; without `use_cache=False` also for models that keep no cache.
    ValueError
        If there are no prompts, or if they are padded on the wrong side.
    """
    members, model = getattr(la, "members", [la]), la.model
    transformer = model.transformer
    if any(member.model.transformer is not transformer for member in members):
        raise ValueError("Members that write together must be adapters of one model.")
    used = draws = list(draws_of(la, n_samples, generator))
    if not draws and len(members) > 1:
        used = [(member, [b.weight.detach() for b in member.blocks]) for member in members]
    with model.prepared():
        sequences, batch, outputs = _written(transformer, used, model.device, generation_kwargs)
    return GeneratedText(sequences, scores_under(la, batch, draws), outputs)


def _written(
    transformer: PreTrainedModel,
    draws: Sequence[Draw],
    device: torch.device,
    generation_kwargs: dict[str, Any],
) -> tuple[torch.Tensor, Inputs, list[Any]]:
    """Texts `(B, T)`, a batch of them with labels on what was written, and `generate`'s outputs."""
    config, passed = transformer.config, generation_kwargs.get("generation_config")
    configs = [passed, getattr(transformer, "generation_config", None), config]

    def option(name: str) -> Any:
        found = [generation_kwargs.get(name), *(getattr(each, name, None) for each in configs)]
        return next((value for value in found if value is not None), None)

    generate = _checked_generate(transformer, option)
    end, padding = option("eos_token_id"), option("pad_token_id")
    endings = [] if end is None else as_tensor(end).flatten().tolist()
    inputs = _inputs(transformer, generation_kwargs, device)
    if "input_ids" in inputs and "attention_mask" not in inputs:  # as `generate` makes it
        no_token = padding is None or padding in endings
        inputs["attention_mask"] = (inputs["input_ids"] != (-1 if no_token else padding)).long()
    if not config.is_encoder_decoder and not inputs["attention_mask"][:, -1].all():
        raise ValueError(
            "A prompt ends with padding, after which nothing can be written: pad on the left."
        )
    texts, outputs = [], []
    for row in range(len(next(iter(inputs.values())))):
        text = {name: values[row : row + 1] for name, values in inputs.items()}
        with _predictive(transformer, draws, text):
            outputs.append(generate(**(generation_kwargs | text)))
        texts.append(getattr(outputs[-1], "sequences", outputs[-1])[0])
    fill = next((token for token in (padding, *endings) if token is not None), 0)
    sequences = pad_sequence(texts, batch_first=True, padding_value=fill)
    labels = pad_sequence(texts, batch_first=True, padding_value=IGNORED)
    if config.is_encoder_decoder:
        decoded = {"decoder_input_ids": sequences[:, :-1], "labels": labels[:, 1:]}
        return sequences, inputs | decoded, outputs
    mask, n_read = inputs["attention_mask"], inputs["input_ids"].shape[1]
    labels[:, :n_read] = IGNORED
    mask = torch.cat([mask, (labels[:, n_read:] != IGNORED).to(mask)], dim=1)
    return sequences, {"input_ids": sequences, "attention_mask": mask, "labels": labels}, outputs


def _checked_generate(transformer: Any, option: Callable[[str], Any]) -> Callable[..., Any]:
    if transformer.generate.__module__.startswith("transformers.models."):
        raise NotImplementedError(
            f"{type(transformer).__name__} has a generate of its own, whose texts the posterior "
            "can't follow: let the model write, and score what it wrote with la.score(batch)."
        )
    refused = [name for name in _REFUSED if option(name) not in (None, 1)]
    if refused:
        raise NotImplementedError(
            "generate writes one text a prompt, token by token from the first one on: leave out "
            f"{', '.join(refused)}, or pass 1 where the model's own default is another number."
        )
    return transformer.generate


def _inputs(
    transformer: PreTrainedModel, generation_kwargs: dict[str, Any], device: torch.device
) -> Inputs:
    """What the model is to continue: the tensors that are no options of `generate`."""
    mixin: Any = GenerationMixin
    options = vars(GenerationConfig()) | inspect.signature(mixin.generate).parameters
    inputs = {
        name: value.to(device)
        for name, value in generation_kwargs.items()
        if isinstance(value, torch.Tensor) and name not in options
    }
    encoder: Any = transformer.get_encoder() if transformer.config.is_encoder_decoder else None
    main = "input_ids" if encoder is None else encoder.main_input_name
    if main not in inputs or inputs[main].ndim < 2:
        raise ValueError(f"Pass {main}, a row for each text, as a tokenizer or processor makes it.")
    others = sorted(inputs.keys() - {main, "attention_mask"})
    if others:
        raise NotImplementedError(
            f"generate continues plain texts, without {', '.join(others)}: leave these out, or let "
            "the model write, and score what it wrote with la.score(batch)."
        )
    return inputs


@contextmanager
def _predictive(
    transformer: PreTrainedModel, draws: Sequence[Draw], text: Inputs
) -> Iterator[None]:
    """Replace the model's logits by log-probabilities of the mixture over draws, for one text.

    Everything in `generate` that acts on logits then sees these. A `LogitsProcessor` would come
    after transformers' own ones, and allow again what they forbid. Each draw has a cache of its own
    and, of an encoder-decoder, its own encoding of the source.
    """
    if not draws:
        yield
        return
    kept: list[dict[str, Any]] = [{} for _ in draws]
    repeating, log_p = False, torch.zeros(())

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the draws before the model itself, while its cache still is what they know."""
        nonlocal repeating, log_p
        if repeating:
            return
        repeating, log_p = True, torch.tensor(-math.inf)
        try:
            for draw, of_draw in zip(draws, kept, strict=True):
                logits = _logits(transformer, draw, of_draw, text, args, kwargs)
                log_p = torch.logaddexp(log_p.to(logits), logits.log_softmax(-1))
            log_p = log_p - math.log(len(draws))
        finally:
            repeating = False

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not repeating:
            output.logits = log_p

    first = transformer.register_forward_pre_hook(before, with_kwargs=True)
    with first, transformer.register_forward_hook(after):
        yield


def _logits(
    transformer: PreTrainedModel,
    draw: Draw,
    kept: dict[str, Any],
    text: Inputs,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """A draw's logits; what it keeps for the next call is changed in place."""
    name = next((name for name in _CACHES if name in kwargs), "cache")
    cache = kwargs.get(name)
    if not kept:  # an empty one: a text begins
        kept["cache"] = copy.deepcopy(cache)
    if _size(cache) != _size(kept["cache"]):
        raise NotImplementedError(
            "An option of generate reads other texts in turn or changes the cache, which draws "
            "can't follow: leave that option out, or pass use_cache=False."
        )
    own: dict[str, Any] = {name: kept["cache"]} if name in kwargs else {}
    if kwargs.get("encoder_outputs") is not None:
        # Those of the trained weights: with others, encoders read the source anew.
        own["encoder_outputs"] = kept.get("encoded")
        own |= {} if "encoded" in kept else text
    member, values = draw
    with only_active(transformer, member.blocks[0].adapter):
        output = called_with(transformer, member.blocks, values, *args, **kwargs | own)
    kept["cache"] = getattr(output, name, None) if name in kwargs else None
    keeps = kwargs.get("use_cache") and kept["cache"] is None
    if keeps or any(kwargs.get(state) is not None for state in _STATES):
        raise NotImplementedError(
            "The model returns no cache, and each draw needs one of its own: pass use_cache=False."
        )
    if "encoder_outputs" in own:
        kept["encoded"] = BaseModelOutput(output.encoder_last_hidden_state)
    return output.logits.to(torch.promote_types(output.logits.dtype, torch.float32))


def _size(cache: Any) -> Any:
    """How much a cache holds, to compare with another of its kind."""
    if isinstance(cache, tuple):
        return cache[0][0].shape
    try:
        return int(cache.get_seq_length())
    except (AttributeError, ValueError):  # None, or what counts no positions
        return None

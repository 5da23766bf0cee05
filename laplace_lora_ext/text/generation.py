"""Write texts with transformers' `generate`, by a predictive of each token."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from laplace_lora_ext.likelihoods import IGNORED
from laplace_lora_ext.models.lora_layers import only_active
from laplace_lora_ext.models.running import as_tensor, exclusive
from laplace_lora_ext.models.weights import called_with
from laplace_lora_ext.predictive.distributions import Drawable
from laplace_lora_ext.text.scores import (
    Draw,
    TextScores,
    draws_of,
    scores_under,
    trained,
    writers_of,
)

Inputs = dict[str, Tensor]

# What makes several texts of a prompt, or calls the model otherwise than token by
# token.
_REFUSED = (
    "num_beams",
    "num_return_sequences",
    "guidance_scale",
    "past_key_values",
    "cache",
    "assistant_model",
)

# What transformers' versions call theirs.
_CACHES = ("cache", "past_key_values", "cache_params")
_STATES = ("state", "mems", "past_buckets_states")  # other things that models keep


class GeneratedText(NamedTuple):
    """Holds what `generate` wrote.

    Attributes
    ----------
    sequences : torch.Tensor
        `(B, T)` tokens, the prompts first, padded on the right; what an
        encoder-decoder's decoder reads and writes
    scores : TextScores
        of the generated tokens, under the same draws; an encoder-decoder's have no
        place for the first token of `sequences`, which nothing predicts
    outputs : list
        what transformers' `generate` returned for each text
    """

    sequences: Tensor
    scores: TextScores
    outputs: list[Any]


@exclusive
@torch.inference_mode(False)
@torch.no_grad()
def generate_texts(
    members: Sequence[Drawable],
    *,
    n_samples: int = 10,
    generator: torch.Generator | None = None,
    **generation_kwargs: Any,
) -> GeneratedText:
    """Write texts, choosing each next token by the posterior predictive.

    Members share the draws, and without any the mixture of their trained models writes.
    Other parameters, result and errors are those of `LowRankKronLoRALaplace.generate`.
    """
    posteriors = writers_of(members)
    model = posteriors[0].model
    transformer = model.transformer
    if any(posterior.model.transformer is not transformer for posterior in posteriors):
        raise ValueError("Members that write together must be adapters of one model.")
    draws = list(draws_of(posteriors, n_samples, generator))
    writing = draws
    if not draws and len(posteriors) > 1:
        # Without draws a mixture writes by its trained models.
        writing = [trained(posterior) for posterior in posteriors]
    with model.prepared():
        written = _written(transformer, writing, model.device, generation_kwargs)
    scores = scores_under(posteriors, written.batch, draws)
    return GeneratedText(written.sequences, scores, written.outputs)


@dataclass(frozen=True)
class _Written:
    """Texts `(B, T)` that were written, a batch to score them, and the output."""

    sequences: Tensor
    batch: Inputs  # with labels on what was written
    outputs: list[Any]


def _written(
    transformer: PreTrainedModel,
    writers: Sequence[Draw],
    device: torch.device,
    generation_kwargs: dict[str, Any],
) -> _Written:
    """Continue each prompt by a mixture of writers, or by the model alone."""
    options = _Options(transformer, generation_kwargs)
    generate = _checked_generate(transformer, options)
    prompts = _prompts(transformer, options, device)
    texts: list[Tensor] = []
    outputs = []
    for row in range(len(next(iter(prompts.values())))):
        place = slice(row, row + 1)
        prompt = {name: values[place] for name, values in prompts.items()}
        with _predictive(transformer, writers, prompt):
            output = generate(**(generation_kwargs | prompt))
        # With `return_dict_in_generate`, the tokens are one of its fields.
        (text,) = getattr(output, "sequences", output)
        texts.append(text)
        outputs.append(output)
    sequences = pad_sequence(texts, batch_first=True, padding_value=options.fill)
    labels = pad_sequence(texts, batch_first=True, padding_value=IGNORED)
    if transformer.config.is_encoder_decoder:
        batch = _batch_of_decoder(prompts, sequences, labels)
    else:
        batch = _batch_of_continued(prompts, sequences, labels)
    return _Written(sequences, batch, outputs)


def _batch_of_decoder(
    prompts: Inputs,
    sequences: Tensor,
    labels: Tensor,
) -> Inputs:
    """Make a batch for a decoder: its inputs, and labels one token ahead."""
    return {
        **prompts,
        "decoder_input_ids": sequences[:, :-1],
        "labels": labels[:, 1:],
    }


def _batch_of_continued(
    prompts: Inputs,
    sequences: Tensor,
    labels: Tensor,
) -> Inputs:
    """Make a batch of prompts and what follows them, with labels on the latter."""
    mask = prompts["attention_mask"]
    n_read = prompts["input_ids"].shape[1]
    labels[:, :n_read] = IGNORED
    # Shorter texts are padded behind their end.
    is_written = (labels[:, n_read:] != IGNORED).to(mask)
    return {
        "input_ids": sequences,
        "attention_mask": torch.cat([mask, is_written], dim=1),
        "labels": labels,
    }


class _Options:
    """Looks up options as `generate` does: arguments, then configurations."""

    def __init__(
        self,
        transformer: PreTrainedModel,
        generation_kwargs: dict[str, Any],
    ) -> None:
        self.given = generation_kwargs
        self._configurations = [
            generation_kwargs.get("generation_config"),
            getattr(transformer, "generation_config", None),
            transformer.config,
        ]

    def find(self, name: str) -> Any:
        """Return an option's first value that is set; None if there is none."""
        values = [self.given.get(name)]
        values += [getattr(each, name, None) for each in self._configurations]
        return next((value for value in values if value is not None), None)

    @property
    def padding(self) -> int | None:
        """Find the token of padding."""
        return self.find("pad_token_id")

    @property
    def endings(self) -> list[int]:
        """List the tokens that end a text."""
        end = self.find("eos_token_id")
        return [] if end is None else as_tensor(end).flatten().tolist()

    @property
    def fill(self) -> int:
        """Choose a token to pad what was written with."""
        if self.padding is not None:
            return self.padding
        return self.endings[0] if self.endings else 0


def _checked_generate(
    transformer: Any,
    options: _Options,
) -> Callable[..., Any]:
    """Return a model's `generate`; refuse options that don't go token by token."""
    if transformer.generate.__module__.startswith("transformers.models."):
        raise NotImplementedError(
            f"{type(transformer).__name__} has a generate of its own, whose texts the "
            "posterior can't follow: let the model write, and score what it wrote with "
            "la.score(batch)."
        )
    refused = [name for name in _REFUSED if options.find(name) not in (None, 1)]
    if refused:
        raise NotImplementedError(
            "generate writes one text a prompt, token by token from the first one on: "
            f"leave out {', '.join(refused)}, or pass 1 where the model's own default "
            "is another number."
        )
    return transformer.generate


def _prompts(
    transformer: PreTrainedModel,
    options: _Options,
    device: torch.device,
) -> Inputs:
    """Select what the model continues: tensors that are no options."""
    arguments = inspect.signature(vars(GenerationMixin)["generate"]).parameters
    known = vars(GenerationConfig()).keys() | arguments.keys()
    prompts = {
        name: value.to(device)
        for name, value in options.given.items()
        if isinstance(value, Tensor) and name not in known
    }
    main = _main_input(transformer)
    if main not in prompts or prompts[main].ndim < 2:
        raise ValueError(
            f"Pass {main}, a row for each text, as a tokenizer or processor makes it."
        )
    others = sorted(prompts.keys() - {main, "attention_mask"})
    if others:
        raise NotImplementedError(
            f"generate continues plain texts, without {', '.join(others)}: leave these "
            "out, or let the model write, and score what it wrote with la.score(batch)."
        )
    if main == "input_ids" and "attention_mask" not in prompts:
        prompts["attention_mask"] = _mask_of(prompts["input_ids"], options)
    if (
        not transformer.config.is_encoder_decoder
        and not prompts["attention_mask"][:, -1].all()
    ):
        raise ValueError(
            "A prompt ends with padding, after which nothing can be written: pad on "
            "the left."
        )
    return prompts


def _main_input(transformer: PreTrainedModel) -> str:
    """Name what a model reads: tokens, or of an encoder what it hears or sees."""
    if not transformer.config.is_encoder_decoder:
        return "input_ids"
    return transformer.get_encoder().main_input_name


def _mask_of(
    tokens: Tensor,
    options: _Options,
) -> Tensor:
    """Make the mask that `generate` makes where there is none."""
    # A token that also ends texts may be one of the prompt's own.
    if options.padding is None or options.padding in options.endings:
        return torch.ones_like(tokens, dtype=torch.long)
    return (tokens != options.padding).long()


@contextmanager
def _predictive(
    transformer: PreTrainedModel, writers: Sequence[Draw], prompt: Inputs
) -> Iterator[None]:
    """Replace logits by log-probabilities of a mixture of writers within.

    Everything in `generate` that acts on logits then sees these. A `LogitsProcessor`
    would come after transformers' own ones, and allow again what they forbid.
    """
    if not writers:
        yield
        return
    mixture = _Mixture([_Writer(transformer, draw, prompt) for draw in writers])
    before = transformer.register_forward_pre_hook(mixture.read, with_kwargs=True)
    after = transformer.register_forward_hook(mixture.replace_logits)
    with before, after:
        yield


class _Mixture:
    """Lets writers read what the model reads, and answers in its place."""

    def __init__(self, writers: Sequence[_Writer]) -> None:
        self._writers = writers
        self._is_reading = False
        self._log_p = torch.zeros(())

    def read(
        self,
        _: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Run the writers before the model, whose cache they share until then."""
        # The writers' own passes are through the same model.
        if self._is_reading:
            return
        self._is_reading = True
        try:
            log_p = torch.tensor(-math.inf)
            for writer in self._writers:
                logits = writer.logits(args, kwargs)
                # One after the other: logits of a vocabulary are large, and of draws
                # many.
                log_p = torch.logaddexp(log_p.to(logits), logits.log_softmax(-1))
            self._log_p = log_p - math.log(len(self._writers))
        finally:
            self._is_reading = False

    def replace_logits(
        self,
        _: nn.Module,
        args: tuple[Any, ...],
        output: Any,
    ) -> None:
        if not self._is_reading:
            output.logits = self._log_p


class _Writer:
    """Reads one text with the weights of a draw, and with a cache of its own.

    Of an encoder-decoder it also has its own encoding of the source.
    """

    def __init__(
        self,
        transformer: PreTrainedModel,
        draw: Draw,
        prompt: Inputs,
    ) -> None:
        self._transformer = transformer
        self._draw = draw
        self._prompt = prompt
        self._has_begun = False
        self._cache: object | None = None  # each model's own kind
        self._encoded: BaseModelOutput | None = None

    def logits(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Compute logits where the model is called with these arguments."""
        name = next((name for name in _CACHES if name in kwargs), None)
        cache = None if name is None else kwargs[name]
        if not self._has_begun:
            # An empty one, of the kind that the model wants.
            self._cache = copy.deepcopy(cache)
            self._has_begun = True
        if _size(cache) != _size(self._cache):
            raise NotImplementedError(
                "An option of generate reads other texts in turn or changes the cache, "
                "which draws can't follow: leave that option out, or pass "
                "use_cache=False."
            )
        own: dict[str, Any] = {}
        if name is not None:
            own[name] = self._cache
        has_encoded = kwargs.get("encoder_outputs") is not None
        if has_encoded:
            # Those of the trained weights: with others, encoders read the source anew.
            own["encoder_outputs"] = self._encoded
            if self._encoded is None:
                own.update(self._prompt)
        posterior, weights = self._draw
        with only_active(self._transformer, posterior.blocks[0].adapter):
            output = called_with(
                self._transformer, posterior.blocks, weights, *args, **(kwargs | own)
            )
        self._cache = None if name is None else getattr(output, name, None)
        keeps_nothing = kwargs.get("use_cache") and self._cache is None
        keeps_other_states = any(kwargs.get(state) is not None for state in _STATES)
        if keeps_nothing or keeps_other_states:
            raise NotImplementedError(
                "The model returns no cache, and each draw needs one of its own: pass "
                "use_cache=False."
            )
        if has_encoded:
            self._encoded = BaseModelOutput(output.encoder_last_hidden_state)
        return output.logits.to(torch.promote_types(output.logits.dtype, torch.float32))


def _size(cache: Any) -> Any:
    """Measure how much a cache holds, to compare it with another of its kind."""
    if isinstance(cache, tuple):
        return cache[0][0].shape
    try:
        return int(cache.get_seq_length())
    except (AttributeError, ValueError):  # None, or what counts no positions
        return None

"""Language models on texts: logits of the vocabulary at every labelled token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformers import PreTrainedModel
from transformers.models.bart.modeling_bart import shift_tokens_right

from laplace_lora_ext.likelihoods import IGNORED, LabelsOfTokens
from laplace_lora_ext.models.answers import (
    DECODER_INPUTS,
    first_places,
    reading_at,
    start_token,
    without_cache,
)
from laplace_lora_ext.models.batches import (
    Positions,
    number_of_rows,
    part_of,
    text_first,
)
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.running import forwards_replaced, is_shared

MOST_ROWS = 1024
"""Most rows of a vocabulary's logits that a part of a batch has."""


@dataclass(frozen=True)
class Part:
    """Some of each text's labelled tokens, counted from its first one."""

    first: int
    size: int

    def of(self, labelled: torch.Tensor) -> torch.Tensor:
        """Mark which of the labelled ones among places `(B, T)` are of this part."""
        number = labelled.cumsum(1) - 1
        return labelled & (number >= self.first) & (number < self.first + self.size)


class TokensModel(LogitsModel):
    """A language model that maps texts to logits `(N, V)` of labelled tokens.

    Batches are those of supervised fine-tuning: mappings with `input_ids`,
    `attention_mask` and `labels`, -100 where there is none. The logits that predict a
    label are those one token before it, or in an encoder-decoder those at its place.
    The output layer runs for these alone.

    Parameters are those of `LogitsModel`, without `class_token_ids` and
    `mask_token_id`. A model that does not generate text is refused.
    """

    @property
    def transformer(self) -> PreTrainedModel:
        """The transformers model within, which there always is."""
        transformer = super().transformer
        assert transformer is not None
        return transformer

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model reads one text, and writes another."""
        return bool(self.transformer.config.is_encoder_decoder)

    def _logits(
        self,
        batch: Any,
        part: Part | None = None,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        """Compute logits `(N, V)` of labelled tokens, or of a part of them.

        They come one text after the other.

        They are in float32 or better.
        """
        if isinstance(batch, Mapping) and not self.is_encoder_decoder:
            batch = text_first(batch)  # labels too
        labelled = self.targets(batch, part) != IGNORED
        logits = self._at(labelled, self._inputs(batch), **model_kwargs)
        self.output_size = logits.shape[-1]
        return logits.to(self.device, torch.promote_types(logits.dtype, torch.float32))

    def log_probs_of(self, batch: Any, labels: LabelsOfTokens) -> torch.Tensor:
        """Compute log-probabilities `(N, 1 + S)` of labels of the labelled tokens.

        Of more than `MOST_ROWS` tokens the logits are computed in parts, and none are
        kept: a backward pass computes those of one part after the other anew.
        """
        parts = self.parts(batch)
        if len(parts) == 1:
            return _read(partial(self, batch), labels)()
        labelled = self.targets(batch) != IGNORED
        remembered = Remembered(self.transformer)

        def logits(part: Part) -> torch.Tensor:
            with remembered.running():
                return self(batch, part=part)

        # The layers before the output layer run here, and never again.
        logits(Part(first=0, size=1))
        rows: list[torch.Tensor] = []
        log_probs: list[torch.Tensor] = []
        for part in parts:
            is_of_part = part.of(labelled)[labelled]
            read = _read(partial(logits, part), labels.of(is_of_part))
            # A model's hooks are to see whole passes.
            with set_checkpoint_early_stop(False):
                log_probs.append(checkpoint(read, use_reentrant=False))
            rows.append(is_of_part.nonzero()[:, 0])
        in_order = torch.cat(rows).argsort()
        return torch.cat(log_probs)[in_order.to(self.device)]

    def summary(self, batch: Any) -> torch.Tensor:
        """Compute log-probabilities `(N, 1)` of the labels, in parts."""
        own = self.targets(batch)
        own = own[own != IGNORED]
        none_drawn = torch.empty((0, len(own)), device=own.device)
        return self.log_probs_of(batch, LabelsOfTokens(own, none_drawn))

    def split(self, batch: Any) -> tuple[Any, torch.Tensor]:
        """Return the batch, and the tokens `(B, T)` that its logits predict."""
        return batch, self.targets(batch)

    def by_texts(self, batch: Any) -> list[Any]:
        """Divide a batch by texts, into parts of at most `MOST_ROWS` labels each.

        A text with more labels is a part of its own.

        Only a text by itself may have more, see `parts`.
        """
        labelled = self.targets(batch) != IGNORED
        n_texts = len(labelled)
        if number_of_rows(batch) != n_texts or is_shared(self):
            return [batch]
        starts = [0]
        n_tokens = 0  # from the last start on
        for text, n_more in enumerate(labelled.sum(1).tolist()):
            # Texts without any label are no batch by themselves.
            if n_tokens > 0 and n_more > 0 and n_tokens + n_more > MOST_ROWS:
                starts.append(text)
                n_tokens = 0
            n_tokens += n_more
        return [
            part_of(batch, slice(start, stop), n_texts)
            for start, stop in pairwise([*starts, n_texts])
        ]

    def parts(self, batch: Any) -> list[Part]:
        """Divide a batch's labelled tokens into parts of `MOST_ROWS` at most.

        Of more texts than that, a part has a token of each. Models that several ranks
        share are read at once, since ranks must make the same passes.
        """
        labelled = self.targets(batch) != IGNORED
        most = int(labelled.sum(1).max())
        if is_shared(self):
            return [Part(first=0, size=most)]
        size = max(1, MOST_ROWS // len(labelled))
        return [Part(first, size) for first in range(0, most, size)]

    def targets(self, batch: Any, part: Part | None = None) -> torch.Tensor:
        """Return the tokens `(B, T)` that logits at each place predict, or -100.

        Of a part, the tokens of others are -100 too.

        A `ValueError` if labels are missing, of another shape or type, at padding, or
        all -100.
        """
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"A batch of texts must be a mapping, not {type(batch).__name__}."
            )
        _, labels = super().split(batch)
        if labels.ndim != 2 or labels.is_floating_point():
            raise ValueError(
                "labels must be tokens of shape (texts, positions), not "
                f"{tuple(labels.shape)} of {labels.dtype}"
            )
        if not self.is_encoder_decoder:
            has_begun = _has_begun(labels, super()._inputs(batch))
            # Logits predict the token after their place.
            labels = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
            # Padding before a text predicts nothing.
            labels = labels.masked_fill(~has_begun, IGNORED)
        if not (labels != IGNORED).any():
            raise ValueError(
                f"no token is labelled: every label is {IGNORED}, or on a text's first "
                "token, which nothing predicts. Leave such batches out"
            )
        if part is None:
            return labels
        return labels.where(part.of(labels != IGNORED), IGNORED)

    def labelled(self, batch: Any, part: Part | None = None) -> torch.Tensor:
        """Mark the labels that some logits predict, or those of a part, `(B, T)`."""
        predicting = self.targets(batch, part) != IGNORED
        return predicting if self.is_encoder_decoder else predicting.roll(1, dims=1)

    def positions(self, batch: Any, n_examples: int) -> Positions:
        """Describe the rows of texts, each of which has logits for each label."""
        targets = self.targets(batch)
        owners = (targets != IGNORED).nonzero()[:, 0]
        # `n_examples` are the rows of logits.
        of_texts = super().positions(batch, len(targets))
        return of_texts._replace(owners_of_logits=owners)

    def _inputs(self, batch: Any) -> Any:
        inputs = super()._inputs(batch)
        if self.is_encoder_decoder and all(
            inputs.get(key) is None for key in DECODER_INPUTS
        ):
            labels = batch[self.dict_key_y].to(self.device)
            inputs["decoder_input_ids"] = _decoder_input_ids(self.transformer, labels)
        return text_first(inputs)

    def _at(
        self,
        places: torch.Tensor,
        inputs: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute logits `(N, V)` at the true ones of `(B, T)` places."""
        index, is_true = first_places(places)
        model_kwargs = without_cache(self.transformer, inputs) | kwargs
        with reading_at(self.transformer, index, places.shape[1]) as read_off:
            logits = read_off(self._call(inputs, **model_kwargs))
        if is_true.all():
            return logits.flatten(0, 1)  # without a copy
        return logits[is_true.to(logits.device)]

    def _find_answers(
        self,
        class_token_ids: Sequence[Any] | None,
        mask_token_id: int | None,
        normalised: bool,
    ) -> None:
        transformer = super().transformer
        if class_token_ids is not None or mask_token_id is not None or normalised:
            raise ValueError(
                'The likelihood "language_modeling" predicts the whole vocabulary: '
                "leave out class_token_ids, class_texts, mask_token_id and normalised."
            )
        if transformer is None or not transformer.can_generate():
            raise ValueError(
                'The likelihood "language_modeling" needs a transformers model that '
                "generates text, such as one of AutoModelForCausalLM."
            )


class Remembered:
    """What modules before the output layer returned, so that it alone runs again.

    It is of one batch and one set of weights. What a model does behind the layer, such
    as capping its logits, it does again too.
    """

    def __init__(self, transformer: PreTrainedModel) -> None:
        self._layer = transformer.get_output_embeddings()
        self._others: list[nn.Module] = []
        if isinstance(self._layer, nn.Module):
            self._others = _modules_beside(self._layer, transformer)
        self._outputs: list[_Output] = []  # of all calls of the others in a pass
        self._is_known = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Note what modules return in the first pass, and return it in later ones."""
        calls = iter(self._outputs)
        is_behind = False

        def remembered(
            _: nn.Module,
            forward: Callable[..., Any],
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if is_behind:
                return forward(*args, **kwargs)
            if self._is_known:
                return next(calls).unchanged()
            output = forward(*args, **kwargs)
            self._outputs.append(_Output(output, _versions(output)))
            return output

        def note(*_: Any) -> None:
            nonlocal is_behind
            is_behind = True

        with ExitStack() as hooks:
            if isinstance(self._layer, nn.Module):
                hooks.callback(self._layer.register_forward_hook(note).remove)
            hooks.enter_context(forwards_replaced(self._others, remembered))
            yield
        self._is_known = True


@dataclass(frozen=True)
class _Output:
    """What a module returned, and how often its tensors had been changed by then."""

    value: Any
    versions: list[int]

    def unchanged(self) -> Any:
        """Return the value; refuse one that the model has overwritten since."""
        if _versions(self.value) != self.versions:
            raise NotImplementedError(
                "The model overwrites what its modules return before the output layer: "
                "write x = x * y in place of x *= y in its forward pass, or pass "
                "batches with fewer labelled tokens."
            )
        return self.value


def _versions(value: Any) -> list[int]:
    versions: list[int] = []
    for leaf in tree_leaves(value):
        # Tensors of inference mode can't tell.
        if isinstance(leaf, torch.Tensor) and not leaf.is_inference():
            versions.append(leaf._version)
    return versions


def _modules_beside(layer: nn.Module, module: nn.Module) -> list[nn.Module]:
    """List the largest modules within another one that do not contain a layer."""
    beside: list[nn.Module] = []
    for child in module.children():
        if all(part is not layer for part in child.modules()):
            beside.append(child)
        elif child is not layer:
            beside += _modules_beside(layer, child)
    return beside


def _read(
    logits: Callable[[], torch.Tensor],
    labels: LabelsOfTokens,
) -> Callable[[], torch.Tensor]:
    """Make a function that reads labels' log-probabilities `(N, 1 + S)`.

    However often it is called, the labels are those that its first call has drawn.
    """
    found: list[torch.Tensor] = []

    def read() -> torch.Tensor:
        of_vocabulary = logits()
        if not found:
            found.append(labels.under(of_vocabulary))
        return of_vocabulary.log_softmax(-1).gather(1, found[0])

    return read


def _decoder_input_ids(
    transformer: PreTrainedModel,
    labels: torch.Tensor,
) -> torch.Tensor:
    """Make a decoder's inputs that predict labels `(B, T)`, as the model does."""
    prepare = getattr(transformer, "prepare_decoder_input_ids_from_labels", None)
    if prepare is not None:
        return prepare(labels.clone())  # FSMT's writes padding tokens into them
    padding = transformer.config.pad_token_id
    return shift_tokens_right(labels, padding, start_token(transformer))


def _has_begun(
    labels: torch.Tensor,
    inputs: Mapping[str, Any],
) -> torch.Tensor:
    """Mark places from a text's first token on, `(B, T)`; refuse labels of no token."""
    for key in ("input_ids", "attention_mask"):
        given = inputs.get(key)
        if given is not None and given.shape != labels.shape:
            raise ValueError(
                f"labels have shape {tuple(labels.shape)}, but {key} has "
                f"{tuple(given.shape)}: give each token one label"
            )
    mask = inputs.get("attention_mask")
    real = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask.bool()
    if ((labels != IGNORED) & ~real).any():
        raise ValueError(
            f"There are labels where attention_mask is 0: set them to {IGNORED}"
        )
    return real.cumsum(1) > 0

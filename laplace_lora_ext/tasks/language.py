"""Free text: the next token, at every position that counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.models.bart.modeling_bart import shift_tokens_right

from laplace_lora_ext.models.answers import (
    DECODER_INPUTS,
    first_places,
    logits_at,
    output_layer_of,
    start_token,
)
from laplace_lora_ext.models.batches import IGNORED, text_first
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.running import is_shared
from laplace_lora_ext.tasks.classification import (
    CLASSIFICATION,
    check_labels,
    drawn_labels,
)
from laplace_lora_ext.tasks.task import ClassCounts, Outputs, Seeds, Task
from laplace_lora_ext.tasks.token_labels import (
    TokenClassification,
    check_labelled,
    check_places,
)

MOST_ROWS = 1024
"""Most rows of a vocabulary's logits that a part of a batch has."""


_TOKENS = {"input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds"}


# --- a few rows at a time -------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """Some of each text's labelled tokens, counted from its first one."""

    first: int
    size: int

    def of(self, labelled: Tensor) -> Tensor:
        """Mark which of the labelled ones among places `(B, T)` are of this part."""
        number = labelled.cumsum(1) - 1
        return labelled & (number >= self.first) & (number < self.first + self.size)


class LastStates:
    """What a model's output layer is given in its first pass, for further ones.

    It is of one batch and one set of weights. A further pass reads one token and is
    given a copy of these states: so the layer runs again, with whatever comes behind
    it, such as a cap of logits, and hardly anything else. Since they are copies, a
    model may overwrite what it is given.
    """

    def __init__(self, transformer: PreTrainedModel) -> None:
        self._transformer = transformer
        self._states: Tensor | None = None
        self._has_graph = False

    def call(self, call: Callable[[Any], Any], inputs: Any) -> Any:
        """Call a model on a batch, or give its output layer the states again."""
        layer = output_layer_of(self._transformer)
        if layer is None:  # nothing is kept, and all runs again
            return call(inputs)
        with layer.register_forward_pre_hook(self._give, prepend=True):
            if self._states is None:
                return call(inputs)
            # The layers before it have no graph: a recorder takes them for no calls.
            self._has_graph = torch.is_grad_enabled()
            with torch.no_grad():
                return call(self._one_token(inputs))

    def _give(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        states, *others = args
        if not states.is_floating_point():  # of a layer that is the embedding, too
            return None
        if self._states is None:
            self._states = states.clone()
            return None
        torch.set_grad_enabled(self._has_graph)
        return (self._states.clone(), *others)

    def _one_token(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Take the first token, which a model can read without masks and images."""
        first = {key: inputs[key][:1, :1] for key in _TOKENS & inputs.keys()}
        main = self._transformer.main_input_name  # of speech, say, all belongs together
        return {main: inputs[main][:1], **first} if main in inputs else first


# --- the model, and its labels --------------------------------------------------------


@dataclass
class LabelsOfTokens:
    """Labels of N tokens: those of the data, and S others that a model draws for each.

    Attributes
    ----------
    own : torch.Tensor
        `(N,)`, those of the data
    numbers : torch.Tensor
        `(S, N)`, from 0 to 1, which choose among a model's labels: whichever tokens are
        looked at together, the same labels are drawn
    """

    own: Tensor
    numbers: Tensor
    _all: Tensor | None = None

    def of(self, rows: Tensor | slice) -> LabelsOfTokens:
        """Select the labels of some tokens, `(N,)` booleans or an index."""
        return LabelsOfTokens(self.own[rows], self.numbers[:, rows])

    def read(self, logits: Tensor) -> Tensor:
        """Read log-probabilities `(N, 1 + S)` off logits `(N, V)`, their own first.

        However often it is done, the labels are those that were drawn the first time.
        """
        if self._all is None:
            own = self.own.to(logits.device)
            check_labels(own, logits.shape[-1])
            drawn = drawn_labels(logits.detach(), self.numbers)
            self._all = torch.cat([own[None], drawn]).T
        return logits.log_softmax(-1).gather(1, self._all)


class TokensModel(LogitsModel):
    """A language model that maps texts to logits `(N, V)` of labelled tokens.

    Batches are those of supervised fine-tuning: mappings with `input_ids`,
    `attention_mask` and `labels`, -100 where there is none. The logits that predict a
    label are those one token before it, or in an encoder-decoder those at its place.
    The output layer runs for these alone.

    Parameters are those of `LogitsModel`, without `class_token_ids` and
    `mask_token_id`. A model that does not generate text is refused.
    """

    may_answer = False

    @cached_property
    def transformer(self) -> PreTrainedModel:
        """Return the transformers model within, which there always is."""
        transformer = super().transformer
        if transformer is None or not transformer.can_generate():
            raise ValueError(
                'The likelihood "language_modeling" needs a transformers model that '
                "generates text, such as one of AutoModelForCausalLM."
            )
        return transformer

    @property
    def _decodes(self) -> bool:
        """Tell whether the model reads one text, and writes another."""
        return self.transformer.config.is_encoder_decoder

    def _logits(
        self, batch: Any, part: Span | None = None, states: LastStates | None = None
    ) -> Tensor:
        """Compute logits `(N, V)` of labelled tokens, or of a part, text after text.

        With `states`, the layers before the output layer run once for all parts.
        """
        if isinstance(batch, Mapping) and not self._decodes:
            batch = text_first(batch)  # labels too
        labelled = self.targets(batch, part) != IGNORED
        inputs = self._inputs(batch)
        call = self._call if states is None else partial(states.call, self._call)
        call = partial(call, inputs)
        index, is_labelled = first_places(labelled)
        logits = logits_at(self.transformer, index, labelled.shape[1], call)
        if is_labelled.all():
            return logits.flatten(0, 1)  # without a copy
        return logits[is_labelled.to(logits.device)]

    def log_probs_of(self, batch: Any, labels: LabelsOfTokens) -> Tensor:
        """Compute log-probabilities `(N, 1 + S)` of labels of the labelled tokens.

        Of more than `MOST_ROWS` tokens the logits are computed in parts, and none are
        kept: a backward pass computes those of one part after the other anew.
        """
        parts = self.parts(batch)
        if len(parts) == 1:
            return labels.read(self(batch))
        states = LastStates(self.transformer)

        def read(part: Span, of_part: LabelsOfTokens) -> Tensor:
            return of_part.read(self(batch, part=part, states=states))

        # The layers before the output layer run here, and never again.
        self(batch, part=Span(first=0, size=1), states=states)
        mask = self.token_mask(batch)
        rows: list[Tensor] = []
        of_parts: list[Tensor] = []
        for part in parts:
            own = part.of(mask)[mask].nonzero()[:, 0]
            rows.append(own)
            of_parts.append(checkpoint(read, part, labels.of(own), use_reentrant=False))
        in_order = torch.cat(rows).argsort()
        log_p = torch.cat(of_parts)
        return log_p[in_order.to(log_p.device)]

    def split(self, batch: Any) -> tuple[Any, Tensor]:
        """Return the batch, and the tokens `(B, T)` that its logits predict."""
        return batch, self.targets(batch)

    def parts(self, batch: Any) -> list[Span]:
        """Divide a batch's labelled tokens into parts of `MOST_ROWS` at most.

        Of more texts than that, a part has a token of each. Models that several ranks
        share are read at once, since ranks must make the same passes.
        """
        labelled = self.token_mask(batch)
        most_of_a_text = int(labelled.sum(1).max())
        size = max(1, MOST_ROWS // len(labelled))
        if is_shared(self):
            size = most_of_a_text
        return [Span(first, size) for first in range(0, most_of_a_text, size)]

    def targets(self, batch: Any, part: Span | None = None) -> Tensor:
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
        # An encoder reads other tokens than those that have labels.
        inputs = {} if self._decodes else super()._inputs(batch)
        check_places(labels, inputs)
        if not self._decodes:
            # Logits predict the token after their place.
            labels = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
            mask = inputs.get("attention_mask")
            if mask is not None:  # padding before a text predicts nothing
                labels = labels.masked_fill(mask.cumsum(1) == 0, IGNORED)
        check_labelled(labels != IGNORED)
        if part is None:
            return labels
        return labels.where(part.of(labels != IGNORED), IGNORED)

    def labelled(self, batch: Any, part: Span | None = None) -> Tensor:
        """Mark the labels that some logits predict, or those of a part, `(B, T)`."""
        predicting = self.targets(batch, part) != IGNORED
        return predicting if self._decodes else predicting.roll(1, dims=1)

    def token_mask(self, batch: Any) -> Tensor:
        """Mark the tokens `(B, T)` at which logits predict a label."""
        return self.targets(batch) != IGNORED

    def _inputs(self, batch: Any) -> Any:
        inputs = super()._inputs(batch)
        if self._decodes and all(inputs.get(key) is None for key in DECODER_INPUTS):
            labels = batch[self.dict_key_y].to(self.device)
            inputs["decoder_input_ids"] = _decoder_input_ids(self.transformer, labels)
        return text_first(inputs)


def _decoder_input_ids(transformer: PreTrainedModel, labels: Tensor) -> Tensor:
    """Make a decoder's inputs that predict labels `(B, T)`, as the model does."""
    prepare = getattr(transformer, "prepare_decoder_input_ids_from_labels", None)
    if prepare is not None:
        return prepare(labels.clone())  # FSMT's writes padding tokens into them
    padding = transformer.config.pad_token_id
    return shift_tokens_right(labels, padding, start_token(transformer))


class LanguageModeling(TokenClassification):
    """One of a vocabulary's words for each labelled token."""

    name = "language_modeling"
    adapter = TokensModel
    writes = True
    # Others can't draw the tokens of a text.
    structures = ("lowrank_kron",)
    # The exact Fisher would take a backward pass for each word of the vocabulary. What
    # two tokens of a text add to its gradient has nearly all of the noise, which signs
    # have too: one label for each token is enough.
    backend_defaults: Mapping[str, Any] = {
        "stochastic": True,
        "draws": "labels",
        "num_samples": 1,
    }

    @property
    def predicted(self) -> Task:
        return CLASSIFICATION

    def class_counts(self, y: Tensor) -> ClassCounts:
        """Count nothing: the words of a few texts are too few to guess by."""
        return ClassCounts()

    def outputs(
        self, model: LogitsModel, y: Tensor, numbers: Callable[[], Tensor]
    ) -> Outputs:
        """Choose log-probabilities of tokens' own labels, and of drawn ones.

        Their gradients in the logits of a vocabulary are the slopes that a Monte-Carlo
        Fisher sums, and at no time are the logits of all tokens needed. The slope of a
        drawn label averages 0 and is independent of every other token's. So the
        gradient G of a text's whole loss has `E[G Gᵀ] = Σ_t E[G_t G_tᵀ]`, the sum of
        its tokens' exact Fishers, for the price of one backward pass.
        """
        assert isinstance(model, TokensModel)
        labels = LabelsOfTokens(y[y != IGNORED], numbers().to(model.device))

        def log_probs(batch: Any, own: Tensor | None) -> Tensor:
            rows = slice(None) if own is None else own
            return model.log_probs_of(batch, labels.of(rows))

        return log_probs

    def seeds_and_loss(
        self, outputs: Tensor, y: Tensor, seeds: Callable[[Tensor], Seeds]
    ) -> tuple[Seeds, Tensor]:
        n_tokens, n_labels = outputs.shape
        # The drawn ones, behind each token's own.
        drawn = torch.eye(n_labels).to(outputs)[1:]
        vectors = drawn[:, None].expand(-1, n_tokens, -1)
        weights = outputs.new_full((len(drawn), 1), len(drawn) ** -0.5)
        return Seeds(vectors, weights), -outputs[:, 0].sum()


LANGUAGE_MODELING = LanguageModeling()

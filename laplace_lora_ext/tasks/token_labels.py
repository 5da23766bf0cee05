"""Labels of tokens: softmax and cross-entropy at each labelled token of a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from laplace_lora_ext.models.batches import IGNORED, is_real, logits_of
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.tasks.classification import Classification, check_labels
from laplace_lora_ext.tasks.task import ClassCounts, Draws, Seeds, scaled_seeds


class TokenLabelsModel(LogitsModel):
    """A model that maps texts to the logits `(N, C)` of their tokens.

    They come one text after the other.

    The tokens are those with a label other than -100; of a batch without labels, all
    that `attention_mask` marks. The model itself returns `(B, T, C)`, a row for each
    token.

    Batches are mappings, with labels `(B, T)` or without, or pairs of a mapping and
    labels.
    """

    may_answer = False

    def split_if_labelled(self, batch: Any) -> tuple[Any, Tensor | None]:
        """Split a batch, but keep labels in the inputs: they say which tokens count.

        A `ValueError` if labels are no whole numbers `(B, T)`, or at padding.
        """
        X, y = super().split_if_labelled(batch)
        X = self.unlabelled(X)
        if y is None:
            return X, None
        check_places(y, X)
        return {**X, self.dict_key_y: y}, y

    def text(self, batch: Any) -> Any:
        """Return inputs as any model, with the labels that say which tokens count."""
        text = super().text(self.unlabelled(batch))
        _, y = super().split_if_labelled(batch)
        return text if text is None or y is None else {**text, self.dict_key_y: y}

    def token_mask(self, batch: Any) -> Tensor:
        """Mark the labelled tokens `(B, T)`; of a batch without labels, all of them."""
        X, y = self.split_if_labelled(batch)
        if y is not None:
            return y != IGNORED
        return is_real(X).to(self.device)

    def _logits(self, batch: Any) -> Tensor:
        mask = self.token_mask(batch)
        inputs = self._inputs(self.unlabelled(batch))
        check_labelled(mask)
        by_place = logits_of(self._call(inputs))
        if by_place.shape[:2] != mask.shape:
            raise ValueError(
                'The likelihood "token_classification" needs logits of shape (texts, '
                f"tokens, classes), but the model returns {tuple(by_place.shape)} "
                f"where labels or attention_mask have {tuple(mask.shape)}: for one "
                'label a text use "classification".'
            )
        return by_place[mask.to(by_place.device)]


class TokenClassification(Classification):
    """One of C classes for each labelled token.

    Logits are `(N, C)`, for the labelled tokens of a batch, one text after the other.
    Targets are `(B, T)` classes, `IGNORED` wherever there is no label. To the host this
    is a classification.
    """

    name = "token_classification"
    adapter = TokenLabelsModel
    has_tokens = True
    # Curvlinops knows one label a text.
    structures = ("lowrank_kron", "diag", "full")

    def label_seeds(self, logits: Tensor, num_samples: int, draws: Draws) -> Seeds:
        """Compute slopes of the loss at drawn labels, given the text itself.

        The slope in a token's logits averages 0 and is independent of every other
        token's. So the gradient G of a text's whole loss has `E[G Gᵀ] = Σ_t E[G_t
        G_tᵀ]`, the sum of its tokens' exact Fishers, for the price of one backward
        pass.
        """
        of_tokens = super().label_seeds(logits, num_samples, draws)
        return scaled_seeds(of_tokens.dense(), over=(1, 2))

    def sign_seeds(self, logits: Tensor, num_samples: int, draws: Draws) -> Seeds:
        """Compute sums of all columns of a text's tokens, with random signs.

        The signs of two tokens are independent, and `E[G Gᵀ]` is as with drawn labels.
        What two tokens add to it has the largest part of the noise, and is independent
        in every sum.
        """
        signs = draws.signs(num_samples, logits.shape[-1]).to(logits)
        columns = self.times_root(logits, signs) / num_samples**0.5
        return scaled_seeds(columns, over=(1, 2))

    def class_counts(self, y: Tensor) -> ClassCounts:
        """Count the classes of all labelled tokens, wherever they are."""
        return super().class_counts(y[y != IGNORED])

    def check_targets(self, y: Tensor, logits: Tensor) -> Tensor:
        """Return checked labels `(N,)` of labelled tokens, on the logits' device."""
        labels = y[y != IGNORED].to(logits.device).long()
        check_labels(labels, logits.shape[-1])
        return labels


TOKEN_CLASSIFICATION = TokenClassification()


def check_labelled(mask: Tensor) -> None:
    """Refuse a batch without a token whose label some logits predict."""
    if not mask.any():
        raise ValueError(
            f"no token is labelled: every label is {IGNORED}, or in free text on a "
            "first token, which nothing predicts. Leave such batches out"
        )


def check_places(labels: Tensor, inputs: Mapping[str, Any]) -> None:
    """Refuse labels that are no whole numbers `(B, T)`, one for each real token."""
    if labels.ndim != 2 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(
            "labels must be whole numbers of shape (texts, tokens), not "
            f"{tuple(labels.shape)} of {labels.dtype}: for one label a text use the "
            'likelihood "classification"'
        )
    mask = inputs.get("attention_mask")
    if mask is not None and (labels[~mask.to(labels.device).bool()] != IGNORED).any():
        raise ValueError(
            f"There are labels where attention_mask is 0: set them to {IGNORED}"
        )

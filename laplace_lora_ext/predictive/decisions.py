"""What decisions need: probabilities or numbers, and how much more data would help."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from laplace_lora_ext.models.batches import IGNORED
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.predictive.data_sets import Sample, over_data_set, over_loader
from laplace_lora_ext.predictive.moments import DifferenceMoments
from laplace_lora_ext.predictive.review import Review, review
from laplace_lora_ext.processes.shards import (
    Columns,
    Share,
    check_in_order,
    join_batches,
)

# And of moments, most of which are tuples.
_BATCHES = (Mapping, Tensor, np.ndarray, tuple, DifferenceMoments)


class Prediction(NamedTuple):
    """Predictions for B examples and C classes, with entropies in nats.

    Of K labels for each example, all of these are `(B, K)`: the probability of each
    label, whether it is above one half, and what the draws say of it.

    Attributes
    ----------
    probabilities : torch.Tensor
        `(B, C)`; of tokens `(B, T, C)`, nan at padding, and all else `(B, T)`, with the
        label -100 there
    labels : torch.Tensor
        `(B,)`, the most probable class
    total_entropy : torch.Tensor
        `(B,)`, entropy of the probabilities averaged over draws of the posterior
    aleatoric_entropy : torch.Tensor
        `(B,)`, mean entropy of the draws: doubt that all draws share
    epistemic_entropy : torch.Tensor
        `(B,)`, the difference: mutual information of label and weights, the doubt that
        more training data would reduce; 0 where the posterior has no variance
    label_variance : torch.Tensor
        `(B,)`, how much the probability of `labels` varies over the draws

    References
    ----------
    Depeweg et al., "Decomposition of uncertainty in Bayesian deep learning for
    efficient and risk-sensitive learning", ICML 2018.
    """

    probabilities: Tensor
    labels: Tensor
    total_entropy: Tensor
    aleatoric_entropy: Tensor
    epistemic_entropy: Tensor
    label_variance: Tensor

    @classmethod
    def of_draws(
        cls,
        probabilities: Tensor,
        drawn: Tensor,
    ) -> Prediction:
        """Sum up draws, beside the probabilities of a link.

        Parameters
        ----------
        probabilities : torch.Tensor
            `(..., C)`
        drawn : torch.Tensor
            `(S, ..., C)`, probabilities of each draw
        """
        labels = probabilities.argmax(-1)
        total = torch.special.entr(drawn.mean(0)).sum(-1)
        aleatoric = torch.special.entr(drawn).sum(-1).mean(0)
        chosen = labels[None, ..., None]
        of_label = drawn.take_along_dim(chosen, dim=-1).squeeze(-1)
        # Entropy is concave, so only rounding can make the difference negative.
        epistemic = (total - aleatoric).clamp_min(0)
        variance = of_label.var(0, correction=0)
        # Between draws that are all the same there is nothing but rounding.
        vary = (drawn != drawn[:1]).any(-1).any(0)
        epistemic, variance = epistemic * vary, variance * vary
        return cls(probabilities, labels, total, aleatoric, epistemic, variance)

    def review(
        self,
        accuracy: float | None = None,
        capacity: int | None = None,
        costs: Sequence[float] | Tensor | None = None,
    ) -> Review:
        """Divide the texts into those to decide alone, and those for a person.

        Decided alone is the largest set whose mean probability of being right is the
        accuracy, or all but the `capacity` most doubtful ones. The promise is the
        posterior's: `Review.proof` says what labelled texts prove of it.

        Parameters
        ----------
        accuracy : float, optional
            from 0 to 1; with costs, 1 minus the mean cost of a decision
        capacity : int, optional
            how many texts people can read
        costs : sequence of float, optional
            `(C,)`, of missing each class; 1 by default

        Returns
        -------
        Review

        Raises
        ------
        ValueError
            If neither accuracy nor capacity is given, or both are; for other values;
            and for several labels or labels of tokens.
        """
        if self.labels.ndim != 1:
            raise ValueError(
                "A review divides texts of one class each: of several labels, or of "
                "tokens, take the columns of one."
            )
        return review(self.probabilities, accuracy, capacity, costs)


def over_examples(
    model: LogitsModel,
    x: Any,
    evaluate: Callable[[Any], Columns],
    collate_fn: Callable[[Any], Any] | None,
    batch_size: int,
    progress_bar: bool,
    sample: Sample,
) -> Columns:
    """Evaluate a function of inputs on a batch, a loader's batches or a data set."""

    def of_batch(batch: Any) -> Columns:
        return evaluate(model.inputs(batch))

    if collate_fn is None and isinstance(x, _BATCHES):
        return evaluate(x)
    if _is_data_set(x) or collate_fn is not None:
        return over_data_set(
            x,
            of_batch,
            collate_fn=collate_fn,
            batch_size=batch_size,
            description="[Predictions]",
            progress_bar=progress_bar,
            sample=sample,
        )
    # Dealt examples come back in the data's order.
    is_dealt = Share(x).is_dealt
    if not is_dealt:
        check_in_order(x)
    return over_loader(
        x,
        of_batch,
        description="[Predictions]",
        progress_bar=progress_bar,
        alone=not is_dealt,  # a rank's own batches are no other rank's business
        sample=sample,
    )


def padded(parts: Sequence[Columns]) -> Columns:
    """Join batches' columns `(B, T, ...)`, shorter texts padded by nan or -100."""
    length = max(part[0].shape[1] for part in parts)
    alike: list[Columns] = []
    for part in parts:
        columns = []
        for column in part:
            n_examples, n_tokens, *others = column.shape
            shape = (n_examples, length - n_tokens, *others)
            empty = torch.nan if column.is_floating_point() else IGNORED
            padding = column.new_full(shape, empty)
            columns.append(torch.cat([column, padding], dim=1))
        alike.append(tuple(columns))
    return join_batches(alike)


def _is_data_set(x: Any) -> bool:
    """Tell a data set from a loader; a list is one of batches."""
    is_indexed = hasattr(x, "__getitem__") and hasattr(x, "__len__")
    return is_indexed and not isinstance(x, list)

"""How good class probabilities `(N, C)` are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.nn.functional import nll_loss, one_hot
from torchmetrics.functional.classification import (
    multiclass_accuracy,
    multiclass_calibration_error,
)

from laplace_lora_ext.predictive.data_sets import Columns, over_loader
from laplace_lora_ext.predictive.links import DEFAULT_LINK

N_BINS = 15


def quality(
    probabilities: torch.Tensor, labels: torch.Tensor, n_bins: int = N_BINS
) -> dict[str, float]:
    """Measure accuracy, negative log-likelihood, expected calibration error and Brier score.

    Parameters
    ----------
    probabilities : torch.Tensor
        `(N, C)`
    labels : torch.Tensor
        `(N,)` class indices
    n_bins : int, default=15
        bins of equal width for the calibration error

    Returns
    -------
    dict
        "accuracy" and "ece" from 0 to 1, "nll" in nats, and "brier" from 0 to 2, all means over
        texts

    Raises
    ------
    ValueError
        If a probability is not finite.
    """
    if not torch.isfinite(probabilities).all():
        raise ValueError("Probabilities are not finite.")
    n_classes = probabilities.shape[1]
    # torchmetrics takes anything outside [0, 1] for logits, even a rounding error.
    p = probabilities.double().clamp(0, 1)
    accuracy = multiclass_accuracy(p, labels, n_classes, average="micro")
    calibration_error = multiclass_calibration_error(p, labels, n_classes, n_bins=n_bins, norm="l1")
    squared_distances = (p - one_hot(labels, n_classes)).square().sum(-1)
    return {
        "accuracy": accuracy.item(),
        "nll": negative_log_likelihood(p, labels),
        "ece": calibration_error.item(),
        "brier": squared_distances.mean().item(),
    }


class Comparison(NamedTuple):
    """Figures of the trained model and of its posterior on the same data; printed, a table.

    Attributes
    ----------
    trained : dict of str to float
        the trained model's, as `quality` returns them
    posterior : dict of str to float
        its posterior's
    """

    trained: dict[str, float]
    posterior: dict[str, float]

    def __str__(self) -> str:
        measures = "".join(f"{name:>10}" for name in self.trained)
        rows = [f"{'':<10}{measures}"]
        for name, figures in self._asdict().items():
            cells = "".join(f"{figure:>10.4f}" for figure in figures.values())
            rows.append(f"{name:<10}{cells}")
        return "\n".join(rows)


def compare(
    la: Any, loader: Iterable[Any], link_approx: str = DEFAULT_LINK, progress_bar: bool = False
) -> Comparison:
    """Measure the trained model and its posterior side by side: `print(compare(la, loader))`.

    Of several labels, the figures are means over all labels of all examples.

    Parameters
    ----------
    la : LoRALaplace or LaplaceMixture
        of classes; of a mixture, the trained model is the first member's
    loader : iterable of batches
        with labels; several processes share it
    link_approx : str, default="mean_field"
        as for `la.predict`
    progress_bar : bool, default=False
        over batches

    Returns
    -------
    Comparison

    Raises
    ------
    ValueError
        If the likelihood has no classes.
    """
    first = la.members[0]
    model = first.model
    likelihood = first.trained_likelihood
    if likelihood.is_gaussian:
        raise ValueError(f"{first.likelihood} has no class probabilities to compare.")

    def evaluate(batch: Any) -> Columns:
        X, y = model.split(batch)
        posterior = la(X, link_approx=link_approx, fitting=True).detach()
        with model.prepared(), torch.no_grad():
            logits = model(X)
        labels = likelihood.check_targets(y, logits).long()
        trained = likelihood.class_logits(logits).softmax(-1)
        return trained.cpu(), posterior.cpu(), labels.cpu()

    trained, posterior, labels = over_loader(loader, evaluate, "[Comparing]", progress_bar)
    if labels.ndim > 1:  # each of an example's labels is a classification into two classes
        trained, posterior, labels = (t.flatten(0, 1) for t in (trained, posterior, labels))
    return Comparison(quality(trained, labels), quality(posterior, labels))


def negative_log_likelihood(probabilities: torch.Tensor, labels: torch.Tensor) -> float:
    """Average in nats; a probability of 0 counts as the smallest positive number.

    Parameters
    ----------
    probabilities : torch.Tensor
        `(N, C)`
    labels : torch.Tensor
        `(N,)`

    Returns
    -------
    float
    """
    smallest = torch.finfo(probabilities.dtype).tiny
    return nll_loss(probabilities.clamp_min(smallest).log(), labels).item()

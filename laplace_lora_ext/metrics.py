"""How good predictions are: class probabilities `(N, C)`, or numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import nll_loss, one_hot
from torchmetrics.functional.classification import (
    multiclass_accuracy,
    multiclass_calibration_error,
)

from laplace_lora_ext.predicting import Predictor
from laplace_lora_ext.predictive.data_sets import Columns, over_loader
from laplace_lora_ext.predictive.links import DEFAULT_LINK
from laplace_lora_ext.predictive.moments import Moments
from laplace_lora_ext.predictive.predictions import NumberPrediction, Prediction

N_BINS = 15
COVERAGE = 0.9
"""Of the interval of numbers that is measured."""


def quality(
    probabilities: Tensor, labels: Tensor, n_bins: int = N_BINS
) -> dict[str, float]:
    """Measure accuracy, negative log-likelihood, ECE and Brier score.

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
        "accuracy" and "ece" from 0 to 1, "nll" in nats, and "brier" from 0 to 2, all
        means over texts

    Raises
    ------
    ValueError
        If the labels are not one for each row.
    """
    if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1]:
        raise ValueError(
            "Probabilities must be (N, C), with labels (N,), not "
            f"{tuple(probabilities.shape)} with {tuple(labels.shape)}: "
            "compare(la, loader) measures several labels and labels of tokens."
        )
    n_classes = probabilities.shape[1]
    # torchmetrics takes anything outside [0, 1] for logits, even a rounding error.
    p = probabilities.double().clamp(0, 1)
    accuracy = multiclass_accuracy(p, labels, n_classes, average="micro")
    # torchmetrics puts exactly 1 into a bin of its own, beyond the last. This is the
    # largest number below it in float32.
    below_one = p.clamp_max(1 - 2**-24)
    calibration_error = multiclass_calibration_error(
        below_one, labels, n_classes, n_bins=n_bins, norm="l1"
    )
    squared_distances = (p - one_hot(labels, n_classes)).square().sum(-1)
    return {
        "accuracy": accuracy.item(),
        "nll": negative_log_likelihood(probabilities, labels),
        "ece": calibration_error.item(),
        "brier": squared_distances.mean().item(),
    }


def quality_of_numbers(
    prediction: NumberPrediction, targets: Tensor
) -> dict[str, float]:
    """Measure predictions of numbers by their targets.

    Parameters
    ----------
    prediction : NumberPrediction
        of N examples
    targets : torch.Tensor
        `(N, C)`, or of one number `(N,)`

    Returns
    -------
    dict
        "rmse" (root mean square error) and "crps" (continuous ranked probability score)
        in the targets' unit, means over all numbers; "nll", the mean negative
        log-density of an example in nats; "coverage", the share of the targets within
        the central interval of 90 %

    Raises
    ------
    ValueError
        If the targets are not of the prediction's shape.
    """
    if targets.ndim == 1:
        targets = targets[:, None]
    if targets.shape != prediction.mean.shape:
        raise ValueError(
            f"targets must be {tuple(prediction.mean.shape)}, not "
            f"{tuple(targets.shape)}."
        )
    return _mean_figures(_figures_of_examples(prediction, targets))


def _figures_of_examples(
    prediction: Prediction | NumberPrediction, targets: Tensor
) -> Tensor:
    """Compute each example's part of the figures, `(N, 4)`, in float64 on the CPU."""
    prediction = NumberPrediction._make(part.cpu().double() for part in prediction)
    targets = targets.to(prediction.mean)
    low, high = prediction.interval(COVERAGE)
    is_within = (low <= targets) & (targets <= high)
    columns = [
        (prediction.mean - targets).square().mean(1),
        -prediction.log_density(targets),
        is_within.double().mean(1),
        prediction.crps(targets).mean(1),
    ]
    return torch.stack(columns, dim=1)


def _mean_figures(of_examples: Tensor) -> dict[str, float]:
    mean_square, nll, coverage, crps = of_examples.mean(0).tolist()
    return {"rmse": mean_square**0.5, "nll": nll, "coverage": coverage, "crps": crps}


class Comparison(NamedTuple):
    """Figures of a trained model beside its posterior's; printed, a table.

    Attributes
    ----------
    trained : dict of str to float
        the trained model's, as `quality` or `quality_of_numbers` returns them
    posterior : dict of str to float
        its posterior's
    amortized : dict of str to float, optional
        the posterior's with the variances that `la.amortize` has learnt; None where it
        has not, or where the prior has changed since
    """

    trained: dict[str, float]
    posterior: dict[str, float]
    amortized: dict[str, float] | None = None

    def __str__(self) -> str:
        measures = "".join(f" {name:>9}" for name in self.trained)
        rows = [f"{'':<10}{measures}"]
        for name, figures in self._asdict().items():
            if figures is not None:
                cells = "".join(f" {figure:>9.4f}" for figure in figures.values())
                rows.append(f"{name:<10}{cells}")
        return "\n".join(rows)


def compare(
    la: Predictor,
    loader: Iterable[Any],
    link_approx: str = DEFAULT_LINK,
    progress_bar: bool = False,
) -> Comparison:
    """Measure the trained model beside its posterior: `print(compare(la, loader))`.

    Of several labels, the figures are means over all labels of all examples. Of
    numbers, the trained model has the noise alone, `la.sigma_noise`, and the posterior
    has its own variance with it.

    Parameters
    ----------
    la : LoRALaplace or LaplaceMixture
        of classes or numbers; of a mixture, the trained model is the first member's
    loader : iterable of batches
        with labels; several processes share it
    link_approx : str, default="mean_field"
        as for `la.predict`
    progress_bar : bool, default=False
        over batches

    Returns
    -------
    Comparison
        a row for the trained model, and one for each way to predict
    """
    first = la.members[0]
    model, task = first.model, first.task

    def of_batch(batch: Any) -> Columns:
        """Predict by the model and every posterior; return targets last."""
        X, y = model.split(batch)
        with model.forward_passes():
            f_mu = model(X)
        targets = task.check_targets(y, f_mu)
        if task.has_noise:
            without_variance = Moments(f_mu, torch.diag_embed(torch.zeros_like(f_mu)))
            predictions = [NumberPrediction.of([without_variance], [first.sigma_noise])]
            predictions += [la.predict(X, pred_type=kind) for kind in _pred_types(la)]
            columns = [_figures_of_examples(each, targets) for each in predictions]
        else:
            targets = targets.long()
            options = {"link_approx": link_approx, "fitting": True}
            columns = [task.class_logits(f_mu).softmax(-1)]
            columns += [la(X, pred_type=kind, **options) for kind in _pred_types(la)]
        return tuple(column.detach().cpu() for column in [*columns, targets])

    *columns, targets = over_loader(
        loader, of_batch, "[Comparing]", progress_bar, owners=model.owners
    )
    if task.has_noise:
        return Comparison(*map(_mean_figures, columns))
    # Each of an example's labels is a classification into two classes.
    if targets.ndim > 1:
        columns = [probabilities.flatten(0, 1) for probabilities in columns]
        targets = targets.flatten()
    return Comparison(*(quality(probabilities, targets) for probabilities in columns))


def _pred_types(la: Predictor) -> list[str]:
    """List how a posterior predicts: exactly, and by its learnt variances."""
    for member in la.members:
        learnt = member.learnt_variance
        if learnt is None or not learnt.is_of(member.prior_precision, member._H_factor):
            return ["glm"]
    return ["glm", "amortized"]


def negative_log_likelihood(probabilities: Tensor, labels: Tensor) -> float:
    """Average in nats; 0 counts as the smallest positive number of its precision.

    Parameters
    ----------
    probabilities : torch.Tensor
        `(N, C)`
    labels : torch.Tensor
        `(N,)`

    Returns
    -------
    float
        mean over examples, in nats
    """
    smallest = torch.finfo(probabilities.dtype).tiny
    return nll_loss(probabilities.double().clamp(smallest, 1).log(), labels).item()

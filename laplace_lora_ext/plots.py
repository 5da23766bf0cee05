"""Draws pictures of how far a posterior can be trusted, by matplotlib.

Each takes what `outcomes` has made of a posterior and of a loader with labels, so that
several pictures need one pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from laplace_lora_ext.metrics import N_BINS
from laplace_lora_ext.predicting import Predictor
from laplace_lora_ext.predictive.data_sets import Columns, over_loader
from laplace_lora_ext.predictive.predictions import Prediction
from laplace_lora_ext.training.students import best_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAINED = "trained model"
TEMPERATURE = "temperature"
POSTERIOR = "posterior"
_COLOURS = {TRAINED: "tab:red", TEMPERATURE: "tab:orange", POSTERIOR: "tab:blue"}


class Outcomes(NamedTuple):
    """Holds predictions for N labelled examples, before and after.

    Of several labels, each label of each example is an example here, of two classes.

    Attributes
    ----------
    trained : torch.Tensor
        `(N, C)`, the trained model's own probabilities
    prediction : Prediction
        the posterior's
    labels : torch.Tensor
        `(N,)`
    temperature : float, optional
        of the trained model's logits, as a rival
    """

    trained: Tensor
    prediction: Prediction
    labels: Tensor
    temperature: float | None = None

    @property
    def probabilities(self) -> dict[str, Tensor]:
        """Name the probabilities `(N, C)` by whose they are."""
        named = {TRAINED: self.trained}
        if self.temperature is not None:
            log_p = log_of(self.trained)
            named[TEMPERATURE] = (log_p / self.temperature).softmax(-1)
        return named | {POSTERIOR: self.prediction.probabilities}

    def best_temperature(self) -> float:
        """Return the temperature at which these labels are most probable."""
        of_labels = one_hot(self.labels, self.trained.shape[-1]).double()
        return 1 / best_scale(log_of(self.trained), of_labels)


def outcomes(
    la: Predictor, loader: Iterable[Any], progress_bar: bool = False
) -> Outcomes:
    """Predict labelled examples by the trained model and by its posterior.

    Parameters
    ----------
    la : LoRALaplace or LaplaceMixture
        of classes; of a mixture, the trained model is the first member's
    loader : iterable of batches
        with labels; read once
    progress_bar : bool, default=False
        whether to show one

    Returns
    -------
    Outcomes
        on the CPU

    Raises
    ------
    ValueError
        If there are no labels, or the posterior predicts no classes of examples.
    """
    first = la.members[0]
    first.task.check_classes()
    if first.task.has_tokens:
        raise ValueError(
            f"Pictures are of one distribution an example, and {first.likelihood} has "
            "one a token: laplace_lora_ext.metrics.compare measures labels of tokens."
        )
    task = first.task

    def of_batch(batch: Any) -> Columns:
        inputs, y = first.model.split(batch)
        logits, prediction = predict_both(la, inputs)
        labels = task.check_targets(y, logits).long()
        columns = task.class_logits(logits).softmax(-1), labels, *prediction
        return tuple(column.detach().cpu() for column in columns)

    trained, labels, *fields = over_loader(
        loader, of_batch, "[Predictions]", progress_bar
    )
    prediction = Prediction(*fields)
    if not task.sees_differences:
        prediction = _of_each_label(prediction)
    return Outcomes(trained.flatten(0, -2), prediction, labels.flatten())


def predict_both(
    la: Any, inputs: Any, pred_type: str = "glm"
) -> tuple[Tensor, Prediction]:
    """Return a trained model's logits of a batch, and its posterior's prediction.

    All batches see the same draws.

    Parameters
    ----------
    la : LoRALaplace or LaplaceMixture
        of classes
    inputs : Mapping
        a batch without labels
    pred_type : {"glm", "amortized"}, default="glm"
        as for `la.predict`

    Returns
    -------
    tuple of torch.Tensor and Prediction
        logits `(B, C)`, and what `la.predict` returned
    """
    model = la.members[0].model
    with model.forward_passes():
        logits = model(inputs)
    generator = torch.Generator(model.device).manual_seed(0)
    return logits, la.predict(inputs, generator=generator, pred_type=pred_type)


def log_of(probabilities: Tensor) -> Tensor:
    """Return finite logarithms, in float64: 0 counts as the smallest positive number.

    Parameters
    ----------
    probabilities : torch.Tensor
        of any shape

    Returns
    -------
    torch.Tensor
        of the same shape
    """
    smallest = torch.finfo(torch.float32).tiny
    return probabilities.double().clamp_min(smallest).log()


def _of_each_label(prediction: Prediction) -> Prediction:
    """Turn predictions of K labels into those of two classes each."""
    flat = Prediction._make(column.flatten() for column in prediction)
    p = flat.probabilities
    of_both = torch.stack([1 - p, p], dim=-1)
    return flat._replace(probabilities=of_both)


def reliability(
    results: Outcomes, ax: Axes | None = None, n_bins: int = N_BINS
) -> Axes:
    """Draw how often answers are right against how sure they are, before and after.

    Parameters
    ----------
    results : Outcomes
        what `outcomes` returned
    ax : matplotlib.axes.Axes, optional
        where to draw; made if omitted
    n_bins : int, default=15
        each of as many examples as any other

    Returns
    -------
    matplotlib.axes.Axes
        with the drawing
    """
    ax = _axes(ax)
    ax.plot([0, 1], [0, 1], color="grey", linestyle=":")
    for name, probabilities in results.probabilities.items():
        confidence, answers = probabilities.max(-1)
        is_right = (answers == results.labels).double()
        least_sure_first = confidence.argsort(stable=True)
        bins = least_sure_first.tensor_split(min(n_bins, len(confidence)))
        counts = [len(places) for places in bins]
        ax.plot(
            [confidence[places].double().mean().item() for places in bins],
            [is_right[places].mean().item() for places in bins],
            marker="o",
            color=_COLOURS[name],
            label=name,
        )
    ax.set_title(f"{counts[-1]} to {counts[0]} texts a point", fontsize="medium")
    ax.set(xlabel="confidence", ylabel="share of right answers")
    ax.set(xlim=(0, 1), ylim=(0, 1))
    ax.legend()
    return ax


def risk_coverage(results: Outcomes, ax: Axes | None = None) -> Axes:
    """Draw the share of errors among the surest answers against how many are kept.

    Parameters and result are those of `reliability`, but `n_bins`.
    """
    ax = _axes(ax)
    for name, probabilities in results.probabilities.items():
        confidence, answers = probabilities.max(-1)
        is_wrong = (answers != results.labels).double()
        # Stable, so that ties, as of answers that are all but certain, come out the
        # same each time.
        surest_first = confidence.argsort(descending=True, stable=True)
        n_kept = torch.arange(1, len(surest_first) + 1)
        risk = is_wrong[surest_first].cumsum(0) / n_kept
        coverage = n_kept / len(n_kept)
        ax.plot(coverage.tolist(), risk.tolist(), color=_COLOURS[name], label=name)
    ax.set(xlabel="share of answers kept", ylabel="share of errors among them")
    ax.set(xlim=(0, 1), ylim=(0, None))
    ax.legend()
    return ax


def _axes(ax: Axes | None) -> Axes:
    """Take the given axes, or make new ones."""
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt  # only who draws needs it

    _, axes = plt.subplots(layout="constrained")
    return axes

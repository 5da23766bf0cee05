"""Pictures of how far a posterior can be trusted, by matplotlib.

Each takes a posterior and a loader with labels, or what `outcomes` has made of both, so that
several pictures need one pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tqdm import tqdm

from laplace_lora_ext.metrics import N_BINS
from laplace_lora_ext.predictive.decisions import Prediction
from laplace_lora_ext.processes.exchange import rank

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TRAINED, _POSTERIOR = "trained model", "posterior"
_COLOURS = {_TRAINED: "tab:red", _POSTERIOR: "tab:blue"}


class Outcomes(NamedTuple):
    """Predictions for N labelled examples, before and after.

    Attributes
    ----------
    trained : torch.Tensor
        `(N, C)`, the trained model's own probabilities
    prediction : Prediction
        the posterior's
    labels : torch.Tensor
        `(N,)`
    """

    trained: torch.Tensor
    prediction: Prediction
    labels: torch.Tensor

    @property
    def probabilities(self) -> dict[str, torch.Tensor]:
        """Probabilities `(N, C)` by whose they are."""
        return {_TRAINED: self.trained, _POSTERIOR: self.prediction.probabilities}


def outcomes(
    la: Any,
    loader: Iterable[Any],
    pred_type: str = "glm",
    progress_bar: bool = False,
) -> Outcomes:
    """Predict labelled examples by the trained model and by its posterior.

    Parameters
    ----------
    la : LoRALaplace or LaplaceMixture
        of classes; of a mixture, the trained model is the first member's
    loader : iterable of batches
        with labels; read once
    pred_type : {"glm", "amortized"}
        as for `la.predict`
    progress_bar : bool, default=False

    Returns
    -------
    Outcomes
        on the CPU

    Raises
    ------
    ValueError
        If there are no labels, or the posterior predicts no classes.
    """
    batches = tqdm(loader, "[Predictions]", disable=not progress_bar or rank() > 0)
    generator = torch.Generator(la.model.device).manual_seed(0)
    start = generator.get_state()
    trained, predictions, labels = [], [], []
    for batch in batches:
        inputs, y = la.model.split(batch)
        with la.model.prepared(), torch.no_grad():
            trained.append(la.model(inputs).softmax(-1).cpu())
        # All batches see the same draws.
        generator.set_state(start)
        predictions.append(la.predict(inputs, generator=generator, pred_type=pred_type))
        labels.append(y.cpu())
    if not labels:
        raise ValueError("The loader has no data.")
    joined = [torch.cat(parts).detach().cpu() for parts in zip(*predictions, strict=True)]
    return Outcomes(torch.cat(trained), Prediction(*joined), torch.cat(labels))


def reliability(
    la: Any,
    loader: Iterable[Any] | None = None,
    ax: Axes | None = None,
    n_bins: int = N_BINS,
) -> Axes:
    """Draw how often answers are right against how sure they are, before and after.

    Parameters
    ----------
    la : LoRALaplace, LaplaceMixture or Outcomes
    loader : iterable of batches, optional
        with labels; not for `Outcomes`
    ax : matplotlib.axes.Axes, optional
        where to draw; made if omitted
    n_bins : int, default=15
        of equal width

    Returns
    -------
    matplotlib.axes.Axes
    """
    found = _outcomes_of(la, loader)
    ax = _axes(ax)
    ax.plot([0, 1], [0, 1], color="grey", linestyle=":")
    for name, probabilities in found.probabilities.items():
        confidence, answers = probabilities.max(-1)
        is_right = (answers == found.labels).double()
        bins = (confidence * n_bins).long().clamp(max=n_bins - 1)
        numbers = torch.bincount(bins, minlength=n_bins)
        seen = numbers > 0
        sums = torch.stack(
            [torch.bincount(bins, values.double(), n_bins) for values in (confidence, is_right)]
        )
        x, y = (sums[:, seen] / numbers[seen]).tolist()
        ax.plot(x, y, marker="o", color=_COLOURS[name], label=name)
    ax.set(xlabel="confidence", ylabel="share of right answers", xlim=(0, 1), ylim=(0, 1))
    ax.legend()
    return ax


def risk_coverage(la: Any, loader: Iterable[Any] | None = None, ax: Axes | None = None) -> Axes:
    """Draw the share of errors among the surest answers against how many are kept.

    Parameters and result are those of `reliability`.
    """
    found = _outcomes_of(la, loader)
    ax = _axes(ax)
    for name, probabilities in found.probabilities.items():
        confidence, answers = probabilities.max(-1)
        is_wrong = (answers != found.labels).double()
        of_surest = is_wrong[confidence.argsort(descending=True, stable=True)]
        kept = torch.arange(1, len(of_surest) + 1)
        risks = of_surest.cumsum(0) / kept
        ax.plot((kept / len(kept)).tolist(), risks.tolist(), color=_COLOURS[name], label=name)
    ax.set(xlabel="share of answers kept", ylabel="share of errors among them", xlim=(0, 1))
    ax.set_ylim(bottom=0)
    ax.legend()
    return ax


def entropies(la: Any, loader: Iterable[Any] | None = None, ax: Axes | None = None) -> Axes:
    """Draw the entropies of right and of wrong answers as histograms.

    Parameters and result are those of `reliability`.
    """
    found = _outcomes_of(la, loader)
    ax = _axes(ax)
    prediction = found.prediction
    is_right = prediction.labels == found.labels
    parts = [prediction.total_entropy[is_right], prediction.total_entropy[~is_right]]
    ax.hist(
        [part.tolist() for part in parts],
        bins=20,
        stacked=True,
        color=["tab:green", "tab:orange"],
        label=["right", "wrong"],
    )
    ax.set(xlabel="entropy of the posterior's answer (nats)", ylabel="texts")
    ax.legend()
    return ax


def _outcomes_of(la: Any, loader: Iterable[Any] | None) -> Outcomes:
    if isinstance(la, Outcomes):
        return la
    if loader is None:
        raise ValueError("Pass a loader with labels beside the posterior.")
    return outcomes(la, loader)


def _axes(ax: Axes | None) -> Axes:
    """The given axes, or new ones."""
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("Pictures need matplotlib: pip install matplotlib.") from error
    return plt.subplots(layout="constrained")[1]

"""The host's `optimize_prior_precision`: builds a method's object and calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

import torch
import torchmetrics

from laplace_lora_ext.models.locks import exclusive
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.predictive.statistics import PredictiveStatistics
from laplace_lora_ext.tuning import build
from laplace_lora_ext.tuning.history import TuningHistory
from laplace_lora_ext.tuning.method import TuningMethod


@exclusive
@torch.inference_mode(False)
@torch.enable_grad()
def optimize_prior_precision(
    la: Posterior,
    pred_type: str = "glm",
    method: str | TuningMethod = "marglik",
    n_steps: int = 1000,
    lr: float = 0.1,
    init_prior_prec: float | torch.Tensor = 1.0,
    prior_structure: str = "scalar",
    val_loader: Iterable[Any] | PredictiveStatistics | None = None,
    loss: torchmetrics.Metric | Callable[..., torch.Tensor] | None = None,
    log_prior_prec_min: float = -4,
    log_prior_prec_max: float = 4,
    grid_size: int = 100,
    link_approx: str | None = None,
    n_samples: int = 100,
    verbose: bool = False,
    progress_bar: bool = False,
    log_prior_prec_base: float = 10.0,
    **options: Any,
) -> TuningHistory:
    """Choose the prior precision; if anything goes wrong, it stays as it was.

    Parameters
    ----------
    method : str or TuningMethod
        start with "agreement"; "second_training" is the surest, if there is time to train twice.
        "gridsearch" and "val_gd" need validation data; "marglik" needs none at all. Each name
        stands for an object of `laplace_lora_ext.tuning`, which explains the method and its
        options; you can also pass such an object
    verbose : bool, default=False
        print the result
    **options
        these and all other arguments are options of the method, such as `train_loader`. Options
        that the method lacks are refused, except the host's arguments at their defaults

    Returns
    -------
    TuningHistory
        the evidence or loss along the way

    Raises
    ------
    ValueError
        If options or data are missing or don't suit the method, or the objective is not a number.
    NotImplementedError
        For "val_gd" with another structure than "lowrank_kron".

    Notes
    -----
    "marglik" tends to choose a smaller prior precision, hence a broader posterior, than validation
    data would. "agreement" comes closer; it needs the training data once more.
    `benchmarks/README.md` has the figures.
    """
    given = {name: value for name, value in locals().items() if name in _DEFAULTS}
    changed = {k: v for k, v in given.items() if not _is_same(v, _DEFAULTS[k])}
    return tuned(la, build(method, changed | options), verbose)


def tuned(la: Posterior, method: TuningMethod, verbose: bool) -> TuningHistory:
    """Call a method, and print the result if asked to."""
    history = method(la)
    if verbose:
        print(f"Optimized prior precision is {la.prior_precision}.")
    return history


_DEFAULTS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in signature(optimize_prior_precision).parameters.items()
    if name not in ("la", "method", "verbose", "options")
}


def _is_same(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, str | int | float) and value == default)

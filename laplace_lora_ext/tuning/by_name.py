"""The host's `optimize_prior_precision`: builds a method's object and calls it."""

from __future__ import annotations

from typing import Any

import torch

from laplace_lora_ext.models.locks import exclusive
from laplace_lora_ext.models.posterior import Posterior
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
    *,
    verbose: bool = False,
    **options: Any,
) -> TuningHistory:
    """Choose the prior precision; if anything goes wrong, it stays as it was.

    Parameters
    ----------
    pred_type : {"glm", "nn"}
        which predictions "gridsearch" scores; the other methods know "glm" alone
    method : str or TuningMethod
        start with "agreement"; "second_training" is the surest, if there is time to train twice.
        "gridsearch" and "val_gd" need validation data; "marglik" needs none at all. Each name
        stands for an object of `laplace_lora_ext.tuning`, which explains the method and its
        options; you can also pass such an object
    verbose : bool, default=False
        print the result
    **options
        options of the method, such as `train_loader`, `val_loader`, `prior_structure` and
        `progress_bar`: the fields of its object

    Returns
    -------
    TuningHistory
        the evidence or loss along the way

    Raises
    ------
    ValueError
        If the method lacks an option, data are missing or don't suit it, or the objective is not a
        number.
    NotImplementedError
        For "val_gd" with another structure than "lowrank_kron".

    Notes
    -----
    "marglik" tends to choose a smaller prior precision, hence a broader posterior, than validation
    data would. "agreement" comes closer; it needs the training data once more.
    `benchmarks/README.md` has the figures.
    """
    if pred_type != "glm":
        options["pred_type"] = pred_type
    return tuned(la, build(method, options), verbose)


def tuned(la: Posterior, method: TuningMethod, verbose: bool) -> TuningHistory:
    """Call a method, and print the result if asked to."""
    history = method(la)
    if verbose:
        print(f"Optimized prior precision is {la.prior_precision}.")
    return history

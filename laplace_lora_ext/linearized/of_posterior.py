"""The linearised model of a fitted posterior."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from laplace_lora_ext.linearized import data
from laplace_lora_ext.linearized.basis import Basis
from laplace_lora_ext.linearized.model import LinearizedModel
from laplace_lora_ext.models.locks import exclusive
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.precision import without_autocast
from laplace_lora_ext.processes.exchange import one_generator, together


@exclusive
@torch.inference_mode(False)
@without_autocast
@together()
def linearize(
    la: Posterior,
    train_loader: Iterable[Any],
    n_features: int | None = None,
    generator: torch.Generator | None = None,
    progress_bar: bool = False,
) -> LinearizedModel:
    """One pass over the training set, for "linearized_marglik" and "linearized_loo".

    Parameters
    ----------
    train_loader : DataLoader or iterable
        the data of the fit
    n_features : int, optional
        about how many directions to compare the Jacobians of different examples along; by
        default the eigenvectors that the curvature keeps. N examples with C outputs take
        `4 N C n_features` bytes, in a temporary file where these are more than 64 MB. As many
        as there are LoRA weights are exact
    generator : torch.Generator, optional
        of directions beside the eigenvectors
    progress_bar : bool, default=False

    Raises
    ------
    ValueError
        If the loader has no data or not those of the fit, labels don't fit, or a number is
        not finite; the message names the batch.
    """
    la._check_H_init()
    if n_features is not None and n_features < 1:
        raise ValueError(f"n_features must be at least 1, not {n_features}.")
    la._check_model()
    fitted = la.model, la.blocks, la.trained_likelihood
    basis = Basis(la._eigenbasis(train_loader), n_features, one_generator(generator))
    model = data.linearize(*fitted, la.prior_mean, train_loader, basis, progress_bar)
    model.check_training_data(la.n_data, float(la.loss))
    return model

"""Fits a posterior to training data, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Any

import torch
from torch.utils.data import DataLoader

from laplace_lora_ext.fitting.moving import follow
from laplace_lora_ext.fitting.sums import sums_of
from laplace_lora_ext.models.locks import exclusive
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.models.same_model import ModelState, check_runs, check_same
from laplace_lora_ext.models.weights import flattened
from laplace_lora_ext.passes.checks import check_called
from laplace_lora_ext.processes.exchange import together


@exclusive
@torch.inference_mode(False)  # what is kept must not be inference tensors
def fit(
    la: Posterior,
    train_loader: DataLoader | Iterable[Any],
    override: bool = True,
    progress_bar: bool = False,
) -> None:
    """Fit the posterior around the model's present weights.

    If an error occurs, the model and the previous fit stay as they were.

    In a `torch.distributed` process group, call this on every rank, each with its own shard of
    the data (a `DistributedSampler`, or a loader that Accelerate prepared): all ranks end with
    the posterior of all data. The same goes for `predictive_statistics` and
    `optimize_prior_precision`. Each rank makes its own predictions.

    Parameters
    ----------
    train_loader : DataLoader or iterable
        of mappings with labels, or of pairs `(X, y)`; read once
    override : bool, default=True
        False adds the data to those of the previous fit, which `save_pretrained` and
        `from_pretrained` carry over to another process
    progress_bar : bool, default=False

    Raises
    ------
    ValueError
        If the loader is empty, labels don't fit, a number is not finite, or two processes differ
        in weights or settings or have the same data. The message names the batch and the layer.
    RuntimeError
        If some LoRA layers are never called, the weights change while the data are read, or
        another rank has failed.
    """
    with together():
        if override:
            check_runs(la.model, la.blocks)
        else:
            la._check_model()
        follow(la)
        fitted_model, mean = ModelState.of(la.model, la.blocks), flattened(la.blocks, la._device)
        H, loss, n_data, called = sums_of(la, train_loader, progress_bar)
        _check_still(la, fitted_model, mean)
        if override or not la.n_data:
            check_called(la.blocks, called)
        if la.n_data and not override:
            H, loss, n_data = la._sums() + H, loss + la.loss, n_data + la.n_data
        fitted = copy(la)  # which an error leaves behind
        fitted._adopt(H, n_data)
        fitted.loss, fitted.n_data = loss, n_data
        fitted.n_outputs = la.model.output_size
        fitted.mean = mean
        fitted._fitted = fitted_model
        fitted._posterior_scale = None
        fitted.learnt_variance = None
    vars(la).update(vars(fitted))


def _check_still(la: Posterior, before: ModelState, mean: torch.Tensor) -> None:
    """Refuse sums of a model that has changed on the way, as by an optimizer in the loader."""
    try:
        check_same(la.model, la.blocks, before, mean)
    except RuntimeError as error:
        raise RuntimeError(
            f"The model has changed while its training data were read. {error}"
        ) from None

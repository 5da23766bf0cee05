"""A batch's curvature from the host's own pass, which is checked on the way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch

from laplace_lora_ext.likelihoods import Likelihood
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import Block
from laplace_lora_ext.passes.checks import inspected


class HostsStructure(Protocol):
    """What the host computes curvature for."""

    model: LogitsModel
    blocks: list[Block]
    trained_likelihood: Likelihood
    _curv_closure: Callable[..., tuple[torch.Tensor, Any]]

    @property
    def _dtype(self) -> torch.dtype: ...

    @property
    def _sizes(self) -> list[int]: ...

    def _prepared(self) -> AbstractContextManager[None]: ...


def curvature_of(la: HostsStructure, X: Any, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Loss and curvature of a batch.

    Raises
    ------
    ValueError
        If a label does not fit the logits, or a number is not finite; the message names the layer.
    """
    targets = la.trained_likelihood.as_targets(y.clone(), la._dtype)
    check = partial(la.trained_likelihood.check_targets, y)
    with la._prepared(), torch.enable_grad(), inspected(la.model, la.blocks, X, check):
        loss, H = la._curv_closure(X, targets, N=1)
    diagonal = H if isinstance(H, torch.Tensor) and H.ndim == 1 else H.diag()
    for block, part in zip(la.blocks, diagonal.split(la._sizes), strict=True):
        if not torch.isfinite(part).all():
            raise ValueError(f"LoRA layer {block.name}: non-finite curvature")
    return loss, H

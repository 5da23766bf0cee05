"""A batch's curvature from the host's own pass, which is checked on the way."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.passes.checks import inspected


def curvature_of(la: Posterior, X: Any, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Loss and curvature of a batch; labels that don't fit and non-finite numbers are refused."""
    targets = la.trained_likelihood.as_targets(y.clone(), la._dtype)
    check = partial(la.trained_likelihood.check_targets, y)
    with la._prepared(), torch.enable_grad(), inspected(la.model, la.blocks, X, check):
        loss, H = la._curv_closure(X, targets, N=1)
    diagonal = H if isinstance(H, torch.Tensor) and H.ndim == 1 else H.diag()
    for block, part in zip(la.blocks, diagonal.split(la._sizes), strict=True):
        if not torch.isfinite(part).all():
            raise ValueError(f"LoRA layer {block.name}: non-finite curvature")
    return loss, H

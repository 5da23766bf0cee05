"""A batch's curvature from the host's own pass, which is checked on the way."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from laplace_lora_ext.curvature.backend import LowRankKronInterface
from laplace_lora_ext.messages import listed
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.passes.checks import inspected


def curvature_of(la: Posterior, X: Any, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Loss and curvature of a batch; labels that don't fit and non-finite numbers are refused."""
    _check_on_one_device(la)
    targets = la.trained_likelihood.as_targets(y.clone(), la._dtype)
    check = partial(la.trained_likelihood.check_targets, y)
    with la._prepared(), torch.enable_grad(), inspected(la.model, la.blocks, X, check):
        loss, H = la._curv_closure(X, targets, N=1)
    diagonal = H if isinstance(H, torch.Tensor) and H.ndim == 1 else H.diag()
    for block, part in zip(la.blocks, diagonal.split(la._sizes), strict=True):
        if not torch.isfinite(part).all():
            raise ValueError(f"LoRA layer {block.name}: non-finite curvature")
    return loss, H


def _check_on_one_device(la: Posterior) -> None:
    """Refuse layers on several devices to the host's backends."""
    places = {str(place) for place in (la._device, *(block.device for block in la.blocks))}
    if len(places) > 1 and not issubclass(la._backend_cls, LowRankKronInterface):
        raise NotImplementedError(
            f"{la._backend_cls.__name__} needs the model on one device, not on "
            f'{listed(sorted(places))}: move it, or use hessian_structure="lowrank_kron".'
        )

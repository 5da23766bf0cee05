"""Another posterior of the same kind."""

from __future__ import annotations

from typing import Any

from laplace.baselaplace import KronLaplace
from torch import nn

from laplace_lora_ext.models.posterior import Posterior


def around(la: Posterior, model: nn.Module) -> Any:
    """A posterior of the same class, with the same options, around another model; without a fit."""
    options: dict[str, Any] = {
        "sigma_noise": la.sigma_noise,
        "prior_mean": la.prior_mean,
        "temperature": la.temperature,
        "enable_backprop": la.enable_backprop,
        "dict_key_x": la.dict_key_x,
        "dict_key_y": la.dict_key_y,
        "backend": la._backend_cls,
        "backend_kwargs": la._backend_options,
        "class_token_ids": la.model.class_token_ids,
        "mask_token_id": la.model.mask_token_id,
        "target_modules": sorted({block.lora_layer for block in la.blocks}),
    }
    if isinstance(la, KronLaplace):
        options["damping"] = la.damping
    made: Any = type(la)
    return made(model, la.likelihood, **options)

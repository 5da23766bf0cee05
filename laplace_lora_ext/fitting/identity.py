"""Tells fits apart: sums are only added, and states only loaded, where they belong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from laplace_lora_ext.models.adapter_state import fingerprint
from laplace_lora_ext.models.model_state import ModelState
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.models.weights import flattened

_KEYS = {"cls_name", "likelihood", "settings", "model", "mean", "H", "loss", "n_data", "n_outputs"}
_KEYS |= {"prior_mean", "prior_precision", "sigma_noise", "temperature", "enable_backprop"}


def hashes(la: Posterior) -> dict[str, str]:
    """What a fit started now would be of: runs add up their sums only if their hashes agree."""
    kind = type(la).__name__, la.likelihood, la._dtype
    return {
        "LoRA weights": fingerprint(la.blocks),
        "base or head": ModelState.of(la.model, la.blocks).digest(),
        "settings": repr((*kind, la.model.class_token_ids, la._settings())),
    }


def check_state(la: Posterior, state: Mapping[str, Any]) -> None:
    """Refuse a state that belongs to another posterior, and name what differs."""
    missing = _KEYS - state.keys()
    if missing:
        raise ValueError(f"This is not the state of a posterior: it lacks {sorted(missing)}.")
    for name, own in (("cls_name", type(la).__name__), ("likelihood", la.likelihood)):
        if state[name] != own:
            raise ValueError(
                f"The state is of a posterior with {name}={state[name]!r}, not {own!r}."
            )
    fitted = ModelState.from_state_dict(state["model"])
    difference = fitted.difference(ModelState.of(la.model, la.blocks))
    if difference is not None:
        raise ValueError(f"The posterior was fitted to another model. {difference}.")
    for name, value in la._settings().items():
        before = state["settings"].get(name)
        if before != value:
            raise ValueError(
                f"The posterior was fitted with {name}={before!r}, not {value!r}: pass the "
                "same setting."
            )
    mean, weights = state["mean"], flattened(la.blocks, la._device)
    if mean.dtype != weights.dtype:
        raise ValueError(
            f"The posterior is in {mean.dtype}, but the model's LoRA weights need "
            f"{weights.dtype}: load them in the precision of the fit."
        )
    if not torch.equal(mean.to(weights), weights):
        raise ValueError(
            "The posterior was fitted around other LoRA weights than the model has now: load "
            "the adapter of the fit."
        )

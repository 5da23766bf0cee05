"""Tells fits apart: sums are only added, and states only loaded, where they belong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from laplace_lora_ext.models.adapter_state import fingerprint
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import Block
from laplace_lora_ext.models.model_state import ModelState
from laplace_lora_ext.models.weights import flattened

_KEYS = {"cls_name", "likelihood", "settings", "model", "mean", "H", "loss", "n_data", "n_outputs"}
_KEYS |= {"prior_mean", "prior_precision", "sigma_noise", "temperature", "enable_backprop"}


@dataclass(frozen=True)
class Identity:
    """A posterior's class, likelihood and settings, and its model as it is now.

    Attributes
    ----------
    cls_name, likelihood : str
    settings : dict
        the curvature's backend and its options
    model : LogitsModel
    blocks : list of Block
    """

    cls_name: str
    likelihood: str
    settings: dict[str, Any]
    model: LogitsModel
    blocks: list[Block]

    def hashes(self) -> dict[str, str]:
        """Hashes that runs must share so that their sums can be added."""
        kind = self.cls_name, self.likelihood, self.blocks[0].statistics_dtype
        return {
            "LoRA weights": fingerprint(self.blocks),
            "base or head": ModelState.of(self.model, self.blocks).digest(),
            "settings": repr((*kind, self.model.class_token_ids, self.settings)),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that does not belong here.

        Raises
        ------
        ValueError
            The message names what differs.
        """
        missing = _KEYS - state.keys()
        if missing:
            raise ValueError(f"This is not the state of a posterior: it lacks {sorted(missing)}.")
        for name in ("cls_name", "likelihood"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"The state is of a posterior with {name}={state[name]!r}, not "
                    f"{getattr(self, name)!r}."
                )
        fitted = ModelState.from_state_dict(state["model"])
        difference = fitted.difference(ModelState.of(self.model, self.blocks))
        if difference is not None:
            raise ValueError(f"The posterior was fitted to another model. {difference}.")
        for name, value in self.settings.items():
            before = state["settings"].get(name)
            if before != value:
                raise ValueError(
                    f"The posterior was fitted with {name}={before!r}, not {value!r}: pass the "
                    "same setting."
                )
        mean, weights = state["mean"], flattened(self.blocks)
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

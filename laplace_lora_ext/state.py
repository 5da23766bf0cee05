"""A posterior as a dictionary, and back."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from laplace.baselaplace import ParametricLaplace

from laplace_lora_ext.fitting.moving import follow
from laplace_lora_ext.models.locks import exclusive
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.models.same_model import ModelState
from laplace_lora_ext.models.weights import flattened
from laplace_lora_ext.predictive.amortized import LearntVariance

_KEYS = {"cls_name", "likelihood", "settings", "model", "mean", "H", "loss", "n_data", "n_outputs"}
_KEYS |= {"prior_mean", "prior_precision", "sigma_noise", "temperature", "enable_backprop"}


@exclusive
def state_dict(la: Posterior) -> dict[str, Any]:
    """The host's state, with settings and a description of the model.

    It holds tensors, numbers and text alone, in dictionaries and lists.
    """
    host: Any = ParametricLaplace.state_dict
    state = host(la)  # refuses a posterior without a fit
    model = la._fitted.state_dict()
    learnt = la.learnt_variance and dict(vars(la.learnt_variance))
    own = {"H": la._packed(la._kept), "settings": la._settings(), "model": model}
    return state | own | {"learnt_variance": learnt}


@exclusive
def load_state_dict(la: Posterior, state_dict: dict[str, Any]) -> None:
    """Restore a posterior that was fitted around the model's present weights.

    Raises
    ------
    ValueError
        If its class, likelihood, model or settings are not these. The message names what
        differs, and nothing changes.
    """
    _check_state(la, state_dict)
    loaded: Any = copy(la)  # which an error leaves behind
    loaded.prior_precision = state_dict["prior_precision"]
    ParametricLaplace.load_state_dict(loaded, state_dict)
    loaded._keep(loaded._unpacked(state_dict["H"]))
    loaded._places = []  # wherever the state's tensors are
    follow(loaded)
    loaded._fitted = ModelState.of(la.model, la.blocks)
    loaded._posterior_scale = None
    learnt = state_dict.get("learnt_variance")
    loaded.learnt_variance = learnt and LearntVariance(**learnt).to(la._device, la._dtype)
    vars(la).update(vars(loaded))


def _check_state(la: Posterior, state: Mapping[str, Any]) -> None:
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

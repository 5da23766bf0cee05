"""A posterior as a dictionary, and back."""

from __future__ import annotations

from copy import copy
from typing import Any

from laplace.baselaplace import ParametricLaplace

from laplace_lora_ext.fitting.identity import check_state
from laplace_lora_ext.fitting.moving import follow
from laplace_lora_ext.models.locks import exclusive
from laplace_lora_ext.models.model_state import FittedModel
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.predictive.amortized import LearntVariance


@exclusive
def state_dict(la: Posterior) -> dict[str, Any]:
    """The host's state, with settings and a description of the model.

    It holds tensors, numbers and text alone, in dictionaries and lists.
    """
    host: Any = ParametricLaplace.state_dict
    state = host(la)  # refuses a posterior without a fit
    model = la._fitted.state.state_dict()
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
    check_state(la, state_dict)
    loaded: Any = copy(la)  # which an error leaves behind
    loaded.prior_precision = state_dict["prior_precision"]
    ParametricLaplace.load_state_dict(loaded, state_dict)
    loaded._keep(loaded._unpacked(state_dict["H"]))
    loaded._places = []  # wherever the state's tensors are
    follow(loaded)
    loaded._fitted = FittedModel(la.model, la.blocks)
    loaded._posterior_scale = None
    learnt = state_dict.get("learnt_variance")
    loaded.learnt_variance = learnt and LearntVariance(**learnt).to(la._device, la._dtype)
    vars(la).update(vars(loaded))

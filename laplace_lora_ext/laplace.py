"""Makes a Laplace approximation: by the host's factory, or from files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, overload

import laplace
from torch import nn

from laplace_lora_ext.lora_laplace import LoRALaplace
from laplace_lora_ext.messages import check_name
from laplace_lora_ext.models.logits_model import find_transformer
from laplace_lora_ext.models.same_model import ModelState
from laplace_lora_ext.saving import read_state
from laplace_lora_ext.structures import (
    DiagLoRALaplace,
    FullLoRALaplace,
    KronLoRALaplace,
    LowRankKronLoRALaplace,
)
from laplace_lora_ext.tasks import LIKELIHOOD_OF
from laplace_lora_ext.tasks.token_labels import TOKEN_CLASSIFICATION

_CLASSES = (LowRankKronLoRALaplace, KronLoRALaplace, DiagLoRALaplace, FullLoRALaplace)


@overload
def Laplace(
    model: nn.Module,
    likelihood: str | None = None,
    subset_of_weights: Literal["lora"] = "lora",
    hessian_structure: Literal["lowrank_kron"] = "lowrank_kron",
    **options: Any,
) -> LowRankKronLoRALaplace: ...
@overload
def Laplace(
    model: nn.Module,
    likelihood: str | None = None,
    subset_of_weights: Literal["lora"] = "lora",
    hessian_structure: str = "lowrank_kron",
    **options: Any,
) -> LoRALaplace: ...
def Laplace(  # noqa: N802
    model: nn.Module,
    likelihood: str | None = None,
    subset_of_weights: str = "lora",
    hessian_structure: str = "lowrank_kron",
    **options: Any,
) -> Any:
    """Make a posterior over LoRA weights as `laplace.Laplace` does.

    The likelihood is optional.

    Parameters
    ----------
    model : torch.nn.Module
        a `PeftModel`, or any module that holds plain LoRA layers
    likelihood : str, optional
        "classification", "regression", "multi_label_classification" (also for a single
        logit of two classes), "token_classification", "reward_modeling" or
        "language_modeling". If omitted: classification with `class_token_ids` or
        `class_texts`, "token_classification" for a model of that kind, otherwise what
        the transformers configuration says (`problem_type`, or `num_labels`: one means
        regression, more mean classification)
    subset_of_weights : str, default="lora"
        as for `laplace.Laplace`, which has other classes for other weights
    hessian_structure : {"lowrank_kron", "kron", "diag", "full"}
        the curvature; "lowrank_kron" by default
    **options
        for the class that these two select

    Returns
    -------
    LoRALaplace
        of the structure's class; `from_pretrained` returns it fitted

    Raises
    ------
    ValueError
        If the likelihood can't be read off the model.
    """
    if likelihood is None:
        likelihood = "classification" if has_answers(options) else _likelihood_of(model)
    if subset_of_weights == "lora":
        structures = [cls._key[1] for cls in _CLASSES]
        check_name("hessian_structure", hessian_structure, structures)
    return laplace.Laplace(
        model, likelihood, subset_of_weights, hessian_structure, **options
    )


def from_pretrained(model: nn.Module, folder: str | Path, **kwargs: Any) -> LoRALaplace:
    """Load a posterior that `save_pretrained` wrote, around a model's present weights.

    Parameters
    ----------
    model : torch.nn.Module
        the fitted model, with its adapter, head and base
    folder : str or Path
        with the posterior's file
    **kwargs
        for the posterior's class, such as `dict_key_y`

    Returns
    -------
    LoRALaplace
        of the structure's class; `from_pretrained` returns it fitted

    Raises
    ------
    FileNotFoundError
        If the folder holds no posterior.
    ValueError
        If the file is damaged, or the model is not the fitted one. The message says
        which.
    """
    state = read_state(folder)
    fitted = ModelState.from_state_dict(state["model"])
    kept = ("likelihood", "prior_mean", "temperature", "enable_backprop")
    options = {name: state[name] for name in kept} | {
        "class_token_ids": fitted.class_token_ids,
        "mask_token_id": fitted.mask_token_id,
        "normalised": fitted.normalised,
        "weight_names": list(fitted.blocks),
        "backend_kwargs": state["settings"],
    }
    classes = {cls.__name__: cls for cls in _CLASSES}
    la = classes[state["cls_name"]](model, **options | kwargs)
    la.load_state_dict(state)
    return la


def has_answers(options: Mapping[str, Any]) -> bool:
    """Tell whether options of a Laplace class say what a language model answers."""
    return any(
        options.get(name) is not None for name in ("class_token_ids", "class_texts")
    )


def _likelihood_of(model: nn.Module) -> str:
    transformer = find_transformer(model)
    if transformer is None:
        raise ValueError(
            "Pass the likelihood: the model has no transformers configuration."
        )
    if transformer.can_generate():
        raise ValueError(
            "Pass the likelihood, or class_token_ids, the tokens of the answers, or "
            "class_texts."
        )
    if type(transformer).__name__.endswith("ForTokenClassification"):
        return TOKEN_CLASSIFICATION.name
    config = transformer.config
    by_number = (
        "regression" if config.num_labels == 1 else "single_label_classification"
    )
    problem_type = getattr(config, "problem_type", None) or by_number
    if problem_type not in LIKELIHOOD_OF:
        raise ValueError(f"No likelihood fits problem_type {problem_type!r}: pass one.")
    return LIKELIHOOD_OF[problem_type]

"""The host's factory, with a likelihood that is read off the model where it is left out."""

from __future__ import annotations

from typing import Any

import laplace
from laplace.baselaplace import BaseLaplace
from torch import nn

from laplace_lora_ext.models.logits_model import find_transformer

_LIKELIHOODS = {
    "single_label_classification": "classification",
    "regression": "regression",
}


def Laplace(  # noqa: N802
    model: nn.Module, likelihood: str | None = None, *args: Any, **kwargs: Any
) -> BaseLaplace:
    """`laplace.Laplace`, with the likelihood optional.

    Parameters
    ----------
    model : torch.nn.Module
    likelihood : {"classification", "regression", "reward_modeling"}, optional
        If omitted: classification where `class_token_ids` are given; else what the transformers
        configuration says (`problem_type`, or `num_labels`: regression for one, classification
        for more).
    *args, **kwargs
        of `laplace.Laplace`, such as `subset_of_weights="lora"` and
        `hessian_structure="lowrank_kron"`, and of the class that they select

    Returns
    -------
    BaseLaplace

    Raises
    ------
    ValueError
        If the likelihood can't be read off the model.
    """
    if likelihood is None:
        likelihood = "classification" if kwargs.get("class_token_ids") else _likelihood_of(model)
    return laplace.Laplace(model, likelihood, *args, **kwargs)


def _likelihood_of(model: nn.Module) -> str:
    transformer = find_transformer(model)
    if transformer is None:
        raise ValueError("Name the likelihood: the model has no transformers configuration.")
    if transformer.can_generate():
        raise ValueError("Pass class_token_ids, the tokens of the answers, or the likelihood.")
    config = transformer.config
    problem_type = getattr(config, "problem_type", None)
    if problem_type is None:
        return "regression" if config.num_labels == 1 else "classification"
    if problem_type not in _LIKELIHOODS:
        raise ValueError(f"No likelihood for problem_type {problem_type!r}; name one.")
    return _LIKELIHOODS[problem_type]

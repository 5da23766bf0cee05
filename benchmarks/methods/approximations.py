"""Laplace approximations over LoRA weights: this library's, and laplace-torch's own."""

from functools import partial
from typing import Any

import torch
from laplace import Laplace

import laplace_lora_ext
from benchmarks.models import AdaptedModel


def over_lora(model: AdaptedModel, structure: str = "lowrank_kron", **keywords: Any) -> Any:
    """A structure of the curvature, this library's or the host's, through this library's class."""
    tokens = model.class_token_ids
    what: Any = (model.model, "classification", "lora", structure)
    return laplace_lora_ext.Laplace(*what, class_token_ids=tokens, **keywords)


of_paper = partial(over_lora, backend_kwargs=laplace_lora_ext.PAPER_SETTINGS)


def of_last_layer(model: AdaptedModel) -> Any:
    """LLLA: the output layer of a language model, the last transformer layer of an encoder."""
    if model.class_token_ids is not None:
        return over_lora(model, target_modules=["lm_head"])
    return over_lora(model, layers_to_transform=_layers(model)[-1:])


def of_first_half(model: AdaptedModel) -> Any:
    layers = _layers(model)
    return over_lora(model, layers_to_transform=layers[: len(layers) // 2])


def with_mean_at_start(model: AdaptedModel) -> Any:
    """A prior around the LoRA weights before training, and not around 0."""
    la = over_lora(model)
    names = {id(p): name for name, p in model.model.named_parameters()}
    start = (model.initial[names[id(block.weight)]] for block in la.blocks)
    la.prior_mean = torch.cat([weight.flatten() for weight in start])
    return la


def stock(model: AdaptedModel, structure: str, **keywords: Any) -> Any:
    """laplace-torch's own class over all that requires a gradient, which are the LoRA weights."""
    model.model.requires_grad_(False)
    for weight in model.lora_weights:
        weight.requires_grad_(True)
    return Laplace(model.logits_model, "classification", "all", structure, **keywords)


def stock_with_asdl(model: AdaptedModel) -> Any:
    """laplace-torch's KFAC with the backend ASDL."""
    from laplace.curvature.asdl import AsdlGGN

    return stock(model, "kron", backend=AsdlGGN)


def _layers(model: AdaptedModel) -> list[int]:
    config: Any = model.model.config
    return list(range(config.num_hidden_layers))

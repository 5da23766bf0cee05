"""Methods that fit training batches: Laplace approximations and rivals."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from laplace import Laplace, ParametricLaplace
from torch import Tensor

import laplace_lora_ext
from benchmarks.models import AdaptedModel
from laplace_lora_ext import LoRALaplace, LowRankKronLoRALaplace
from laplace_lora_ext.mixture import LaplaceMixture
from laplace_lora_ext.models.adapters import find_peft_model
from laplace_lora_ext.tasks.classification import CLASSIFICATION

# What a posterior predicts with unless an experiment compares links. It is right for
# two classes as for many: "probit" is less doubtful than it should be of two.
LINK = "mean_field"


def over_lora(model: AdaptedModel, structure: str, **keywords: Any) -> LoRALaplace:
    """Make our class over LoRA weights, with one of our or the host's structures."""
    return laplace_lora_ext.Laplace(
        model.model,
        "classification",
        subset_of_weights="lora",
        hessian_structure=structure,
        class_token_ids=model.class_token_ids,
        **keywords,
    )


def lowrank_kron(model: AdaptedModel, **keywords: Any) -> LowRankKronLoRALaplace:
    """Make the posterior that this library is about."""
    la = over_lora(model, "lowrank_kron", **keywords)
    assert isinstance(la, LowRankKronLoRALaplace)
    return la


of_paper = partial(lowrank_kron, backend_kwargs=laplace_lora_ext.PAPER_SETTINGS)


def of_last_layer(model: AdaptedModel) -> LowRankKronLoRALaplace:
    """Make LLLA: the output layer's LoRA weights, or the last layer's."""
    peft_model = find_peft_model(model.model)
    if any(".lm_head.lora_" in name for name, _ in peft_model.named_parameters()):
        return lowrank_kron(model, target_modules=["lm_head"])
    last_layer = peft_model.config.num_hidden_layers - 1
    return lowrank_kron(model, layers_to_transform=[last_layer])


def of_head(model: AdaptedModel) -> LowRankKronLoRALaplace:
    """Make last-layer Laplace: over an encoder's head alone, without LoRA weights."""
    everything = lowrank_kron(model, modules_to_save=True)
    names = [block.known_as for block in everything.blocks if block.kind == "head"]
    return lowrank_kron(model, weight_names=names)


def stock(model: AdaptedModel, structure: str, **keywords: Any) -> ParametricLaplace:
    """Make laplace-torch's own class over all that requires a gradient."""
    # An encoder's head stays at its MAP value, as in our classes.
    model.model.requires_grad_(False)
    for weight in model.lora_weights:
        weight.requires_grad_(True)
    la = Laplace(
        model.logits_model,
        "classification",
        subset_of_weights="all",
        hessian_structure=structure,
        **keywords,
    )
    assert isinstance(la, ParametricLaplace)
    return la


def probabilities(
    la: LoRALaplace | LaplaceMixture, x: Any, link: str, **options: Any
) -> Tensor:
    """Compute class probabilities on the CPU, of a batch or of moments."""
    predicted = la(x, link_approx=link, **options)
    assert isinstance(predicted, Tensor)  # numbers have two: mean and variance
    return predicted.detach().cpu()


class BareLoops:
    """The passes that any rival needs: C for a fit, C + 1 for a prediction.

    With learnt variances a prediction is one forward pass.
    """

    def __init__(self, model: AdaptedModel) -> None:
        self._model = model
        self._weights = model.lora_weights

    def fit(self, batches: Iterable[Any]) -> None:
        """Take the passes of the exact Fisher."""
        for batch in batches:
            logits = self._model.logits_model(batch)
            seeds = CLASSIFICATION.exact_seeds(logits.detach()).vectors
            self._differentiate(logits, seeds)

    def amortize(self, batches: Iterable[Any]) -> None:
        """Learn nothing: there are no variances."""

    def __call__(self, batch: Any, pred_type: str = "glm", **_: Any) -> Tensor:
        """Take the passes of a prediction; the probabilities are the model's own."""
        if pred_type == "amortized":
            with torch.no_grad():
                return self._model.logits_model(batch).softmax(-1)
        logits = self._model.logits_model(batch)
        n_texts, n_classes = logits.shape
        identity = torch.eye(n_classes, device=logits.device)
        # Seed c is the same for all texts: the derivative of each one's logit of class
        # c.
        seeds = identity[:, None].expand(n_classes, n_texts, n_classes)
        self._differentiate(logits, seeds)
        return logits.detach().softmax(-1)

    def _differentiate(self, logits: Tensor, seeds: Tensor) -> None:
        """Take a backward pass for each seed; the last one frees the graph."""
        for number, seed in enumerate(seeds, start=1):
            torch.autograd.grad(
                logits, self._weights, seed, retain_graph=number < len(seeds)
            )

    def state_dict(self) -> dict[str, Any]:
        """Return a state without a curvature, of which tables show the size."""
        return {"H": ()}

"""Methods that are fitted on training batches: Laplace approximations and their rivals."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from laplace import Laplace

import laplace_lora_ext
from benchmarks.models import AdaptedModel
from laplace_lora_ext.likelihoods import Classification


def over_lora(model: AdaptedModel, structure: str = "lowrank_kron", **keywords: Any) -> Any:
    """Our class over LoRA weights, with one of its own structures or the host's."""
    tokens = model.class_token_ids
    what: Any = (model.model, "classification", "lora", structure)
    return laplace_lora_ext.Laplace(*what, class_token_ids=tokens, **keywords)


of_paper = partial(over_lora, backend_kwargs=laplace_lora_ext.PAPER_SETTINGS)


def of_last_layer(model: AdaptedModel) -> Any:
    """LLLA: the output layer if it has LoRA weights, or the last transformer layer."""
    adapter: Any = model.model
    if "lm_head" in adapter.peft_config["default"].target_modules:
        return over_lora(model, target_modules=["lm_head"])
    config: Any = model.model.config
    return over_lora(model, layers_to_transform=[config.num_hidden_layers - 1])


def stock(model: AdaptedModel, structure: str, **keywords: Any) -> Any:
    """laplace-torch's own class over all that requires a gradient, which are the LoRA weights."""
    model.model.requires_grad_(False)
    for weight in model.lora_weights:
        weight.requires_grad_(True)
    return Laplace(model.logits_model, "classification", "all", structure, **keywords)


class BareLoops:
    """The passes without which no rival could do: C a batch for a fit, C + 1 for a prediction.

    With learnt variances a prediction is one forward pass.
    """

    def __init__(self, model: AdaptedModel) -> None:
        self._model = model
        self._weights = model.lora_weights

    def fit(self, batches: Iterable[Any]) -> None:
        for batch in batches:
            logits = self._model.logits_model(batch)
            seeds = Classification().exact_seeds(logits.detach()).vectors
            self._differentiate(logits, seeds)

    def amortize(self, batches: Iterable[Any]) -> None:
        """There is nothing to learn."""

    def __call__(self, batch: Any, pred_type: str = "glm", **_: Any) -> torch.Tensor:
        with torch.set_grad_enabled(pred_type == "glm"):
            logits = self._model.logits_model(batch)
        if pred_type == "amortized":
            return logits.softmax(-1)
        identity = torch.eye(logits.shape[1], device=logits.device)
        self._differentiate(logits, identity[:, None].expand(-1, len(logits), -1))
        return logits.detach().softmax(-1)

    def _differentiate(self, logits: torch.Tensor, seeds: torch.Tensor) -> None:
        for number, seed in enumerate(seeds, start=1):
            torch.autograd.grad(logits, self._weights, seed, retain_graph=number < len(seeds))

    def state_dict(self) -> dict[str, Any]:
        return {"H": ()}

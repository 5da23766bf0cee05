"""The network itself with drawn LoRA weights."""

from __future__ import annotations

from typing import Any

import torch

from laplace_lora_ext.messages import check_counts
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.models.weights import Values, called_with, check_in_place
from laplace_lora_ext.predictive.moments import Moments


def drawn_weights(la: Posterior, generator: torch.Generator | None) -> Values:
    """One draw of the LoRA weights."""
    check_in_place(la.blocks, "A draw of the weights")
    weights = [block.weight for block in la.blocks]
    parts = la.sample(1, generator)[0].split([weight.numel() for weight in weights])
    return [part.reshape(w.shape).to(w) for part, w in zip(parts, weights, strict=True)]


def functional_samples(
    la: Posterior,
    X: Any,
    n_samples: int = 100,
    generator: torch.Generator | None = None,
    **model_kwargs: Any,
) -> torch.Tensor:
    """Logits `(S, B, C)` under draws of the weights."""
    if isinstance(X, Moments):
        raise ValueError('Moments hold no inputs: pass these for pred_type="nn".')
    check_counts(n_samples=n_samples)
    la.check_model()
    found = []
    for _ in range(n_samples):
        drawn = drawn_weights(la, generator)
        with la.model.prepared(), torch.set_grad_enabled(la.enable_backprop):
            found.append(called_with(la.model, la.blocks, drawn, X, **model_kwargs))
    return torch.stack(found)


def mean_probabilities(la: Posterior, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Mean over draws of the weights of the softmax probabilities, `(B, C)`."""
    return functional_samples(la, *args, **kwargs).softmax(-1).mean(0)

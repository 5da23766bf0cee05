"""Draws of the posterior as LoRA weights, the same ones whenever asked, and losses under them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from laplace_lora_ext.messages import naming
from laplace_lora_ext.models.batches import named_batches
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.models.weights import Values
from laplace_lora_ext.predictive.networks import drawn_weights
from laplace_lora_ext.processes.exchange import gathered


def drawn(la: Posterior, n_samples: int, seed: int) -> Iterator[Values]:
    """LoRA weights of each draw, under any prior precision from the noise of the same seed."""
    la.check_model()
    generator = torch.Generator(la.model.device).manual_seed(seed)
    return (drawn_weights(la, generator) for _ in range(n_samples))


def mean_over_tokens(
    la: Posterior, batches: Iterable[Any], numbers_of: Callable[[Any], torch.Tensor]
) -> tuple[float, int]:
    """The mean of batches' numbers `(N,)` over all tokens and processes, and how many texts.

    Raises
    ------
    ValueError
        If there are no batches.
    """
    total, n_tokens, n_texts = 0.0, 0, 0
    for name, batch in named_batches(batches):
        with naming(name), la.model.prepared():
            numbers = numbers_of(batch)
        total += numbers.double().sum().item()
        n_tokens += len(numbers)
        n_texts += len(batch[la.model.dict_key_y])
    of_ranks = gathered((total, n_tokens, n_texts))
    total, n_tokens, n_texts = (sum(numbers) for numbers in zip(*of_ranks, strict=True))
    if not n_tokens:
        raise ValueError("The loader has no data.")
    return total / n_tokens, n_texts

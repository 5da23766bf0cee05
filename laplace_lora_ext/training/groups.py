"""Groups of like examples, of each of which some are held out."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from laplace_lora_ext.predictive.data_sets import over_loader
from laplace_lora_ext.training.trainers import same_random_states


def groups_of(la: Any, loader: DataLoader, held_out: float) -> torch.Tensor:
    """Groups `(N,)` of a loader's examples: their classes, or quantiles of their targets.

    There is one group alone where `la` reads texts without a class, and where examples of the data
    set are whole batches. The loader gives each example once and in order.
    """
    n_examples = len(loader.dataset)  # pyright: ignore[reportArgumentType]
    alike = torch.zeros(n_examples, dtype=torch.long)
    if la.likelihood == "language_modeling":
        return alike
    with same_random_states():
        (targets,) = over_loader(loader, lambda batch: (la.model.split(batch)[1].cpu(),))
    return la.trained_likelihood.groups(targets, held_out) if len(targets) == n_examples else alike

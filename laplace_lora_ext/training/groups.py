"""Finds which examples are alike, so that some of each kind are held out."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch
from torch.utils.data import DataLoader

from laplace_lora_ext.predictive.data_sets import Columns, over_loader
from laplace_lora_ext.training.trainers import same_random_states


def groups_of(
    la: Any,
    loader: DataLoader,
    held_out: float,
) -> torch.Tensor:
    """Number the groups `(N,)` of a loader's examples: their classes, or quantiles of targets.

    The loader gives each example once and in order.
    """
    assert isinstance(loader.dataset, Sized)  # `check_divisible` has refused others
    n_examples = len(loader.dataset)
    one_group = torch.zeros(n_examples, dtype=torch.long)
    if la.problem.writes:
        return one_group  # texts have no class

    def targets_of(batch: Any) -> Columns:
        _, targets = la.model.split(batch)
        return (targets.cpu(),)

    with same_random_states():
        (targets,) = over_loader(loader, targets_of)
    # What is held out is whole examples of the data set, and these may be whole batches.
    if len(targets) != n_examples:
        return one_group
    return la.trained_likelihood.groups(targets, held_out)

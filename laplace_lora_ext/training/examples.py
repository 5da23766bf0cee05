"""The examples of a training: batches of any of them, and which of them are alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from laplace_lora_ext.predictive.data_sets import Columns, over_loader
from laplace_lora_ext.processes.shards import in_order, in_order_like, own_examples
from laplace_lora_ext.training.trainers import (
    check_trainer,
    loader_of,
    same_random_states,
)


@dataclass(frozen=True)
class Examples:
    """All examples of a training, and how some of them become batches.

    Attributes
    ----------
    loader : DataLoader
        of all; examples of the data set that its sampler leaves out are not used
    batches : callable
        loads given examples as for a fit, each once and in order
    """

    loader: DataLoader
    batches: Callable[[Any], DataLoader]

    @classmethod
    def of_trainer(cls, trainer: Any) -> Examples:
        """Take a trainer's; refuse one that can't train again (`ValueError`)."""
        check_trainer(trainer)
        # The data set itself has the columns that a trainer asks for.
        return cls(in_order(trainer.train_dataset, 1), partial(loader_of, trainer))

    @classmethod
    def of_loader(cls, loader: DataLoader) -> Examples:
        """Take a loader's, with its collator and the size of its batches."""
        return cls(loader, partial(in_order_like, loader))

    @property
    def all(self) -> Any:
        """Return the data set of all examples."""
        return own_examples(self.loader)

    def groups(self, la: Any, held_out: float) -> Tensor:
        """Number examples' groups `(N,)`: classes, or quantiles of targets."""
        everything = self.all
        one_group = torch.zeros(len(everything), dtype=torch.long)
        if la.task.has_tokens:
            return one_group  # texts have no class

        def targets_of(batch: Any) -> Columns:
            _, targets = la.model.split(batch)
            return (targets.cpu(),)

        with same_random_states():
            (targets,) = over_loader(self.batches(everything), targets_of)
        # What is held out is whole examples of the data set, and these may be whole
        # batches.
        if len(targets) != len(everything):
            return one_group
        return la.task.groups(targets, held_out)

"""A fifth of the training texts, held out to choose what training texts can't tell."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import laplace_lora_ext
from benchmarks.fine_tuning import TRAIN, Pretrained
from benchmarks.methods.method import labels_of
from benchmarks.models import AdaptedModel
from benchmarks.report import say
from benchmarks.training import Records
from laplace_lora_ext import LowRankKronLoRALaplace
from laplace_lora_ext.processes.shards import divide

# The same for every method, ours and rivals, that wants labels to choose by.
HELD_OUT = 0.2
HELD = "held-out texts"  # the name of their data set


class Split(NamedTuple):
    """Training texts: those that are trained on, and those that are held out."""

    rest: Records
    held: Records


def held_out(pretrained: Pretrained) -> Split:
    """Hold out a fifth of each class, so that none is missing where there are few."""
    records = pretrained.data[TRAIN]
    batches = pretrained.loader(records)
    (division,) = divide(batches, HELD_OUT, labels_of(records))
    return Split(list(division.rest), list(division.held))


def last_held_out(pretrained: Pretrained) -> Split:
    """Hold out the last fifth, of texts that have no one class to be divided by."""
    records = pretrained.data[TRAIN]  # in an order that the seed has drawn
    n_rest = len(records) - math.ceil(HELD_OUT * len(records))
    return Split(records[:n_rest], records[n_rest:])


@dataclass(frozen=True)
class TrainedTwice:
    """A training without the fifth, which chooses for it, and one on all texts.

    What is chosen for the first model is used for the final one: that knows every text,
    so that none is left to choose for it.
    """

    pretrained: Pretrained
    likelihood: str
    split: Split
    first: AdaptedModel
    final: AdaptedModel

    @classmethod
    def by(
        cls,
        train: Callable[[Records], AdaptedModel],
        pretrained: Pretrained,
        likelihood: str,
        seed: int,
    ) -> "TrainedTwice":
        """Train both models."""
        split = last_held_out(pretrained)
        say(pretrained.options, f"Seed {seed}: training without a fifth")
        first = train(split.rest)
        say(pretrained.options, f"Seed {seed}: training on all")
        final = train(pretrained.data[TRAIN])
        return cls(pretrained, likelihood, split, first, final)

    def posterior(self, with_head: bool) -> LowRankKronLoRALaplace:
        """Fit a posterior around the final model, with what the fifth chooses."""
        chosen = self._fitted(self.first, self.split.rest, with_head)
        held = self.pretrained.loader(self.split.held)
        chosen.optimize_prior_precision(method="gridsearch", val_loader=held)
        la = self._fitted(self.final, self.pretrained.data[TRAIN], with_head)
        la.hyperparameters = chosen.hyperparameters
        return la

    def _fitted(
        self,
        model: AdaptedModel,
        records: Records,
        with_head: bool,
    ) -> LowRankKronLoRALaplace:
        """Fit a posterior to the texts that its model was trained on."""
        la = laplace_lora_ext.Laplace(
            model.model, self.likelihood, modules_to_save=with_head
        )
        show_progress = not self.pretrained.options.quiet
        la.fit(self.pretrained.loader(records), progress_bar=show_progress)
        return la

"""Rounds of an experiment that chooses what to know next, and learns it."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from benchmarks.fine_tuning import Pretrained
from benchmarks.models import AdaptedModel
from benchmarks.training import Recipe, Records, divided_at


@dataclass
class Rounds:
    """What is known so far, and the pool that more of it is chosen from."""

    pretrained: Pretrained
    seed: int
    n: int  # records to choose at a time
    known: Records
    pool: Records

    @property
    def round_seed(self) -> int:
        """Return a seed for what this round draws, which is new in each round."""
        return self.seed + len(self.known)

    def at_random(self) -> list[int]:
        """Choose places in the pool without looking."""
        generator = torch.Generator().manual_seed(self.round_seed)
        order = torch.randperm(len(self.pool), generator=generator)
        return order[: self.n].tolist()

    def learn(self, places: Iterable[int]) -> None:
        """Move records from the pool to what is known, in the order of their places."""
        chosen, self.pool = divided_at(self.pool, places)
        self.known = self.known + chosen

    def train(self, model: AdaptedModel, recipe: Recipe, share: float) -> None:
        """Train a model from where its weights are, for a share of the steps.

        On all that is known, so that nothing that was learnt first is forgotten.
        """
        self.pretrained.train_or_read(
            model.logits_model,
            self.known,
            self.pretrained.hyperparameters.for_share(share),
            self.round_seed,
            recipe,
        )

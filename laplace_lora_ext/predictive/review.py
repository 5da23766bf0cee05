"""Queues: what a model decides alone, and what a person reads first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import betainc, betaincinv
from torch import Tensor

_MOST_LABELS = 100_000


@dataclass(frozen=True, eq=False)
class Review:
    """Divides N texts into those that a model decides alone, and those for a person.

    Attributes
    ----------
    labels : torch.Tensor
        `(N,)`, the decisions: classes of the least expected cost
    doubt : torch.Tensor
        `(N,)`, float64, the expected cost of the decision; without costs, the
        probability that it is wrong
    order : torch.Tensor
        `(N,)`, places of the texts, the most doubtful first
    n_to_read : int
        so many of them are for a person
    accuracy : float
        what was asked for; by `capacity`, what is promised
    costs : torch.Tensor, optional
        `(C,)`, of missing each class
    """

    labels: Tensor
    doubt: Tensor
    order: Tensor
    n_to_read: int
    accuracy: float
    costs: Tensor | None = None

    @property
    def decided(self) -> Tensor:
        """Tell which texts are decided alone, `(N,)`."""
        decided = torch.zeros(len(self.order), dtype=torch.bool)
        decided[self.order[self.n_to_read :]] = True
        return decided

    @property
    def share(self) -> float:
        """Return the share of the texts that is decided alone."""
        return 1 - self.n_to_read / len(self.order)

    @property
    def promise(self) -> float:
        """Return the mean probability that a decision is right; nan if there is none.

        With costs it is 1 minus their mean.
        """
        return 1 - self.doubt[self.decided].mean().item()

    def proof(
        self, probabilities: Tensor, labels: Tensor, confidence: float = 0.9
    ) -> Proof:
        """Decide labelled texts by the same limit of doubt, and count what is right.

        Parameters
        ----------
        probabilities : torch.Tensor
            `(M, C)`, the posterior's
        labels : torch.Tensor
            `(M,)`, of texts that nothing was learnt from
        confidence : float, default=0.9
            of the bound

        Returns
        -------
        Proof
            printed, a sentence
        """
        decisions, doubt = decide(probabilities, self.costs)
        of_decided = self.doubt[self.decided]
        # Without a text that is decided alone, no doubt is small enough.
        limit = of_decided.max().item() if len(of_decided) else -1.0
        is_decided = doubt <= limit
        is_right = decisions == labels.cpu()
        n_right = int((is_right & is_decided).sum())
        return Proof(n_right, int(is_decided.sum()), self.accuracy, confidence)


@dataclass(frozen=True)
class Proof:
    """What labelled texts prove about the accuracy of decisions; printed, a sentence.

    The bound is that of Clopper and Pearson (Biometrika 26, 1934), of one side.

    Attributes
    ----------
    n_right : int
        right answers among those decided alone
    n_decided : int
        labelled texts that would be decided alone
    accuracy : float
        what is to be proven
    confidence : float
        of the bound
    """

    n_right: int
    n_decided: int
    accuracy: float
    confidence: float

    @property
    def at_least(self) -> float:
        """Return the lowest accuracy that the counts do not refute."""
        if not self.n_right:
            return 0.0
        n_wrong = self.n_decided - self.n_right
        return float(betaincinv(self.n_right, n_wrong + 1, 1 - self.confidence))

    @property
    def n_more(self) -> int | None:
        """Count the labels that would prove the accuracy if all of them were right.

        They are of texts that would be decided alone. None if there are too many.
        """
        n_right = self.n_right + np.arange(_MOST_LABELS)
        n_wrong = self.n_decided - self.n_right
        # The same bound, asked the other way round: is it above the accuracy?
        is_proven = betainc(n_right, n_wrong + 1, self.accuracy) <= 1 - self.confidence
        is_proven &= n_right > 0
        return int(is_proven.argmax()) if is_proven.any() else None

    def __str__(self) -> str:
        if not self.n_decided:
            return "Nothing is proven: no labelled text would be decided alone."
        text = (
            f"Of {self.n_decided} labelled texts decided alone {self.n_right} were "
            f"right: at least {self.at_least:.2f} with {self.confidence:.0%} confidence"
        )
        more = self.n_more
        if more == 0:
            return f"{text}, which proves {self.accuracy:.2f}."
        if more is None:
            return f"{text}; no number of labels would prove {self.accuracy:.2f}."
        return f"{text}; {more} more, all right, would prove {self.accuracy:.2f}."


def decide(probabilities: Tensor, costs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the decisions `(N,)` of the least expected cost, and their costs `(N,)`.

    `costs` `(C,)` are of missing each class, 1 by default.
    """
    p = probabilities.detach().double().cpu()
    weighted = p if costs is None else p * costs
    decisions = weighted.argmax(-1)
    # Summed without the decision: 1 minus a probability near 1 would be rounded.
    others = weighted.scatter(-1, decisions[:, None], 0)
    return decisions, others.sum(-1)


def review(
    probabilities: Tensor,
    accuracy: float | None = None,
    capacity: int | None = None,
    costs: Sequence[float] | Tensor | None = None,
) -> Review:
    """Divide texts by their probabilities `(N, C)`, as `Prediction.review`."""
    if (accuracy is None) == (capacity is None):
        raise ValueError("Pass accuracy or capacity, and not both.")
    if accuracy is not None and not 0 <= accuracy <= 1:
        raise ValueError(f"accuracy must be from 0 to 1, not {accuracy}.")
    if capacity is not None and capacity < 0:
        raise ValueError(f"capacity must be 0 or more, not {capacity}.")
    of_classes = (
        None if costs is None else torch.as_tensor(costs, device="cpu").double()
    )
    if of_classes is not None and (
        of_classes.shape != probabilities.shape[1:] or not (of_classes > 0).all()
    ):
        raise ValueError(
            f"costs must be {probabilities.shape[1]} positive numbers, one a class, "
            f"not {of_classes.tolist()}."
        )
    labels, doubt = decide(probabilities, of_classes)
    # Stable, so that equal doubts come out the same each time.
    order = doubt.argsort(descending=True, stable=True)
    if capacity is not None:
        n_to_read = min(capacity, len(order))
        accuracy = 1 - doubt[order[n_to_read:]].mean().item()
    else:
        assert accuracy is not None
        surest_first = doubt[order.flip(0)]
        n_decided = torch.arange(1, len(order) + 1)
        # The mean rises with each text, so that those below the limit come first.
        mean = surest_first.cumsum(0) / n_decided
        n_to_read = int((mean > 1 - accuracy).sum())
    return Review(labels, doubt, order, n_to_read, accuracy, of_classes)

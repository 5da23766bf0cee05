"""Predictions of classes and of numbers, and queues: what a person reads first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import betainc, betaincinv
from torch import Tensor
from torch.distributions import MultivariateNormal

from laplace_lora_ext.predictive.moments import Moments, mix_moments

_MOST_LABELS = 100_000
_HALVINGS = 100  # of an interval, until float64 has no number within


class Prediction(NamedTuple):
    """Predictions for B examples and C classes, with entropies in nats.

    Of K labels for each example, all of these are `(B, K)`: the probability of each
    label, whether it is above one half, and what the draws say of it.

    Attributes
    ----------
    probabilities : torch.Tensor
        `(B, C)`; of tokens `(B, T, C)`, nan at padding, and all else `(B, T)`, with the
        label -100 there
    labels : torch.Tensor
        `(B,)`, the most probable class
    total_entropy : torch.Tensor
        `(B,)`, entropy of the probabilities averaged over draws of the posterior
    aleatoric_entropy : torch.Tensor
        `(B,)`, mean entropy of the draws: doubt that all draws share
    epistemic_entropy : torch.Tensor
        `(B,)`, the difference: mutual information of label and weights, the doubt that
        more training data would reduce; 0 where the posterior has no variance

    References
    ----------
    Depeweg et al., "Decomposition of uncertainty in Bayesian deep learning for
    efficient and risk-sensitive learning", ICML 2018.
    """

    probabilities: Tensor
    labels: Tensor
    total_entropy: Tensor
    aleatoric_entropy: Tensor
    epistemic_entropy: Tensor

    @classmethod
    def of_draws(cls, probabilities: Tensor, drawn: Tensor) -> Prediction:
        """Sum up draws, beside the probabilities of a link.

        Parameters
        ----------
        probabilities : torch.Tensor
            `(..., C)`
        drawn : torch.Tensor
            `(S, ..., C)`, probabilities of each draw
        """
        total = torch.special.entr(drawn.mean(0)).sum(-1)
        aleatoric = torch.special.entr(drawn).sum(-1).mean(0)
        # Between draws that are all the same there is nothing but rounding.
        vary = (drawn != drawn[:1]).any(-1).any(0)
        # Entropy is concave, so only rounding can make the difference negative.
        epistemic = (total - aleatoric).clamp_min(0) * vary
        return cls(probabilities, probabilities.argmax(-1), total, aleatoric, epistemic)

    def review(
        self,
        accuracy: float | None = None,
        capacity: int | None = None,
        costs: Sequence[float] | Tensor | None = None,
    ) -> Review:
        """Divide the texts into those to decide alone, and those for a person.

        Decided alone is the largest set whose mean probability of being right is the
        accuracy, or all but the `capacity` most doubtful ones. The promise is the
        posterior's: `Review.proof` says what labelled texts prove of it.

        Parameters
        ----------
        accuracy : float, optional
            from 0 to 1; with costs, 1 minus the mean cost of a decision
        capacity : int, optional
            how many texts people can read
        costs : sequence of float, optional
            `(C,)`, of missing each class; 1 by default

        Returns
        -------
        Review
            the queue, and what is decided alone

        Raises
        ------
        ValueError
            If neither accuracy nor capacity is given, or both are; for another
            accuracy; and for several labels or labels of tokens.
        """
        if self.labels.ndim != 1:
            raise ValueError(
                "A review divides texts of one class each: of several labels, or of "
                "tokens, take the columns of one."
            )
        if (accuracy is None) == (capacity is None):
            raise ValueError("Pass accuracy or capacity, and not both.")
        check_review(accuracy, costs, self.probabilities.shape[1])
        if costs is not None:
            costs = torch.as_tensor(costs, device="cpu").double()
        labels, doubt = decide(self.probabilities, costs)
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
        return Review(labels, doubt, order, n_to_read, accuracy, costs)


# --- queues --------------------------------------------------------------------------


def check_review(
    accuracy: float | None, costs: Sequence[float] | Tensor | None, n_classes: int
) -> None:
    """Refuse another accuracy or other costs than `Prediction.review` takes."""
    if accuracy is not None and not 0 <= accuracy <= 1:
        raise ValueError(f"accuracy must be from 0 to 1, not {accuracy}.")
    if costs is not None and torch.as_tensor(costs, device="cpu").shape != (n_classes,):
        raise ValueError("costs must be one number for each class.")


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
        what was asked for or, by `capacity`, what is promised; with costs 1 minus the
        mean cost
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

        Raises
        ------
        ValueError
            With costs: labels that are right say nothing of a mean cost.
        """
        if self.costs is not None:
            raise ValueError(
                "Right answers prove an accuracy, and with costs the mean cost is "
                "promised, of which they prove nothing."
            )
        decisions, doubt = decide(probabilities)
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


# --- numbers -------------------------------------------------------------------------


class NumberPrediction(NamedTuple):
    """Predictions of C numbers for each of B examples.

    What is predicted are targets as they will be measured, with their noise: a normal
    distribution, and of a mixture of M posteriors the mean of theirs. A posterior alone
    has M = 1. Rewards have no noise, since nobody measures them.

    Attributes
    ----------
    mean : torch.Tensor
        `(B, C)`
    epistemic_std : torch.Tensor
        `(B, C)`, standard deviation of the model's own outputs under the posterior:
        doubt that more training data would reduce
    total_std : torch.Tensor
        `(B, C)`, standard deviation of targets: the same with the noise
    means : torch.Tensor
        `(B, M, C)`, of each posterior
    covariances : torch.Tensor
        `(B, M, C, C)`, of targets under each posterior, noise included
    """

    mean: Tensor
    epistemic_std: Tensor
    total_std: Tensor
    means: Tensor
    covariances: Tensor

    @classmethod
    def of(
        cls, members: Sequence[Moments], noises: Sequence[Tensor | float]
    ) -> NumberPrediction:
        """Join the moments of each posterior's outputs with the noise of its targets.

        Parameters
        ----------
        members : sequence of Moments
            of the outputs, one for each posterior
        noises : sequence of torch.Tensor or float
            standard deviation of each posterior's, `()`
        """
        means, of_outputs = map(torch.stack, zip(*members, strict=True))
        identity = torch.eye(means.shape[-1]).to(of_outputs)
        of_noise = torch.stack([noise**2 * identity for noise in noises])
        of_targets = of_outputs + of_noise[:, None]
        mean, epistemic = mix_moments(means, of_outputs)
        _, total = mix_moments(means, of_targets)
        return cls(
            mean=mean,
            epistemic_std=_deviations(epistemic),
            total_std=_deviations(total),
            means=means.transpose(0, 1),
            covariances=of_targets.transpose(0, 1),
        )

    @property
    def stds(self) -> Tensor:
        """Compute standard deviations of targets under each posterior, `(B, M, C)`."""
        return _deviations(self.covariances)

    def quantile(self, level: float) -> Tensor:
        """Find numbers `(B, C)` that targets lie below with probability `level`."""
        z = torch.special.ndtri(torch.tensor(level, dtype=torch.float64))
        of_members = self.means + self.stds * z.to(self.means)
        # A mixture's quantile lies between its members'.
        low, high = of_members.aminmax(dim=1)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            # The probability that targets lie below the middle.
            standardised = (middle[:, None] - self.means) / self.stds
            is_below = torch.special.ndtr(standardised).mean(1) < level
            low = torch.where(is_below, middle, low)
            high = torch.where(is_below, high, middle)
        return (low + high) / 2

    def interval(self, coverage: float = 0.9) -> tuple[Tensor, Tensor]:
        """Find bounds `(B, C)` that hold targets with probability `coverage`.

        As many lie below as above.
        """
        outside = (1 - coverage) / 2
        return self.quantile(outside), self.quantile(1 - outside)

    def log_density(self, targets: Tensor) -> Tensor:
        """Compute the log-density `(B,)` of targets `(B, C)`, in nats.

        It is that of all C numbers together.
        """
        normal = MultivariateNormal(self.means, self.covariances, validate_args=False)
        log_densities = normal.log_prob(targets[:, None])
        return log_densities.logsumexp(1) - math.log(log_densities.shape[1])

    def crps(self, targets: Tensor) -> Tensor:
        """Compute the continuous ranked probability score `(B, C)` of targets `(B, C)`.

        It is `∫ (F(x) - [x ≥ y])² dx` with the distribution function F, in the targets'
        own unit: the absolute error of a prediction that is sure.

        References
        ----------
        Grimit, Gneiting, Berrocal & Johnson, "The continuous ranked probability score
        for circular variables and its application to mesoscale forecast ensemble
        verification", Quarterly Journal of the Royal Meteorological Society 132 (2006),
        for mixtures.
        """
        means, stds = self.means, self.stds
        to_target = _mean_distance(means - targets[:, None], stds).mean(1)
        apart = means[:, :, None] - means[:, None]
        of_both = torch.hypot(stds[:, :, None], stds[:, None])
        between = _mean_distance(apart, of_both).mean((1, 2))
        return to_target - between / 2


def _mean_distance(mean: Tensor, std: Tensor) -> Tensor:
    """Compute the mean absolute value of a normal variable."""
    z = mean / std
    unscaled = (-z.square() / 2).exp()
    density = unscaled / math.sqrt(2 * math.pi)
    asymmetry = torch.special.erf(z / math.sqrt(2))
    return 2 * std * density + mean * asymmetry


def _deviations(covariances: Tensor) -> Tensor:
    """Take the standard deviations of covariances `(..., C, C)`."""
    variances = covariances.diagonal(dim1=-2, dim2=-1)
    return variances.clamp_min(0).sqrt()

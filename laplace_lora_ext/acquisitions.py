"""Choose what to measure, label or try next: acquisition functions.

Pure functions of moments, probabilities or samples, and `acquire`, which applies one to
a pool.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import RandomSampler

from laplace_lora_ext.likelihoods import TOKENS, Likelihood
from laplace_lora_ext.messages import check_counts
from laplace_lora_ext.predictive.data_sets import Columns, over_loader
from laplace_lora_ext.predictive.decisions import Prediction
from laplace_lora_ext.predictive.functions import (
    DrawableFunctions,
    Functions,
    draw_functions,
)
from laplace_lora_ext.predictive.numbers import NumberPrediction

# Of a batch's labels that are kept; more are thinned by drawing half as many.
_OUTCOMES = 1024


def expected_improvement(
    mean: Tensor, standard_deviation: Tensor, best: float
) -> Tensor:
    """Compute by how much numbers are expected to exceed the best one so far.

    Parameters
    ----------
    mean : torch.Tensor
        `(N,)`
    standard_deviation : torch.Tensor
        `(N,)`
    best : float
        the largest number that is known

    Returns
    -------
    torch.Tensor
        `(N,)`, at least 0

    References
    ----------
    Jones, Schonlau & Welch, "Efficient global optimization of expensive black-box
    functions", Journal of Global Optimization 13 (1998), equation 15.
    """
    ahead = mean - best
    z = ahead / standard_deviation
    unscaled = torch.exp(-z.square() / 2)
    density = unscaled / math.sqrt(2 * math.pi)
    distribution = torch.special.ndtr(z)
    expected = ahead * distribution + standard_deviation * density
    # Without variance z is no number, and the improvement is what the mean is ahead.
    improvement = torch.where(standard_deviation > 0, expected, ahead)
    return improvement.clamp_min(0)


def upper_confidence_bound(
    mean: Tensor, standard_deviation: Tensor, beta: float = 2.0
) -> Tensor:
    """Compute `mean + beta * standard_deviation`, `(N,)`.

    Parameters
    ----------
    mean : torch.Tensor
        `(N,)`
    standard_deviation : torch.Tensor
        `(N,)`
    beta : float, default=2.0
        how much it is worth to be unsure

    Returns
    -------
    torch.Tensor
        `(N,)`
    """
    return mean + beta * standard_deviation


def thompson(
    functions: Tensor,
    n: int,
) -> Tensor:
    """Choose, for each function in turn, the best candidate that is still free.

    Parameters
    ----------
    functions : torch.Tensor
        `(S, N)` values of drawn functions, S at least n
    n : int

    Returns
    -------
    torch.Tensor
        `(n,)` places
    """
    left = functions[:n].clone()
    places: list[int] = []
    for index in range(n):
        place = int(left[index].argmax())
        # Each is chosen once: what other functions take for the best is then the next
        # one.
        left[:, place] = -math.inf
        places.append(place)
    return torch.tensor(places)


def entropy(probabilities: Tensor) -> Tensor:
    """Compute the entropy `(N,)` of probabilities `(N, C)`, in nats."""
    return torch.special.entr(probabilities).sum(-1)


def margin(probabilities: Tensor) -> Tensor:
    """Compute how near the second class comes to the first, `(N,)`.

    It is 1 where both are as probable.
    """
    largest = probabilities.topk(2, dim=-1).values
    first, second = largest.unbind(-1)
    return 1 - (first - second)


def bald(probabilities: Tensor) -> Tensor:
    """Compute what a label would tell of the weights, in nats, for each text by itself.

    Parameters
    ----------
    probabilities : torch.Tensor
        `(S, N, C)` under draws of the weights

    Returns
    -------
    torch.Tensor
        `(N,)`, at least 0

    References
    ----------
    Houlsby et al., "Bayesian active learning for classification and preference
    learning", arXiv:1112.5745 (2011), equation 2.
    """
    of_mean = entropy(probabilities.mean(0))
    given_weights = entropy(probabilities).mean(0)
    # Rounding makes a difference of equal entropies negative.
    return (of_mean - given_weights).clamp_min(0)


def batch_bald(
    probabilities: Tensor,
    n: int,
    generator: torch.Generator,
) -> Tensor:
    """Choose texts whose labels together tell most of the weights, one after the other.

    The joint entropy of the labels is exact as long as they have few outcomes, and is
    then estimated by outcomes that are drawn.

    Parameters
    ----------
    probabilities : torch.Tensor
        `(S, N, C)` under the same draws of the weights for all texts
    n : int
    generator : torch.Generator

    Returns
    -------
    torch.Tensor
        `(n,)` places, in the order of their choice

    References
    ----------
    Kirsch, van Amersfoort & Gal, "BatchBALD: efficient and diverse batch acquisition
    for deep Bayesian active learning", NeurIPS 2019, algorithm 1.
    """
    probabilities = probabilities.double()
    n_draws, _, n_classes = probabilities.shape
    # Given the weights, labels are independent: their entropies add up.
    given_weights = entropy(probabilities).mean(0)
    # M outcomes of the labels chosen so far, and how many terms of the joint entropy's
    # sum each of them stands for, `(M, S)` and `(M,)`. Without a label there is one
    # outcome, which is certain.
    outcomes = probabilities.new_ones(1, n_draws)
    shares = probabilities.new_ones(1)
    places: list[int] = []
    spent = probabilities.new_zeros(())
    for _ in range(n):
        joint = _joint_entropies(outcomes, shares, probabilities)
        information = joint - given_weights - spent
        # A text that is labelled again would tell nothing new; by rounding, it may seem
        # to.
        if places:
            information[places] = -math.inf
        place = int(information.argmax())
        places.append(place)
        spent = spent + given_weights[place]
        of_label = probabilities[:, place].T  # (C, S)
        outcomes = (outcomes[:, None] * of_label).flatten(0, 1)
        shares = shares.repeat_interleave(n_classes)
        if len(outcomes) > _OUTCOMES:
            outcomes, shares = _thinned(outcomes, shares, generator)
    return torch.tensor(places)


def _joint_entropies(outcomes: Tensor, shares: Tensor, probabilities: Tensor) -> Tensor:
    """Compute the entropy `(N,)` of the chosen labels together with each text's."""
    n_draws = len(probabilities)
    entropies = []
    # In parts, since outcomes times classes of a whole pool may not fit into memory.
    for of_texts in probabilities.split(64, dim=1):  # (S, n, C)
        joint = outcomes @ of_texts.flatten(1) / n_draws
        terms = torch.special.entr(joint) * shares[:, None]
        by_class = terms.sum(0).unflatten(0, of_texts.shape[1:])  # (n, C)
        entropies.append(by_class.sum(-1))
    return torch.cat(entropies)


def _thinned(
    outcomes: Tensor, shares: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw outcomes by their probabilities, with the inverse as their weights."""
    weights = outcomes.mean(1) * shares
    count = _OUTCOMES // 2
    drawn = torch.multinomial(weights, count, replacement=True, generator=generator)
    probability = weights[drawn] / weights.sum()
    return outcomes[drawn], shares[drawn] / (count * probability)


class Member(DrawableFunctions, Protocol):
    """A posterior that functions are drawn from."""

    likelihood: str
    predicted_likelihood: Likelihood


class Acquiring(Protocol):
    """A posterior, or a mixture of them, that chooses from a pool."""

    @property
    def members(self) -> Sequence[Member]: ...

    def __call__(self, x: Any) -> Any: ...

    def predict(
        self,
        x: Any,
        *,
        generator: torch.Generator | None = None,
        progress_bar: bool = False,
    ) -> Prediction | NumberPrediction: ...


# --- a pool ---------------------------------------------------------------------------

OF_CLASSES = ("bald", "batch_bald", "entropy", "margin")
OF_NUMBERS = ("expected_improvement", "upper_confidence_bound", "thompson")


@dataclass(frozen=True)
class Acquisition:
    """How to choose from a pool; the fields are options of `LoRALaplace.acquire`."""

    by: str
    best: float | None = None
    beta: float = 2.0
    n_samples: int = 64
    seed: int = 0
    progress_bar: bool = False

    def choose(
        self,
        la: Acquiring,
        pool: Iterable[Any],
        n: int,
    ) -> Tensor:
        """Choose what to label or measure next: its places `(n,)`.

        Parameters and errors are those of `LoRALaplace.acquire`.
        """
        check_counts(n=n, n_samples=self.n_samples)
        first = la.members[0]
        if first.likelihood == TOKENS:
            raise NotImplementedError(
                "acquire ranks examples with one prediction each, and "
                f"{first.likelihood} has one a token: rank texts by "
                "la.predict(pool).epistemic_entropy.nansum(1)."
            )
        is_gaussian = first.predicted_likelihood.is_gaussian
        known = OF_NUMBERS if is_gaussian else OF_CLASSES
        if self.by not in known:
            raise ValueError(
                f"by={self.by!r} is none of {list(known)} (for {first.likelihood})."
            )
        if self.by == "expected_improvement" and self.best is None:
            raise ValueError(
                "Expected improvement needs the best number so far: pass best=."
            )
        if isinstance(getattr(pool, "sampler", None), RandomSampler):
            raise ValueError(
                "Places in a shuffled pool say nothing: pass a loader in its order."
            )
        if self.by == "batch_bald":
            if not first.predicted_likelihood.sees_differences:
                raise ValueError(
                    f'{first.likelihood} has no by="batch_bald": use "bald".'
                )
            probabilities = self._functions(la, pool, self.n_samples).softmax(-1)
            _check_size(n, probabilities.shape[1])
            generator = torch.Generator().manual_seed(self.seed)
            return batch_bald(probabilities, n, generator)
        if self.by == "thompson":
            functions = self._functions(la, pool, n)[..., 0]
            _check_size(n, functions.shape[1])
            return thompson(functions, n)
        score = self._scores_of_numbers if is_gaussian else self._scores
        scores = score(la, pool)
        if scores.ndim > 1:  # of several labels, what is to learn of each adds up
            scores = scores.sum(1)
        _check_size(n, len(scores))
        return scores.topk(n).indices

    def _scores(
        self,
        la: Acquiring,
        pool: Iterable[Any],
    ) -> Tensor:
        """Score each text by itself."""
        first = la.members[0]
        generator = torch.Generator(first.model.device).manual_seed(self.seed)
        prediction = la.predict(
            pool, generator=generator, progress_bar=self.progress_bar
        )
        assert isinstance(prediction, Prediction)  # numbers have been refused
        if self.by == "bald":
            return prediction.epistemic_entropy.cpu()
        p = prediction.probabilities
        # A label by itself is a choice of two classes: that it holds, and that it
        # doesn't.
        if not first.predicted_likelihood.sees_differences:
            p = torch.stack([1 - p, p], dim=-1)
        if self.by == "margin":
            return margin(p).cpu()
        return entropy(p).cpu()

    def _scores_of_numbers(
        self,
        la: Acquiring,
        pool: Iterable[Any],
    ) -> Tensor:
        """Score each example by mean and variance of its one number."""
        model = la.members[0].model

        def moments(batch: Any) -> Columns:
            mean, covariance = la(model.inputs(batch))
            return mean.detach().cpu(), covariance.detach().cpu()

        mean, covariance = over_loader(pool, moments, "[Pool]", self.progress_bar)
        _check_single(mean.shape[1])
        deviation = covariance[:, 0, 0].sqrt()
        if self.best is None:
            return upper_confidence_bound(mean[:, 0], deviation, self.beta)
        return expected_improvement(mean[:, 0], deviation, self.best)

    def _functions(
        self,
        la: Acquiring,
        pool: Iterable[Any],
        n_samples: int,
    ) -> Tensor:
        """Draw functions, and compute their outputs `(S, N, C)` for the pool."""
        drawn: list[Functions] = []
        members = la.members
        n_each, n_left = divmod(n_samples, len(members))
        for index, member in enumerate(members):
            n_draws = n_each + (index < n_left)  # the first ones get the rest
            if n_draws:
                generator = torch.Generator(member.model.device)
                generator.manual_seed(self.seed + index)
                drawn.append(draw_functions(member, n_draws, generator))

        def of_batch(batch: Any) -> Columns:
            X = members[0].model.inputs(batch)
            outputs = [functions.linearised(X).cpu() for functions in drawn]
            # Examples first, as loaders have them.
            return (torch.cat(outputs).transpose(0, 1),)

        (of_pool,) = over_loader(pool, of_batch, "[Drawn functions]", self.progress_bar)
        if self.by in OF_NUMBERS:
            _check_single(of_pool.shape[2])
        return of_pool.transpose(0, 1)


def _check_size(n: int, n_pool: int) -> None:
    if n > n_pool:
        raise ValueError(
            f"The pool has {n_pool} examples, fewer than the {n} to choose."
        )


def _check_single(n_outputs: int) -> None:
    if n_outputs != 1:
        raise ValueError(
            f"The model has {n_outputs} outputs, and an acquisition ranks one number: "
            "use the functions of laplace_lora_ext.acquisitions on one that you make "
            "of them."
        )

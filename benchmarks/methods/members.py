"""Predictions of members from statistics, of models and posteriors."""

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.fine_tuning import TEST
from benchmarks.methods.method import Probabilities
from benchmarks.methods.posteriors import LINK, probabilities
from benchmarks.methods.priors import (
    FACTORS,
    NO_PRIOR,
    Prediction,
    Prior,
    geometric_mean,
    regret_of,
)
from laplace_lora_ext import LowRankKronLoRALaplace
from laplace_lora_ext.predictive.links import shared_noise, softmax_samples
from laplace_lora_ext.predictive.moments import Moments, centre, mix_moments
from laplace_lora_ext.predictive.posterior import Hyperparameters
from laplace_lora_ext.predictive.predictions import Prediction as Decisions
from laplace_lora_ext.predictive.statistics import PredictiveStatistics

DRAWS = 256  # of the logits, for entropies, which have no closed form
AT_ONCE = 64  # texts whose logits are drawn together, for the sake of memory


@dataclass(frozen=True)
class Member:
    """A posterior, what it keeps of data sets on the CPU, and the seconds of both."""

    la: LowRankKronLoRALaplace
    statistics: Mapping[str, PredictiveStatistics]
    seconds: float


@dataclass(frozen=True)
class Posteriors:
    """Members with what was chosen for each: a posterior, or a mixture of several."""

    members: Sequence[Member]
    choices: Sequence[Hyperparameters]

    def probabilities(self, name: str, factor: float | Tensor = 1.0) -> Tensor:
        """Compute class probabilities (texts, classes) of a data set, on the CPU.

        `factor` multiplies the chosen prior precisions.
        """
        of_members = []
        for member, chosen in zip(self.members, self.choices, strict=True):
            # A copy: the posterior itself keeps what was chosen for it.
            la = copy(member.la)
            la.hyperparameters = chosen
            statistics = member.statistics[name]
            moments = statistics.moments(factor * chosen.prior_precision)
            of_members.append(probabilities(la, moments, LINK))
        return torch.stack(of_members).mean(0)

    def predict(
        self, names: Collection[str], prior: Prior, labels: Tensor
    ) -> Prediction:
        """Predict data sets; measure the regret by the labels of the test texts."""
        mean = {name: self.probabilities(name) for name in names}
        # One by one, as they are read: each is as large as the prediction.
        tried = (self.probabilities(TEST, factor) for factor in FACTORS)
        priors = torch.stack([chosen.prior_precision for chosen in self.choices])
        signs = {name: self._signs(name, mean[name]) for name in names}
        return Prediction(
            mean,
            prior,
            LINK,
            chosen=geometric_mean(priors),
            regret=regret_of(mean[TEST], tried, labels),
            signs=signs,
        )

    def _signs(self, name: str, mean: Tensor) -> dict[str, Tensor]:
        """Compute what the posteriors say of how doubtful each text is."""
        chosen_for = list(zip(self.members, self.choices, strict=True))

        def moments_of(rows: slice) -> list[Moments]:
            return [
                member.statistics[name][rows]
                .moments(chosen.prior_precision)
                .scaled(chosen.logit_scale)
                for member, chosen in chosen_for
            ]

        epistemic = []
        for start in range(0, len(mean), AT_ONCE):
            rows = slice(start, start + AT_ONCE)
            # As many draws of each member: a mixture takes each of them as likely.
            draws = torch.cat([_drawn(moments) for moments in moments_of(rows)])
            decisions = Decisions.of_draws(mean[rows], draws)
            epistemic.append(decisions.epistemic_entropy)
        scaled = moments_of(slice(None))
        f_mu = torch.stack([moments.f_mu for moments in scaled])
        f_var = torch.stack([moments.f_var for moments in scaled])
        _, covariance = mix_moments(f_mu, f_var)
        # What all logits of a text share says nothing of its class, and may not be
        # known.
        variances = centre(covariance).diagonal(dim1=-2, dim2=-1)
        return {
            "epistemic_entropy": torch.cat(epistemic),
            "summed_variance": variances.sum(-1),
            "largest_variance": variances.amax(-1),
        }


def _drawn(moments: Moments) -> Tensor:
    """Draw probabilities (draws, texts, classes), with one noise for all texts."""
    f_mu, f_var = moments
    noise = shared_noise(f_mu, DRAWS, torch.Generator().manual_seed(0))
    return softmax_samples(f_mu, f_var, noise).exp()


def logits_of(members: Sequence[Member], name: str) -> Tensor:
    """Collect the models' logits (members, texts, classes) of a data set."""
    return torch.stack([member.statistics[name].f_mu for member in members])


def predict_maps(
    members: Sequence[Member],
    names: Collection[str],
    prior: Prior = NO_PRIOR,
    temperature: float | None = None,
) -> Prediction:
    """Predict data sets with the members' models, without their posteriors."""
    mean: Probabilities = {}
    signs = {}
    for name in names:
        logits = logits_of(members, name)
        of_members = (logits / (temperature or 1.0)).softmax(-1)
        mean[name] = of_members.mean(0)
        if len(members) > 1:
            decisions = Decisions.of_draws(mean[name], of_members)
            signs[name] = {"epistemic_entropy": decisions.epistemic_entropy}
    return Prediction(mean, prior, chosen=temperature, signs=signs)

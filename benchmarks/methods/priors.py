"""Ways to choose a prior precision by training texts, and what it then predicts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.fine_tuning import TEST
from benchmarks.methods.method import Loaders, Probabilities
from benchmarks.methods.posteriors import LINK, probabilities
from benchmarks.methods.sampled import MOST_CHANGED, SAMPLES
from laplace_lora_ext import LoRALaplace, LowRankKronLoRALaplace, PredictiveStatistics
from laplace_lora_ext.metrics import negative_log_likelihood
from laplace_lora_ext.predictive.moments import Moments, gaussian_samples

LINKS = ("probit", "mean_field")
# Eight a decade, from the broadest prior on.
GRID = torch.logspace(-2, 4, 49)
# Of the prior precision, to see what another would give.
FACTORS = torch.logspace(-2, 2, 33)

Data = PredictiveStatistics | Iterable[Any]  # what is kept of it, or its batches
# Takes a posterior and, where it reads them, statistics of the training data.
Choose = Callable[[LoRALaplace, PredictiveStatistics | None], Tensor]


@dataclass(frozen=True)
class Prior:
    """Where a prior precision is from: its key in figures, and its title in tables."""

    key: str
    title: str


@dataclass(frozen=True)
class PriorByTraining(Prior):
    """A way to choose a prior precision by the texts that the model was trained on."""

    choose: Choose
    reads: bool = False  # whether it needs statistics of the training data


NO_PRIOR = Prior("", "")


@dataclass(frozen=True)
class Prediction:
    """Class probabilities of data sets, and what they come from."""

    probabilities: Probabilities
    prior: Prior = NO_PRIOR
    link: str = ""
    # A mean prior precision, a temperature, or label smoothing.
    chosen: float | None = None
    # NLL above the least that another prior precision gives.
    regret: float | None = None
    # By data set: what else tells how doubtful each text is, beside the probabilities.
    signs: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)


def by_evidence(structure: str) -> Choose:
    """Choose by the evidence, with one precision for all layers or for each."""

    def choose(la: LoRALaplace, _: PredictiveStatistics | None) -> Tensor:
        la.optimize_prior_precision(method="marglik", prior_structure=structure)
        return la.prior_precision.clone()

    return choose


def by_agreement(la: LoRALaplace, statistics: PredictiveStatistics | None) -> Tensor:
    """Choose the broadest posterior whose draws agree with the model."""
    assert statistics is not None
    la.optimize_prior_precision(method="agreement", train_loader=statistics)
    return la.prior_precision.clone()


def by_tfb_rule(_: LoRALaplace, statistics: PredictiveStatistics | None) -> Tensor:
    """Choose the smallest prior at which the mean of ten draws keeps classes.

    This is TFB's rule for our covariance: at most 1 % of the training texts may change
    class.
    """
    assert statistics is not None
    # Where no prior keeps the classes, the narrowest one remains.
    for prior_precision in GRID:
        moments = statistics.moments(prior_precision[None])
        # The same noise for all precisions: the changes then differ by their size
        # alone.
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn((SAMPLES, *moments.f_mu.shape), generator=generator)
        drawn = gaussian_samples(moments.f_mu, moments.f_var, noise)
        mean = drawn.softmax(-1).mean(0)
        is_changed = mean.argmax(-1) != moments.f_mu.argmax(-1)
        if is_changed.double().mean() <= MOST_CHANGED:
            break
    return prior_precision[None]


PRIORS = (
    PriorByTraining("marglik_scalar", "evidence, scalar", by_evidence("scalar")),
    PriorByTraining(
        "marglik_layerwise", "evidence, layerwise", by_evidence("layerwise")
    ),
    PriorByTraining("agreement", "agreement", by_agreement, reads=True),
    PriorByTraining("tfb_rule", "TFB's rule", by_tfb_rule, reads=True),
)
BY_TRAINING = {prior.key: prior for prior in PRIORS}


def regret_of(chosen: Tensor, tried: Iterable[Tensor], labels: Tensor) -> float:
    """Compute how far the NLL of a prediction is above the least NLL of some."""
    least = min(negative_log_likelihood(each, labels) for each in tried)
    return negative_log_likelihood(chosen, labels) - least


def geometric_mean(prior_precision: Tensor) -> float:
    """Sum up the precisions of a layerwise prior by one."""
    return prior_precision.log().mean().exp().item()


def data_of(
    la: LoRALaplace, loaders: Loaders, links: Sequence[str]
) -> Mapping[str, Data]:
    """Collect statistics of data sets, for posteriors that have any; else the loaders.

    A low-rank posterior then sees the data once for all priors.
    """
    if not isinstance(la, LowRankKronLoRALaplace):
        return loaders
    # By default many classes are compared with the most probable one, but not all, and
    # "probit" reads the variance of every logit.
    link = "probit" if "probit" in links else LINK
    return {
        name: la.predictive_statistics(loader, link_approx=link)
        for name, loader in loaders.items()
    }


def predicted(
    la: LoRALaplace,
    data: Data,
    prior_precisions: Iterable[Tensor],
    links: Sequence[str],
) -> list[Tensor]:
    """Predict a data set by each prior precision and link, in one pass at most."""
    if isinstance(data, PredictiveStatistics):
        return _by_links(la, map(data.moments, prior_precisions), links)
    of_batches = []
    for batch in data:
        # Priors change no Jacobian.
        Js, f_mu = la.recorder.jacobians(la.model.unlabelled(batch))
        under = partial(_moments_under, la, Js, f_mu)
        of_batches.append(_by_links(la, map(under, prior_precisions), links))
    return [torch.cat(parts) for parts in zip(*of_batches, strict=True)]


def _moments_under(
    la: LoRALaplace, Js: Tensor, f_mu: Tensor, prior_precision: Tensor
) -> Moments:
    la.prior_precision = prior_precision
    return Moments(f_mu, la.functional_variance(Js))


def _by_links(
    la: LoRALaplace, moments: Iterable[Moments], links: Sequence[str]
) -> list[Tensor]:
    return [probabilities(la, each, link) for each in moments for link in links]


def predictions(
    la: LoRALaplace, train: DataLoader | None, loaders: Loaders, labels: Tensor
) -> Iterator[Prediction]:
    """Predict data sets by each prior and link; without `train`, by evidence.

    The labels are those of the test texts.
    """
    statistics_of_training = None
    if train is not None:
        assert isinstance(la, LowRankKronLoRALaplace)  # what others have none of
        statistics_of_training = la.predictive_statistics(train)
    data = data_of(la, loaders, LINKS)
    chosen_by = {
        prior: prior.choose(la, statistics_of_training)
        for prior in PRIORS
        if statistics_of_training is not None or not prior.reads
    }
    chosen = list(chosen_by.values())
    by_set = {name: predicted(la, data[name], chosen, LINKS) for name in data}
    for place, (prior, link) in enumerate(product(chosen_by, LINKS)):
        by_chosen = {name: of_set[place] for name, of_set in by_set.items()}
        regret = None
        # Otherwise each factor would need a backward pass for every text.
        if isinstance(data[TEST], PredictiveStatistics):
            factors = [factor * chosen_by[prior] for factor in FACTORS]
            tried = predicted(la, data[TEST], factors, [link])
            regret = regret_of(by_chosen[TEST], tried, labels)
        precision = geometric_mean(chosen_by[prior])
        yield Prediction(by_chosen, prior, link, precision, regret)

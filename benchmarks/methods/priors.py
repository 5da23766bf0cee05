"""Ways to choose a prior precision by training texts, and what it then predicts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.fine_tuning import TEST
from benchmarks.methods.method import Loaders, labels_of
from benchmarks.methods.sampled import MOST_CHANGED, SAMPLES
from laplace_lora_ext import PredictiveStatistics
from laplace_lora_ext.metrics import negative_log_likelihood
from laplace_lora_ext.predictive.moments import gaussian_samples

LINKS = ("probit", "mean_field")
STRUCTURES = ("scalar", "layerwise")
GRID = torch.logspace(-2, 4, 49)
FACTORS = torch.logspace(-2, 2, 33)


@dataclass(frozen=True)
class Prior:
    """A way to choose the prior precision: its key in figures, and its title in tables.

    `choose` takes a posterior and, where it reads them, statistics of the training data, or None.
    """

    key: str
    title: str
    choose: Callable[[Any, Any], torch.Tensor] | None = None  # None: elsewhere
    reads: bool = False


def by_method(la: Any, data: Any, **search: Any) -> torch.Tensor:
    """Choose by one of the package's own methods."""
    la.optimize_prior_precision(**search, **({} if data is None else {"train_loader": data}))
    return la.prior_precision.clone()


def by_tfb_rule(_: Any, statistics: PredictiveStatistics) -> torch.Tensor:
    """The smallest of a grid of scalars at which the mean of ten draws keeps the classes.

    This is TFB's rule for our covariance: at most 1 % of the training texts may change class.
    """
    for prior_precision in GRID:
        moments = statistics.moments(prior_precision[None])
        draws = torch.Generator().manual_seed(0)
        noise = torch.randn((SAMPLES, *moments.f_mu.shape), generator=draws)
        found = gaussian_samples(moments.f_mu, moments.f_var, noise).softmax(-1).mean(0)
        if (found.argmax(-1) != moments.f_mu.argmax(-1)).double().mean() <= MOST_CHANGED:
            break
    return prior_precision[None]


BY_TRAINING = {
    prior.key: prior
    for prior in (
        *(
            Prior(
                f"marglik_{structure}",
                f"evidence, {structure}",
                partial(by_method, method="marglik", prior_structure=structure),
            )
            for structure in STRUCTURES
        ),
        Prior("agreement", "agreement", partial(by_method, method="agreement"), True),
        Prior("tfb_rule", "TFB's rule", by_tfb_rule, True),
    )
}
NO_PRIOR = Prior("", "")


def probabilities(la: Any, x: Any, link: str) -> torch.Tensor:
    """Class probabilities (texts, classes), on the CPU, of a batch or of its Gaussian logits."""
    return la(x, pred_type="glm", link_approx=link).detach().cpu()


def predictions(la: Any, train: DataLoader | None, loaders: Loaders) -> Iterator[dict[str, Any]]:
    """Predict data sets with each prior and link; without `train`, by the evidence alone."""
    has_statistics = hasattr(la, "predictive_statistics")
    statistics = None if train is None else la.predictive_statistics(train)
    beliefs: Any = loaders
    if has_statistics:  # low-rank posteriors see the data once
        beliefs = {name: la.predictive_statistics(loader) for name, loader in loaders.items()}
    for prior in BY_TRAINING.values():
        if prior.reads and statistics is None:
            continue
        assert prior.choose is not None
        chosen = prior.choose(la, statistics if prior.reads else None)
        la.prior_precision = chosen
        for link in LINKS:
            found, regret = {}, None
            for name, belief in beliefs.items():
                batches = [belief.moments(chosen)] if has_statistics else belief
                found[name] = torch.cat([probabilities(la, batch, link) for batch in batches])
            if has_statistics:
                moments = (beliefs[TEST].moments(factor * chosen) for factor in FACTORS)
                labels = labels_of(loaders[TEST])
                tried = (probabilities(la, each, link) for each in moments)
                least = min(negative_log_likelihood(each, labels) for each in tried)
                regret = negative_log_likelihood(found[TEST], labels) - least
            mean = chosen.log().mean().exp().item()
            yield {
                **{"probabilities": found, "prior": prior, "link": link},
                **{"chosen": mean, "regret": regret},
            }

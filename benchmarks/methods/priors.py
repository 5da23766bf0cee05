"""Ways to choose a posterior's prior precision, and what it then predicts with every link."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from benchmarks.fine_tuning import TEST
from benchmarks.methods.method import Loaders, Probabilities, labels_of
from benchmarks.methods.sampled import MOST_CHANGED, SAMPLES
from laplace_lora_ext import Moments, PredictiveStatistics
from laplace_lora_ext.metrics import negative_log_likelihood
from laplace_lora_ext.passes import jacobians
from laplace_lora_ext.predictive.sampling import gaussian_samples

# Links by the host's words for them, with the keywords of a prediction.
LINKS: dict[str, dict[str, Any]] = {
    link: {"link_approx": link} for link in ("mc", "mc_diagonal", "probit", "mean_field", "bridge")
}
LINKS["mc_diagonal"] = {"link_approx": "mc", "diagonal_output": True}
STRUCTURES = ("scalar", "layerwise")
GRID = torch.logspace(-2, 4, 49)
COARSE_GRID = GRID[::4]
FACTORS = torch.logspace(-2, 2, 33)
LINKS_OF_DESCENT = ("mc", "probit", "mean_field")


@dataclass(frozen=True)
class Prior:
    """A way to choose the prior precision: its key in figures, and its title in tables.

    `choose` takes a posterior and, where it reads them, statistics of the training data, or None.
    """

    key: str
    title: str
    choose: Callable[[Any, Any], torch.Tensor] | None = None  # None: by validation, for each link
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
GRID_SEARCH = Prior("validation_scalar", "validation, scalar")
DESCENT = Prior("validation_layerwise", "validation, layerwise")
NO_PRIOR, TEMPERATURE = Prior("", ""), Prior("validation", "validation")
# Validation data of another training chose it: this model was trained on them too.
ELSEWHERE = Prior("validation_elsewhere", "second training")
SEVERAL = Prior("validation_of_several", "several trainings")


class Prediction(NamedTuple):
    """Class probabilities, and what they come from."""

    probabilities: Probabilities
    prior: Prior = NO_PRIOR
    link: str = ""
    chosen: float | None = None  # temperature, or geometric mean of the prior precisions
    is_choice: bool = False  # whether validation data prefer this link to the others
    regret: float | None = None  # test NLL above that of the best factor of the prior precision


class Choice(NamedTuple):
    """A prior precision for some links, with each one's loss where validation data chose it."""

    prior: Prior
    prior_precision: torch.Tensor
    losses: dict[str, float]


class Beliefs:
    """Gaussian logits of a data set under any prior precision; low-rank ones see the data once."""

    def __init__(self, la: Any, loader: DataLoader) -> None:
        self._la, self._loader = la, loader
        gather = getattr(la, "predictive_statistics", None)
        self.statistics = gather(loader) if gather else None

    def moments(self, prior_precisions: Sequence[torch.Tensor]) -> list[Moments]:
        """Mean and covariance of the logits under each prior precision."""
        if self.statistics is not None:
            return [self.statistics.moments(value) for value in prior_precisions]
        la, before = self._la, self._la.prior_precision
        parts: list[list[Moments]] = [[] for _ in prior_precisions]
        for batch in self._loader:
            Js, f_mu = jacobians(la.model, la.blocks, batch)
            for value, of_prior in zip(prior_precisions, parts, strict=True):
                la.prior_precision = value
                of_prior.append(Moments(f_mu, la.functional_variance(Js)).to("cpu"))
        la.prior_precision = before
        return [Moments(*map(torch.cat, zip(*of_prior, strict=True))) for of_prior in parts]


def probabilities(la: Any, x: Any, link: str, samples: int) -> torch.Tensor:
    """Class probabilities (texts, classes), on the CPU, of a batch or of its Gaussian logits."""
    return la(x, pred_type="glm", n_samples=samples, **LINKS[link]).detach().cpu()


def by_training(la: Any, train: DataLoader | None) -> Iterator[Choice]:
    """Choose in every way that needs no validation data; without `train`, by the evidence alone."""
    statistics = None if train is None else la.predictive_statistics(train)
    for prior in BY_TRAINING.values():
        if prior.choose and not (prior.reads and statistics is None):
            chosen = prior.choose(la, statistics if prior.reads else None)
            yield Choice(prior, chosen, dict.fromkeys(LINKS, math.nan))


def by_validation(la: Any, validation: DataLoader, samples: int) -> Iterator[Choice]:
    """Choose by a grid, and by the paper's algorithm 3."""
    beliefs, labels = Beliefs(la, validation), labels_of(validation)
    is_stock = beliefs.statistics is None
    grid = list(COARSE_GRID if is_stock else GRID)
    on_grid = beliefs.moments(grid)
    for link in LINKS:
        losses = torch.tensor(_losses(la, on_grid, link, samples, labels))
        yield Choice(GRID_SEARCH, grid[int(losses.argmin())], {link: losses.min().item()})
    if not is_stock:
        descent: Any = {"val_loader": beliefs.statistics, "prior_structure": "layerwise"}
        for link in LINKS_OF_DESCENT:
            history = la.optimize_prior_precision(method="val_gd", link_approx=link, **descent)
            losses = {link: history.objective.min().item()}
            yield Choice(DESCENT, la.prior_precision.clone(), losses)


def predictions(
    la: Any, choices: Sequence[Choice], loaders: Loaders, samples: int
) -> Iterator[Prediction]:
    """Predict data sets with every choice and each of its links."""
    beliefs = {name: Beliefs(la, loader) for name, loader in loaders.items()}
    chosen = [choice.prior_precision for choice in choices]
    moments = {name: of_set.moments(chosen) for name, of_set in beliefs.items()}
    test, labels = beliefs[TEST], labels_of(loaders[TEST])
    for place, (prior, prior_precision, losses) in enumerate(choices):
        rivals = [x for other in choices if other.prior == prior for x in other.losses.values()]
        own = {name: of_set[place] for name, of_set in moments.items()}
        for link, loss in losses.items():
            predicted = {name: probabilities(la, own[name], link, samples) for name in own}
            regret = None
            if link == "mean_field" and test.statistics is not None:
                grid = (test.moments([factor * prior_precision])[0] for factor in FACTORS)
                least = min(_losses(la, grid, link, 1, labels))
                regret = negative_log_likelihood(predicted[TEST], labels) - least
            mean = prior_precision.log().mean().exp().item()
            # Training data prefer no link: their losses are not numbers, and equal none.
            yield Prediction(predicted, prior, link, mean, loss == min(rivals), regret)


def _losses(
    la: Any, moments: Iterable[Moments], link: str, samples: int, labels: torch.Tensor
) -> list[float]:
    """NLL of a data set under each of some moments."""
    predicted = (probabilities(la, each, link, samples) for each in moments)
    return [negative_log_likelihood(p, labels) for p in predicted]

"""What chooses a posterior's prior precision, and what it then predicts with every link."""

import math
from collections.abc import Iterator, Sequence
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

# Links and searches, in the words of a table and as keywords of the host's.
LINKS: dict[str, dict[str, Any]] = {
    "mc": {"link_approx": "mc"},
    "mc, diagonal": {"link_approx": "mc", "diagonal_output": True},
    "probit": {"link_approx": "probit"},
    "mean field": {"link_approx": "mean_field"},
    "bridge": {"link_approx": "bridge"},
}
LAYERWISE = {"prior_structure": "layerwise"}
PRIORS = {"scalar": {"prior_structure": "scalar"}, "layerwise": LAYERWISE}
EVIDENCES = {f"evidence, {key}": {"method": "marglik", **prior} for key, prior in PRIORS.items()}
LINEARIZED = {
    f"{name}, {key}": {"method": method, **prior}
    for name, method in (
        ("leave-one-out", "linearized_loo"),
        ("linearized evidence", "linearized_marglik"),
    )
    for key, prior in PRIORS.items()
}
AGREEMENT, TFB_RULE = "agreement", "TFB's rule"
WITH_DATA = {AGREEMENT: {"method": "agreement"}, **LINEARIZED}
GRID_SEARCH, DESCENT = "validation, scalar", "validation, layerwise"
SCALED = "validation, factor of linearized evidence"
GRID = torch.logspace(-2, 4, 49)
COARSE_GRID = GRID[::4]
FACTORS = torch.logspace(-2, 2, 33)
LINKS_OF_DESCENT = ("mc", "probit", "mean field")


class Prediction(NamedTuple):
    """Class probabilities, and what they come from."""

    probabilities: Probabilities
    chosen_by: str = ""  # what chose the prior precision or temperature
    link: str = ""
    chosen: float | None = None  # temperature, or geometric mean of the prior precisions
    is_choice: bool = False  # whether validation data prefer this link to the other ones
    regret: float | None = None  # NLL over that of the best factor of its prior on the test texts


Predictions = Iterator[Prediction]


class _Choice(NamedTuple):
    """A prior precision for a link, and its loss on validation data where they have chosen it."""

    chosen_by: str
    link: str
    prior_precision: torch.Tensor
    loss: float = math.nan


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


def by_training(la: Any, train: DataLoader | None, loaders: Loaders, samples: int) -> Predictions:
    """Choose prior precisions by the evidence and, given batches, in the linearised model too."""
    searches: dict[str, Any] = dict(EVIDENCES)
    if train is not None:
        statistics, linearized = la.predictive_statistics(train), la.linearize(train)
        for chosen_by, search in WITH_DATA.items():
            data = statistics if chosen_by == AGREEMENT else linearized
            searches[chosen_by] = {**search, "train_loader": data}
    choices = []
    for chosen_by, search in searches.items():
        la.optimize_prior_precision(**search)
        prior_precision = la.prior_precision.clone()
        choices += [_Choice(chosen_by, link, prior_precision) for link in LINKS]
    if train is not None:
        prior_precision = by_tfb_rule(statistics)
        choices += [_Choice(TFB_RULE, link, prior_precision) for link in LINKS]
    return _predictions(la, choices, loaders, samples)


def by_tfb_rule(statistics: PredictiveStatistics) -> torch.Tensor:
    """The smallest of a grid of scalars at which ten draws' mean keeps the predicted classes.

    TFB's rule for our covariance: of the training texts, at most 1 % may change class.
    """
    for prior_precision in GRID:
        moments = statistics.moments(prior_precision[None])
        draws = torch.Generator().manual_seed(0)
        noise = torch.randn((SAMPLES, *moments.f_mu.shape), generator=draws)
        found = gaussian_samples(moments.f_mu, moments.f_var, noise).softmax(-1).mean(0)
        if (found.argmax(-1) != moments.f_mu.argmax(-1)).double().mean() <= MOST_CHANGED:
            break
    return prior_precision[None]


def by_validation(
    la: Any, validation: DataLoader, train: DataLoader | None, loaders: Loaders, samples: int
) -> Predictions:
    """Choose by a grid, by a factor of the linearised evidence, and by the paper's algorithm 3."""
    beliefs, labels = Beliefs(la, validation), labels_of(validation)

    def best_of(chosen_by: str, grid: list[torch.Tensor]) -> Iterator[_Choice]:
        """Try the prior precisions of a grid with every link."""
        on_grid = beliefs.moments(grid)
        for link in LINKS:
            predicted = (probabilities(la, moments, link, samples) for moments in on_grid)
            losses = torch.tensor([negative_log_likelihood(p, labels) for p in predicted])
            yield _Choice(chosen_by, link, grid[int(losses.argmin())], losses.min().item())

    grid = COARSE_GRID if beliefs.statistics is None else GRID
    choices = list(best_of(GRID_SEARCH, list(grid)))
    if train is not None:
        search = LINEARIZED["linearized evidence, layerwise"]
        la.optimize_prior_precision(train_loader=train, **search)
        choices += best_of(SCALED, [factor * la.prior_precision for factor in FACTORS])
    if beliefs.statistics is not None:
        data = {"val_loader": beliefs.statistics, **LAYERWISE}
        for link in LINKS_OF_DESCENT:
            history = la.optimize_prior_precision(method="val_gd", **data, **LINKS[link])
            loss = history.objective.min().item()
            choices.append(_Choice(DESCENT, link, la.prior_precision.clone(), loss))
    return _predictions(la, choices, loaders, samples)


def _predictions(la: Any, choices: list[_Choice], loaders: Loaders, samples: int) -> Predictions:
    test, labels = Beliefs(la, loaders[TEST]), labels_of(loaders[TEST])
    distinct = {id(choice.prior_precision): choice.prior_precision for choice in choices}
    moments = {}
    for name, loader in loaders.items():
        beliefs = test if name == TEST else Beliefs(la, loader)
        of_set = beliefs.moments(list(distinct.values()))
        moments[name] = dict(zip(distinct, of_set, strict=True))
    for choice in choices:
        rivals = [other.loss for other in choices if other.chosen_by == choice.chosen_by]
        predicted = {
            name: probabilities(la, of_set[id(choice.prior_precision)], choice.link, samples)
            for name, of_set in moments.items()
        }
        is_choice = choice.loss == min(rivals)  # never, if not chosen by validation
        chosen = choice.prior_precision.log().mean().exp().item()
        regret = None
        if choice.link == "mean field" and test.statistics is not None:
            least = least_loss(la, test, choice, labels)
            regret = negative_log_likelihood(predicted[TEST], labels) - least
        yield Prediction(predicted, choice.chosen_by, choice.link, chosen, is_choice, regret)


def least_loss(la: Any, test: Beliefs, choice: _Choice, labels: torch.Tensor) -> float:
    """The test texts' NLL at the best factor of a prior precision, 1 included."""
    grid = [factor * choice.prior_precision for factor in FACTORS]
    losses = (
        negative_log_likelihood(probabilities(la, moments, choice.link, 1), labels)
        for (moments,) in (test.moments([point]) for point in grid)
    )
    return min(losses)

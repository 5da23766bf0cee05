"""What could calibrate beyond one prior precision, if texts of another training choose it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from scipy.stats import invgamma

from benchmarks.experiments.calibration import FIRM, held_out
from benchmarks.fine_tuning import PREDICTION_BATCH_SIZE, TEST, Pretrained, fine_tune, prepare
from benchmarks.methods import posterior
from benchmarks.methods.method import labels_of
from benchmarks.methods.priors import GRID
from benchmarks.models import AdaptedModel
from benchmarks.options import Cures
from benchmarks.report import Result, Row, over_seeds, say, table
from benchmarks.training import Records
from laplace_lora_ext import PredictiveStatistics
from laplace_lora_ext.metrics import negative_log_likelihood, quality
from laplace_lora_ext.predictive.links import mean_field

TEMPERATURES = torch.logspace(-0.5, 1.5, 25).tolist()
SCALES = torch.logspace(-1.5, 1.5, 13).tolist()
DEGREES_OF_FREEDOM = (1, 2, 4, 8)
QUANTILES = (torch.arange(15) + 0.5) / 15
FIGURES = ["accuracy", "nll", "ece", "least_nll", "ece_at_least_nll"]


class Logits(NamedTuple):
    """Gaussian logits of N texts under every prior precision of the grid.

    Covariances `(grid, N, C, C)` are those of one prior precision for all weights, and of prior
    precisions that see how much each layer moves the logits.
    """

    labels: torch.Tensor
    f_mu: torch.Tensor
    covariances: torch.Tensor
    by_layer: torch.Tensor


class Cure(NamedTuple):
    """Log-probabilities by a place in the grid and another number."""

    name: str
    predict: Callable[[Logits, int, float], torch.Tensor]
    numbers: Sequence[float] = (1.0,)
    places: Sequence[int] = range(len(GRID))


def run(options: Cures) -> Iterator[Result]:
    """Measure every cure on each seed."""
    rows: list[Row] = []
    for seed in options.seeds:
        say(options, seed, "seed")
        pretrained = prepare(options, seed)
        train = pretrained.data["train"]
        validation, rest = held_out(train, seed)
        chosen_on = _logits(pretrained, fine_tune(pretrained, rest, seed), rest, validation)
        test = _logits(pretrained, fine_tune(pretrained, train, seed), train, TEST)
        rows += [{"seed": seed, **row} for row in measured(chosen_on, test)]
        words = (
            f"Task {options.task}. Texts that another training held out choose everything. The "
            "last columns are of the numbers that the test texts prefer."
        )
        yield {"rows": rows}, [words, table(over_seeds(rows, ["name"], FIGURES))]


def measured(chosen_on: Logits, test: Logits) -> Iterator[Row]:
    """How good each cure is, with the numbers that held-out and that test texts prefer."""
    for cure in CURES:
        settings = [(place, number) for place in cure.places for number in cure.numbers]
        chosen, best = (
            min(settings, key=lambda setting: _loss(cure.predict(of_set, *setting), of_set.labels))
            for of_set in (chosen_on, test)
        )
        yield _row(cure.name, cure.predict(test, *chosen), cure.predict(test, *best), test.labels)
    # No number is chosen: each prior precision counts as much as it makes held-out texts likely.
    losses = torch.tensor([_loss(each, chosen_on.labels) for each in _on_grid(chosen_on)])
    weights = (-len(chosen_on.labels) * losses).log_softmax(0)
    mean = (_on_grid(test) + weights[:, None, None]).logsumexp(0)
    yield _row("all prior precisions, weighed", mean, mean, test.labels)


def _row(name: str, chosen: torch.Tensor, best: torch.Tensor, labels: torch.Tensor) -> Row:
    at_best = quality(best.exp(), labels)
    least = {"least_nll": at_best["nll"], "ece_at_least_nll": at_best["ece"]}
    return {"name": name, **quality(chosen.exp(), labels), **least}


def _loss(log_probabilities: torch.Tensor, labels: torch.Tensor) -> float:
    return negative_log_likelihood(log_probabilities.exp(), labels)


def _on_grid(found: Logits) -> torch.Tensor:
    return torch.stack([mean_field(found.f_mu, f_var) for f_var in found.covariances])


def _student(found: Logits, place: int, degrees: float) -> torch.Tensor:
    """Logits of Student's t distribution: a Gaussian whose variance has an inverse gamma one."""
    scales = invgamma.ppf(QUANTILES, degrees / 2, scale=degrees / 2)
    parts = [mean_field(found.f_mu, scale * found.covariances[place]) for scale in scales.tolist()]
    return torch.stack(parts).softmax(-1).mean(0).log()


CURES = (
    Cure("MAP", lambda found, *_: found.f_mu.log_softmax(-1), places=[0]),
    Cure(
        "temperature",
        lambda found, _, tau: (found.f_mu / tau).log_softmax(-1),
        TEMPERATURES,
        places=[0],
    ),
    Cure("prior precision", lambda found, i, _: mean_field(found.f_mu, found.covariances[i])),
    Cure(
        "prior precisions by the scale of each layer",
        lambda found, i, _: mean_field(found.f_mu, found.by_layer[i]),
    ),
    # (H / T + λ)⁻¹ = T (H + T λ)⁻¹: on a grid of prior precisions, T is a factor of the covariance.
    Cure(
        "prior precision, temperature of the likelihood",
        lambda found, i, T: mean_field(found.f_mu, T * found.covariances[i]),
        SCALES,
    ),
    Cure(
        "prior precision, temperature of the logits",
        lambda found, i, tau: mean_field(found.f_mu / tau, found.covariances[i] / tau**2),
        TEMPERATURES,
    ),
    Cure("prior precision, degrees of freedom", _student, DEGREES_OF_FREEDOM),
)


def _logits(
    pretrained: Pretrained, model: AdaptedModel, train: Records, texts: Records | str
) -> Logits:
    la = posterior("lowrank_kron").build(model)
    la.fit(pretrained.loader(train), progress_bar=not pretrained.options.quiet)
    loader = pretrained.loader(texts, PREDICTION_BATCH_SIZE)
    statistics = la.predictive_statistics(loader)
    by_layer = proportions(la, statistics)
    return Logits(
        labels_of(loader),
        statistics.f_mu,
        torch.stack([statistics.moments(value[None]).f_var for value in GRID]),
        torch.stack([statistics.moments(value * by_layer).f_var for value in GRID]),
    )


def proportions(la: Any, statistics: PredictiveStatistics) -> torch.Tensor:
    """Prior precisions by how much a weight of each block moves these logits; geometric mean 1."""
    moved = statistics.variance_by_block(torch.tensor([FIRM])).mean(0)
    sizes = torch.tensor([block.weight.numel() for block in la.blocks])
    scale = (moved / sizes).log()
    return (scale - scale.mean()).exp()

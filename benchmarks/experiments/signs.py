"""How near a few passes come to the exact Fisher: drawn labels and random signs."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from benchmarks.fine_tuning import (
    TEST,
    TRAIN,
    Pretrained,
    Split,
    fine_tune,
    held_out,
    labels_of,
    prepare,
)
from benchmarks.measuring import processor_clock, seconds_of
from benchmarks.methods.posteriors import LINK, lowrank_kron, probabilities
from benchmarks.models import AdaptedModel
from benchmarks.options import Signs
from benchmarks.report import Result, Row, over_seeds, say, table
from laplace_lora_ext import LowRankKronLoRALaplace
from laplace_lora_ext.metrics import negative_log_likelihood, quality
from laplace_lora_ext.predictive.moments import centre
from laplace_lora_ext.predictive.statistics import PredictiveStatistics

KINDS = ("labels", "signs")
BROAD = 1.0  # a prior precision at which the curvature decides


def run(options: Signs) -> Iterator[Result]:
    """Measure each seed."""
    rows: list[Row] = []
    for seed in options.seeds:
        pretrained = prepare(options, seed)
        for row in measured(pretrained, options, seed):
            rows.append(row)
            yield {**pretrained.figures, "rows": rows}, text_of(pretrained, rows)


@dataclass
class Fitted:
    """A fit with a prior of its own, and what it takes to predict the test texts."""

    la: LowRankKronLoRALaplace
    seconds: float
    statistics: PredictiveStatistics

    @classmethod
    def by(
        cls,
        pretrained: Pretrained,
        model: AdaptedModel,
        split: Split,
        **backend_kwargs: object,
    ) -> "Fitted":
        """Fit, and let the held-out texts choose the prior precision alone."""
        la = lowrank_kron(model, backend_kwargs=backend_kwargs)
        training = pretrained.loader(split.rest)
        clock = processor_clock(pretrained.device)
        seconds = seconds_of(lambda: la.fit(training), clock)
        la.optimize_prior_precision(
            method="gridsearch",
            val_loader=pretrained.loader(split.held),
            optimize_scale=False,
        )
        test = pretrained.prediction_loader(pretrained.data[TEST])
        return cls(la, seconds, la.predictive_statistics(test))

    @property
    def chosen(self) -> Tensor:
        """Return the prior precision that held-out texts have chosen."""
        return self.la.prior_precision

    def covariance(self, prior_precision: Tensor) -> Tensor:
        """Compute covariances of the logits, without what all of a text share."""
        moments = self.statistics.moments(prior_precision)
        return centre(moments.f_var.double())

    def predicted(self, prior_precision: Tensor) -> Tensor:
        """Compute class probabilities under a prior precision."""
        moments = self.statistics.moments(prior_precision)
        return probabilities(self.la, moments, LINK)


def measured(pretrained: Pretrained, options: Signs, seed: int) -> Iterator[Row]:
    """Train without a fifth of the texts, and fit by each kind and number of passes."""
    split = held_out(pretrained)
    model = fine_tune(pretrained, split.rest, seed)
    labels = labels_of(pretrained.data[TEST])
    say(options, f"Seed {seed}: the exact Fisher")
    exact = Fitted.by(pretrained, model, split, stochastic=False)
    common = {
        "seed": seed,
        "training_nll": training_nll(pretrained, model, split),
        "confidence": confidence(exact),
    }
    n_exact = len(pretrained.task.classes) - 1
    figures = compared(exact, exact, labels)
    yield {"name": "exact", "passes": n_exact, **common, **figures}
    for kind, n_passes in product(KINDS, options.passes):
        say(options, f"Seed {seed}: {kind}, {n_passes}")
        for number in range(options.draws):
            drawn = Fitted.by(
                pretrained,
                model,
                split,
                stochastic=True,
                draws=kind,
                num_samples=n_passes,
                seed=number,
            )
            figures = compared(drawn, exact, labels)
            yield {"name": kind, "passes": n_passes, **common, **figures}


def training_nll(pretrained: Pretrained, model: AdaptedModel, split: Split) -> float:
    """Return the mean NLL of the texts of the fit: near 0 where they are memorised."""
    logits = model.logits(pretrained.loader(split.rest))
    return negative_log_likelihood(logits.softmax(-1), labels_of(split.rest))


def confidence(fitted: Fitted) -> float:
    """Average the model's largest probabilities of the test texts."""
    largest = fitted.statistics.f_mu.softmax(-1).amax(-1)
    return largest.mean().item()


def compared(fitted: Fitted, exact: Fitted, labels: Tensor) -> Row:
    """Compare a fit with the exact one; the last figure is under its own prior."""
    figures: Row = {"seconds": fitted.seconds}
    priors = {"": exact.chosen, "_broad": torch.full_like(exact.chosen, BROAD)}
    for name, prior_precision in priors.items():
        expected = exact.covariance(prior_precision)
        off = fitted.covariance(prior_precision) - expected
        figures[f"covariance{name}"] = (off.norm() / expected.norm()).item()
        p = fitted.predicted(prior_precision)
        p_off = p - exact.predicted(prior_precision)
        figures[f"probability{name}"] = p_off.abs().max().item()
    nll = quality(fitted.predicted(fitted.chosen), labels)["nll"]
    return {**figures, "prior_precision": fitted.chosen.mean().item(), "nll": nll}


def text_of(pretrained: Pretrained, rows: list[Row]) -> list[str]:
    """Put the figures in words and a table."""
    task = pretrained.task
    words = (
        f"{task.name}: {len(task.classes)} classes, {len(pretrained.data[TRAIN])} "
        "texts, a fifth of which is held out from training and chooses the prior "
        f"precision of each fit; {len(pretrained.data[TEST])} test texts. Covariance "
        "and probability are how far predictions are from those of the exact Fisher, "
        "relatively in the mean and at most, under its prior precision, and where it "
        f'is {BROAD:g} ("broad").'
    )
    figures = [key for key in rows[0] if key not in ("name", "passes", "seed")]
    return [words, table(over_seeds(rows, ["name", "passes"], figures))]

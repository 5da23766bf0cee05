"""What predictions lose that compare only the classes that matter."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.fine_tuning import (
    PREDICTION_BATCH_SIZE,
    TEST,
    TRAIN,
    Pretrained,
    fine_tune,
    prepare,
)
from benchmarks.held_out import held_out
from benchmarks.methods.method import labels_of
from benchmarks.methods.posteriors import LINK, lowrank_kron, probabilities
from benchmarks.options import Contrasts
from benchmarks.report import Result, Row, say, table
from laplace_lora_ext import LowRankKronLoRALaplace
from laplace_lora_ext.metrics import quality
from laplace_lora_ext.predictive.contrasts import NO_CLASS
from laplace_lora_ext.predictive.statistics import PredictiveStatistics

# Where a posterior is broader than the chosen one, what is not known matters more.
BROADER = (1.0, 10.0, 100.0)


def run(options: Contrasts) -> Iterator[Result]:
    """Measure each seed."""
    rows: list[Row] = []
    for seed in options.seeds:
        pretrained = prepare(options, seed)
        rows += measured(pretrained, options, seed)
        figures = {**pretrained.figures, "rows": rows}
        yield figures, text_of(pretrained, rows)


@dataclass
class Compared:
    """Probabilities of the test texts under one prior, by all contrasts and by some."""

    by_all: list[Tensor]
    by_some: list[Tensor]


def measured(
    pretrained: Pretrained,
    options: Contrasts,
    seed: int,
) -> Iterator[Row]:
    """Train without a fifth of the texts, which choose the prior, and predict."""
    rest, held = held_out(pretrained)
    model = fine_tune(pretrained, rest, seed)
    say(options, f"Seed {seed}: fit and search")
    la = lowrank_kron(model)
    la.fit(pretrained.loader(rest), progress_bar=not options.quiet)
    la.optimize_prior_precision(method="gridsearch", val_loader=pretrained.loader(held))
    chosen = la.prior_precision.clone()

    say(options, f"Seed {seed}: all contrasts of the test texts")
    n_all = len(pretrained.task.classes) - 1
    compared = {factor: Compared([], []) for factor in BROADER}
    of_model = []
    n_known = 0
    test = pretrained.data[TEST]
    # In small batches on an accelerator too: all contrasts take much memory.
    for batch in pretrained.loader(test, PREDICTION_BATCH_SIZE):
        # What all contrasts take is let go of after each batch: it is much.
        exact = la.predictive_statistics(
            [batch], device=pretrained.device, link_approx="probit"
        )
        some = la.predictive_statistics([batch], device=pretrained.device)
        of_model.append(exact.f_mu.softmax(-1).cpu())
        n_known += n_contrasts_of(some, n_all)
        for factor, pair in compared.items():
            la.prior_precision = chosen / factor
            pair.by_all.append(_predicted(la, exact))
            pair.by_some.append(_predicted(la, some))
    la.prior_precision = chosen

    labels = labels_of(test)
    of_map = quality(torch.cat(of_model), labels)
    yield {"name": "MAP", "seed": seed, **of_map}
    for factor, pair in compared.items():
        by_all = torch.cat(pair.by_all)
        by_some = torch.cat(pair.by_some)
        of_all = quality(by_all, labels)
        of_some = quality(by_some, labels)
        prior_precision = (chosen / factor).mean().item()
        common: Row = {
            "seed": seed,
            "logit_scale": la.logit_scale,
            "broader": factor,
            "prior_precision": prior_precision,
        }
        yield {"name": "all", **common, "contrasts": float(n_all), **of_all}
        yield {
            "name": "those that matter",
            **common,
            "contrasts": n_known / len(labels),
            **of_some,
            "nll_beside_all": of_some["nll"] - of_all["nll"],
            "largest_difference": (by_some - by_all).abs().max().item(),
        }


def _predicted(
    la: LowRankKronLoRALaplace,
    statistics: PredictiveStatistics,
) -> Tensor:
    """Compute class probabilities under the prior that a posterior has now."""
    moments = statistics.moments(la.prior_precision)
    return probabilities(la, moments, LINK)


def n_contrasts_of(statistics: PredictiveStatistics, n_all: int) -> int:
    """Count the contrasts of all examples."""
    # With few classes all of them are compared, and none are listed.
    if statistics.classes is None:
        return n_all * len(statistics)
    # Each class behind the first one is compared with it.
    is_compared = statistics.classes[:, 1:] != NO_CLASS
    return int(is_compared.sum())


def text_of(
    pretrained: Pretrained,
    rows: list[Row],
) -> list[str]:
    """Put the figures in words and a table."""
    task = pretrained.task
    words = (
        f"{task.name}: {len(task.classes)} classes. A fifth of "
        f"{len(pretrained.data[TRAIN])} texts is held out from training, and chooses "
        "prior precision and scale of the logits by the contrasts that matter; "
        f"{len(pretrained.data[TEST])} test texts, predicted with that prior and with "
        "broader posteriors, by all contrasts and by those that matter. The last "
        "column is the largest difference of a probability."
    )
    return [words, table(rows)]

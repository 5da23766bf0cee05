"""Queues: how many texts are decided alone, and how often that is wrong."""

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.fine_tuning import MEMBER_SEEDS, TEST, fine_tune, prepare
from benchmarks.held_out import held_out
from benchmarks.methods.method import fit_temperature, labels_of
from benchmarks.options import Review
from benchmarks.report import Result, Row, say, table
from laplace_lora_ext import Laplace
from laplace_lora_ext.predictive.review import review

METHODS = ("trained model", "temperature", "three adapters", "posterior")
EXPLAINED = (
    "Each method promises an accuracy of what it decides alone: the mean of its own "
    "probabilities. The gap is the realised accuracy less the promise, over seeds in "
    "the mean and the farthest from 0. The share at a realised accuracy is what could "
    "be decided alone if the test labels were known. All learn four fifths of the "
    "texts; the others choose temperature and prior."
)


def run(options: Review) -> Iterator[Result]:
    """Divide the test texts of each seed by each method."""
    measured: dict[str, list[Row]] = defaultdict(list)
    for seed in options.seeds:
        pretrained = prepare(options, seed)
        rest, held = held_out(pretrained)
        tests = {TEST: pretrained.prediction_loader(pretrained.data[TEST])}
        held_loader = pretrained.loader(held)
        models = []
        for number in range(3):
            say(options, f"Seed {seed}: training {number + 1} of 3")
            models.append(fine_tune(pretrained, rest, seed + MEMBER_SEEDS * number))
        model, labels = models[0], labels_of(pretrained.data[TEST])
        logits = model.logits(tests[TEST])
        temperature = fit_temperature(model.logits([*held_loader]), labels_of(held))
        la = Laplace(
            model.model, "classification", class_token_ids=model.class_token_ids
        )
        la.fit(pretrained.loader(rest))
        la.optimize_prior_precision(method="gridsearch", val_loader=held_loader)
        of_adapters = [each.probabilities(tests)[TEST] for each in models]
        probabilities = (
            logits.softmax(-1),
            (logits / temperature).softmax(-1),
            torch.stack(of_adapters).mean(0),
            torch.as_tensor(la.predict_proba(tests[TEST])),
        )
        for name, p in zip(METHODS, probabilities, strict=True):
            measured[name].append(
                {"seed": seed, **figures_of(p, labels, options.accuracy)}
            )
        rows = [averaged(name, of_seeds) for name, of_seeds in measured.items()]
        yield {"queues": dict(measured)}, [EXPLAINED, table(rows)]


def figures_of(probabilities: Tensor, labels: Tensor, accuracy: float) -> Row:
    """Measure one queue.

    Parameters
    ----------
    probabilities : torch.Tensor
        `(N, C)`
    labels : torch.Tensor
        `(N,)`
    accuracy : float
        of what is decided alone

    Returns
    -------
    dict
        "gap" is None where nothing is decided alone
    """
    queue = review(probabilities, accuracy)
    is_right = (queue.labels == labels).double()
    surest_first = is_right[queue.order.flip(0)]
    n_texts = torch.arange(1, len(labels) + 1)
    is_enough = surest_first.cumsum(0) / n_texts >= accuracy
    gap = None
    if queue.decided.any():
        gap = is_right[queue.decided].mean().item() - queue.promise
    return {
        "share_at_promise": queue.share,
        "gap": gap,
        "share_at_realised": (is_enough * n_texts).max().item() / len(labels),
    }


def averaged(name: str, of_seeds: list[Row]) -> Row:
    """Average a method's figures over seeds; of the gap show the worst one too."""
    gaps = [row["gap"] for row in of_seeds if row["gap"] is not None]

    def mean(key: str) -> float:
        return sum(row[key] for row in of_seeds) / len(of_seeds)

    return {
        "name": name,
        "share_at_promise": mean("share_at_promise"),
        "mean_gap": sum(gaps) / len(gaps) if gaps else None,
        "worst_gap": max(gaps, key=abs, default=None),
        "share_at_realised": mean("share_at_realised"),
    }

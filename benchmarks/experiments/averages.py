"""Weights averaged over the end of each stage, beside a rate that decays to zero."""

from collections.abc import Iterator
from typing import Any

import torch
import transformers

from benchmarks.experiments.calibration import Costs, figures_of, text_of
from benchmarks.experiments.stages import FIRST_STAGE, HELD_OUT_TEXTS, Trial
from benchmarks.fine_tuning import prepare, untrained
from benchmarks.held_out import HELD
from benchmarks.methods.method import Method, fit_temperature
from benchmarks.methods.priors import Prediction
from benchmarks.methods.sampled import sampled
from benchmarks.methods.swag import Iterates
from benchmarks.models import AdaptedModel
from benchmarks.options import Averages
from benchmarks.report import Result, Row
from benchmarks.training import Averaged, AveragedProducts, AveragedWithPath, Recipe
from laplace_lora_ext.metrics import negative_log_likelihood
from laplace_lora_ext.training.stages import SECOND_STAGE

FIGURES = ("accuracy", "nll", "ece", "brier", "aurc", "chosen")


def run(options: Averages) -> Iterator[Result]:
    """Measure each seed, and report after each way to train."""
    ways: list[tuple[str, Recipe | None, Recipe | None]] = [("decayed", None, None)]
    for share in options.shares:
        recipe = Averaged(share)
        ways.append((f"averaged over {share:g}", recipe, recipe))
    if options.second_decays:
        share, *_ = options.shares
        ways.append((f"first stage averaged over {share:g}", Averaged(share), None))
    rows: list[Row] = []
    for seed in options.seeds:
        pretrained = prepare(options, seed)
        trial = Trial(pretrained, options, seed)
        for row in by_path(trial, AveragedWithPath(options.shares[0])):
            rows.append(row)
        products = AveragedProducts(options.shares[0])
        ways = [*ways[:5], ("products averaged", products, products)]
        for way, first, second in ways:
            for row in trial.by_recipes(first, second):
                rows.append(row | {"name": f"{row['name']}, {way}"})
            yield figures_of(pretrained, rows), text_of(pretrained, rows, FIGURES)


SCALES = torch.logspace(-3, 3, 13).tolist()


def by_path(trial: Trial, recipe: AveragedWithPath) -> Iterator[Row]:
    """Measure SWAG's covariance around averaged weights; held-out texts scale it."""
    pre = trial.pretrained
    model = untrained(pre, trial.seed)
    adapted = AdaptedModel(model, pre.class_token_ids)

    def stage(records: Any, share: float) -> Iterates:
        transformers.set_seed(trial.seed)
        kept = pre.train_or_read(
            adapted.logits_model,
            records,
            pre.hyperparameters.for_share(share),
            trial.seed,
            recipe,
        )
        path = list(kept.values())[:-1]
        return Iterates.of(path)

    def log_p(noise: Iterates, scale: float, loaders: Any) -> dict[str, Any]:
        def scaled(generator: torch.Generator) -> Any:
            return {n: scale * w for n, w in noise(generator).items()}

        return sampled(adapted, scaled).predict(loaders)

    noise = stage(trial.rest, FIRST_STAGE)
    best = (float("inf"), 0.0)
    for scale in (0.0, *SCALES):
        p = log_p(noise, scale, trial.held_loaders)[HELD]
        T = fit_temperature(p.log(), trial.held_labels)
        loss = negative_log_likelihood((p.log() / T).softmax(-1), trial.held_labels)
        if loss < best[0]:
            best = (loss, scale, T)
    _, scale, T = best
    noise = stage(trial.records, SECOND_STAGE)
    probabilities = {}
    for name, p in log_p(noise, scale, trial.loaders).items():
        probabilities[name] = (p.log() / T).softmax(-1)
    yield trial.tests.row(
        Method("path", "In stages, averaged, posterior by the path"),
        Prediction(probabilities, HELD_OUT_TEXTS, chosen=scale),
        Costs(predict_seconds=0.0, forward_passes=10.0),
    )

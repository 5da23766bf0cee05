"""Weights averaged over the end of each stage, beside a rate that decays to zero."""

from collections.abc import Iterator

from benchmarks.experiments.calibration import figures_of, text_of
from benchmarks.experiments.stages import Trial
from benchmarks.fine_tuning import prepare
from benchmarks.options import Averages
from benchmarks.report import Result, Row
from benchmarks.training import MAXIMUM_LIKELIHOOD, Averaged, Recipe

FIGURES = ("accuracy", "nll", "ece", "brier", "aurc", "chosen")


def run(options: Averages) -> Iterator[Result]:
    """Measure each seed, and report after each way to train."""
    decayed = MAXIMUM_LIKELIHOOD
    ways: list[tuple[str, Recipe, Recipe]] = [("decayed", decayed, decayed)]
    for share in options.shares:
        recipe = Averaged(share)
        ways.append((f"averaged over {share:g}", recipe, recipe))
    if options.second_decays:
        share, *_ = options.shares
        ways.append((f"first stage averaged over {share:g}", Averaged(share), decayed))
    rows: list[Row] = []
    for seed in options.seeds:
        pretrained = prepare(options, seed)
        trial = Trial(pretrained, options, seed)
        for way, first, second in ways:
            for row in trial.by_recipes(first, second):
                rows.append(row | {"name": f"{row['name']}, {way}"})
            yield figures_of(pretrained, rows), text_of(pretrained, rows, FIGURES)

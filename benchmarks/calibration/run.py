"""The calibration benchmark: every method on models fine-tuned with several seeds."""

import argparse
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.calibration.methods import WITHOUT_POSTERIOR
from benchmarks.calibration.posteriors import posteriors
from benchmarks.calibration.preparation import prepare
from benchmarks.calibration.report import write_report
from benchmarks.calibration.text_task import TextTask
from benchmarks.calibration.trial import Trial
from benchmarks.report import describe_machine, package_versions, settings_of


def calibrate(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark.

    Parameters
    ----------
    arguments : argparse.Namespace
        Options of the command line.

    Returns
    -------
    figures : dict
        Everything that was measured, as in calibration.json.
    """
    _check_methods(arguments.methods or ())
    for known in (
        "The posterior is over lora_A and lora_B",  # an encoder's head stays at its MAP value
        "By default `link_approx`",  # every prediction names its link
        r"\d+ of \d+ predictions have another most probable class",  # a column of the table
    ):
        warnings.filterwarnings("ignore", message=known)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    arguments.output.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {
        "settings": settings_of(arguments),
        "machine": {"device": device, **describe_machine(device)},
        "versions": package_versions(),
        "methods": [],
    }
    for seed in arguments.seeds:
        pretrained = prepare(arguments, seed, device)
        trial = Trial(pretrained, arguments.samples, seed, arguments.methods)
        figures["methods"] += trial.measure()
        if seed == arguments.seeds[0]:
            figures |= {
                "task": _describe(pretrained.task),
                "hyperparameters": vars(pretrained.hyperparameters),
                "variance_by_layer": trial.variance_by_layer(),
                "jacobians_by_margin": trial.jacobians_by_margin(),
                "along_training": trial.measure_along_training() if arguments.curves else [],
            }
        # After each seed: a run of hours that is cut off has not been in vain.
        report = write_report(figures, arguments.output)
    print(report)
    return figures


def _check_methods(names: Sequence[str]) -> None:
    known = [*WITHOUT_POSTERIOR, *(posterior.name for posterior in posteriors(1, False))]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"No method is called {unknown[0]!r}; known are: {', '.join(known)}.")


def _describe(task: TextTask) -> dict[str, Any]:
    return {
        "name": task.name,
        "classes": list(task.classes),
        "train": len(task.train),
        "test": len(task.test),
        "shifted": {name: len(examples) for name, examples in task.shifted.items()},
    }

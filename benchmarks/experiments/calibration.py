"""Every method on models fine-tuned with several seeds, under the paper's two protocols."""

import warnings
from dataclasses import asdict

import torch

from benchmarks.experiments.calibration_report import draw, text_of
from benchmarks.experiments.calibration_trial import CONTESTANTS, Trial
from benchmarks.fine_tuning import device_of, prepare
from benchmarks.methods import METHODS
from benchmarks.models import MissingDataError
from benchmarks.options import Calibration
from benchmarks.report import Figures, provenance, write
from benchmarks.tasks.task import Task

KNOWN_WARNINGS = (
    "The posterior is over lora_A and lora_B",  # an encoder's head stays at its MAP value
    "By default `link_approx`",  # every prediction names its link
    r"\d+ of \d+ predictions have another most probable class",  # a column of the table
)


def run(options: Calibration) -> Figures:
    """Measure every seed, and write figures and report after each."""
    methods = chosen_methods(options.methods)
    for known in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=known)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    options.output.mkdir(parents=True, exist_ok=True)
    figures: Figures = {**provenance(options, device_of(options)), "methods": []}
    report = ""
    for seed in options.seeds:
        try:
            pretrained = prepare(options, seed)
        except MissingDataError as error:
            raise SystemExit(str(error)) from None
        trial = Trial(pretrained, options.samples, seed, methods)
        figures["methods"] += trial.measure()
        if seed == options.seeds[0]:
            figures |= {
                "task": _describe(pretrained.task),
                "hyperparameters": asdict(pretrained.hyperparameters),
                "variance_by_layer": trial.variance_by_layer(),
                "jacobians_by_margin": trial.jacobians_by_margin(),
                "along_training": trial.measure_along_training() if options.curves else [],
            }
        # After each seed: a run of hours that is cut off has not been in vain.
        report = text_of(figures)
        write(options.output, "calibration", figures, report)
        draw(figures, options.output)
    print(report)
    return figures


def chosen_methods(names: tuple[str, ...] | None) -> list[str]:
    """Keys of the methods that are asked for, by key or title, in the order of the list."""
    known = [METHODS[key] for key in CONTESTANTS]
    for name in names or ():
        if not any(name in (method.key, method.title) for method in known):
            listed = ", ".join(f"{method.key} ({method.title})" for method in known)
            raise SystemExit(f"No method is called {name!r}; known are: {listed}.")
    return [
        method.key
        for method in known
        if names is None or method.key in names or method.title in names
    ]


def _describe(task: Task) -> Figures:
    return {
        "name": task.name,
        "classes": list(task.classes),
        "train": len(task.train),
        "test": len(task.test),
        "shifted": {name: len(examples) for name, examples in task.shifted.items()},
    }

"""Every method on models fine-tuned with several seeds, under the paper's two protocols."""

from dataclasses import asdict

from benchmarks.experiments.calibration_report import draw, text_of
from benchmarks.experiments.calibration_trial import CONTESTANTS, Trial
from benchmarks.fine_tuning import prepare
from benchmarks.measuring import set_up
from benchmarks.methods import METHODS
from benchmarks.models import device_of
from benchmarks.options import Calibration
from benchmarks.report import Figures, provenance, write


def run(options: Calibration) -> Figures:
    """Measure every seed, and write figures and report after each."""
    methods = chosen_methods(options.methods)
    set_up(options)
    figures: Figures = {**provenance(options, device_of(options.device)), "methods": []}
    for seed in options.seeds:
        pretrained = prepare(options, seed)
        trial = Trial(pretrained, options.samples, seed, methods)
        figures["methods"] += trial.measure()
        if seed == options.seeds[0]:
            figures |= {
                "task": pretrained.description,
                "hyperparameters": asdict(pretrained.hyperparameters),
                "variance_by_layer": trial.variance_by_layer(),
                "jacobians_by_margin": trial.jacobians_by_margin(),
                "along_training": trial.measure_along_training() if options.curves else [],
            }
        # After each seed: a run of hours that is cut off has not been in vain.
        write(options.output, "calibration", figures, text_of(figures))
        draw(figures, options.output)
    return figures


def chosen_methods(names: tuple[str, ...] | None) -> list[str]:
    """Keys of the methods that are asked for, by key or title; all where none are."""
    known = [METHODS[key] for key in CONTESTANTS]
    asked = set(names or CONTESTANTS)
    chosen = [method for method in known if asked & {method.key, method.title}]
    unknown = asked - {name for method in chosen for name in (method.key, method.title)}
    if unknown:
        listed = ", ".join(f"{method.key} ({method.title})" for method in known)
        raise SystemExit(f"No method is called {unknown.pop()!r}; known are: {listed}.")
    return [method.key for method in chosen]

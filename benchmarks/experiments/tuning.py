"""What it costs to choose a prior precision, and what the choices are worth."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks import report
from benchmarks.fine_tuning import PREDICTION_BATCH_SIZE, TEST, fine_tune, prepare
from benchmarks.measuring import seconds_of
from benchmarks.methods import posterior
from benchmarks.methods.priors import STRUCTURES
from benchmarks.options import Tuning
from benchmarks.report import Result, Row
from laplace_lora_ext import PredictiveStatistics
from laplace_lora_ext.metrics import quality

REPETITIONS = 3
Searches = dict[str, dict[str, Any]]  # arguments of `optimize_prior_precision` by a name
LINKS = ("probit", "mc", "mean_field")
DRAWN = {"marglik": "Evidence, nats", "val_gd": "Validation loss, nats"}


def run(options: Tuning) -> Iterator[Result]:
    """Time the searches, measure their choices; then draw their paths and the layers' shares."""
    pretrained = prepare(options, options.seed, options.validation_examples)
    pretrained = pretrained.for_epochs(options.epochs)
    model = fine_tune(pretrained, pretrained.data["train"], options.seed)
    train = pretrained.loader("train")
    validation = pretrained.loader("validation", PREDICTION_BATCH_SIZE)
    la = posterior("lowrank_kron").build(model)
    la.fit(train, progress_bar=not options.quiet)
    seconds: dict[str, float] = {}

    def timed(name: str, job: Callable[[], object]) -> None:
        seconds[name] = median(seconds_of(job) for _ in range(REPETITIONS))

    def predict() -> None:
        for batch in validation:
            la(batch, link_approx="probit")

    predict()  # the first pass also warms up
    timed("One prediction pass", predict)
    statistics = la.predictive_statistics(validation)
    timed("Predictive statistics, one pass", lambda: la.predictive_statistics(validation))
    searches = searches_of(statistics, options)
    grid = searches["gridsearch, probit"] | {"val_loader": validation}
    timed("gridsearch, that pass included", lambda: la.optimize_prior_precision(**grid))
    test = la.predictive_statistics(pretrained.loader(TEST, PREDICTION_BATCH_SIZE))
    choices = list(_choices(la, searches, test, options))
    la.optimize_prior_precision(**searches["marglik, layerwise"])
    shares = la.variance_by_layer(test)
    for name, search in searches.items():
        if search.get("link_approx") in (None, "probit"):  # other links would take as long
            timed(name, lambda search=search: la.optimize_prior_precision(**search))
    # The host's class, for which one text at a time is cheapest.
    points, size = options.stock_grid_size, options.grid_size
    grid |= {"val_loader": pretrained.loader("validation", 1), "grid_size": points}
    stock = posterior("stock_kron").build(replace(model, model=copy.deepcopy(model.model)))
    stock.fit(train)
    taken = seconds_of(lambda: stock.optimize_prior_precision(**grid))
    seconds[f"Stock Kron, gridsearch of {points}"] = taken
    seconds[f"the same for {size}, in proportion"] = taken * size / points
    one_pass = seconds["One prediction pass"]
    costs = [{"name": key, "seconds": x, "passes": x / one_pass} for key, x in seconds.items()]
    figures = {
        "data": pretrained.description,
        "statistics": repr(statistics),
        "costs": costs,
        "choices": choices,
        "variance_by_layer": shares,
    }
    measured = [f"{link}_{key}" for link in LINKS for key in ("nll", "ece", "accuracy")]
    parts = [
        f"{len(statistics)} validation texts, a grid of {size}, {options.steps} steps of val_gd. "
        "Searches are given the statistics.",
        repr(statistics),
        report.table(costs, ["name", "seconds", "passes"]),
        f"{len(test)} test texts; layerwise prior precisions as geometric means.",
        report.table(choices, ["name", "prior_precision", *measured]),
    ]
    yield figures, parts
    panels = {
        title: {x["name"]: (x["step"], x["objective"]) for x in choices if way in x["name"]}
        for way, title in DRAWN.items()
    }
    report.draw_lines(options.output / "tuning.png", panels, "Step")
    report.draw_shares(shares, options.output / "variance_by_layer.png")


def searches_of(validation: PredictiveStatistics, options: Tuning) -> Searches:
    """Every way to choose."""
    found: Searches = {}
    for structure in STRUCTURES:
        found[f"marglik, {structure}"] = {"method": "marglik", "prior_structure": structure}
    grid = {"method": "gridsearch", "grid_size": options.grid_size, "n_samples": 1000}
    descent = {"method": "val_gd", "n_steps": options.steps, "n_samples": 100}
    for link in LINKS:
        given = {"val_loader": validation, "link_approx": link}
        found[f"gridsearch, {link}"] = grid | given
        for structure in STRUCTURES:
            found[f"val_gd, {structure}, {link}"] = descent | given | {"prior_structure": structure}
    return found


def _choices(
    la: Any, searches: Searches, test: PredictiveStatistics, options: Tuning
) -> Iterator[Row]:
    """Measure every choice and MAP on the test texts."""
    for name, search in searches.items():
        history = la.optimize_prior_precision(**search)
        moments = test.moments(la.prior_precision)
        predicted = {
            link: la(moments, link_approx=link, n_samples=options.samples).cpu() for link in LINKS
        }
        yield {
            "name": name,
            "prior_precision": la.prior_precision.log().mean().exp().item(),
            "prior_precisions": la.prior_precision.tolist(),
            "objective": history.objective.tolist(),
            "step": history.step.tolist(),
            **_qualities(predicted, test),
        }
    without = {link: test.f_mu.softmax(-1) for link in LINKS}
    yield {"name": "MAP", "prior_precision": None, **_qualities(without, test)}


def _qualities(predicted: dict[str, Any], test: PredictiveStatistics) -> Row:
    labels: Any = test.targets
    return {
        f"{link}_{key}": value
        for link, probabilities in predicted.items()
        for key, value in quality(probabilities, labels).items()
    }

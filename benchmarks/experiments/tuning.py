"""What it costs to choose a prior precision, and what the choices are worth."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.fine_tuning import PREDICTION_BATCH_SIZE, TEST, fine_tune, prepare
from benchmarks.measuring import seconds_of
from benchmarks.methods import posterior
from benchmarks.methods.priors import STRUCTURES
from benchmarks.options import Tuning
from benchmarks.report import Result, Row
from laplace_lora_ext import LinearizedModel, PredictiveStatistics
from laplace_lora_ext.metrics import quality

REPETITIONS = 3
LINKS = ("probit", "mc", "mean_field")
DRAWN = {"marglik": "Evidence, nats", "val_gd": "Validation loss, nats"}


class Search(NamedTuple):
    """A way to choose, in the words of `optimize_prior_precision`, with its options."""

    method: str
    structure: str
    link: str
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return ", ".join(filter(None, self[:3]))

    @property
    def keywords(self) -> dict[str, Any]:
        """The arguments of `optimize_prior_precision`."""
        own = {"method": self.method, "prior_structure": self.structure, "link_approx": self.link}
        return {key: value for key, value in own.items() if value} | self.options


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
    linearized = la.linearize(train)
    timed("Linearised model, one pass over the training texts", lambda: la.linearize(train))
    searches = list(searches_of(statistics, linearized, options))
    (grid,) = (each.keywords for each in searches if each.name == "gridsearch, probit")
    grid |= {"val_loader": validation}
    timed("gridsearch, that pass included", lambda: la.optimize_prior_precision(**grid))
    test = la.predictive_statistics(pretrained.loader(TEST, PREDICTION_BATCH_SIZE))
    choices, shares = _choices(la, searches, test, options)
    for each in searches:
        if each.link in ("", "probit"):  # other links would take as long
            timed(each.name, lambda each=each: la.optimize_prior_precision(**each.keywords))
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
        "Searches are given the statistics or the linearised model.",
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


def searches_of(
    validation: PredictiveStatistics, linearized: LinearizedModel, options: Tuning
) -> Iterator[Search]:
    """Every way to choose."""
    for method in ("marglik", "linearized_marglik", "linearized_loo"):
        data = {} if method == "marglik" else {"train_loader": linearized}
        for structure in STRUCTURES:
            yield Search(method, structure, "", data)
    grid = {"val_loader": validation, "grid_size": options.grid_size, "n_samples": 1000}
    descent = {"val_loader": validation, "n_steps": options.steps, "n_samples": 100}
    for link in LINKS:
        yield Search("gridsearch", "", link, grid)
        for structure in STRUCTURES:
            yield Search("val_gd", structure, link, descent)


def _choices(
    la: Any, searches: list[Search], test: PredictiveStatistics, options: Tuning
) -> tuple[list[Row], dict[str, float]]:
    """Measure every choice and MAP on the test texts; also the layers' shares of the variance."""
    shares, rows = {}, []
    for search in searches:
        history = la.optimize_prior_precision(**search.keywords)
        if search.name == "marglik, layerwise":
            shares = la.variance_by_layer(test).by_block
        row: Row = {
            "name": search.name,
            "prior_precision": la.prior_precision.log().mean().exp().item(),
            "prior_precisions": la.prior_precision.tolist(),
            "objective": history.objective.tolist(),
            "step": history.step.tolist(),
        }
        moments = test.moments(la.prior_precision)
        for link in LINKS:
            found = la(moments, link_approx=link, n_samples=options.samples).cpu()
            row |= _of_link(link, found, test)
        rows.append(row)
    without: Row = {"name": "MAP", "prior_precision": None}
    for link in LINKS:
        without |= _of_link(link, test.f_mu.softmax(-1), test)
    return [*rows, without], shares


def _of_link(link: str, probabilities: Any, test: PredictiveStatistics) -> Row:
    labels: Any = test.targets
    return {f"{link}_{key}": value for key, value in quality(probabilities, labels).items()}

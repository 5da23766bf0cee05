"""Methods by name and as objects: options, starts, and failures."""

import math
import warnings
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import Field, FrozenInstanceError, fields
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader

from laplace_lora_ext import GridSearch, Marglik, TuningHistory
from laplace_lora_ext.tuning import METHODS, PREDICTIONS, required_data
from tests.support.models import ragged_batches, without_labels
from tests.support.posteriors import (
    GRID,
    OURS_AND_A_HOSTS,
    PRIORS_ALONE,
    another_training,
    count_forward_passes,
    fitted,
    generator,
    plain_regression,
)
from tests.support.ranks import Texts


def sum_of_squares(
    outputs: Tensor,
    targets: Tensor,
) -> Tensor:
    """A loss of the user's own."""
    return outputs.square().sum()


def train_again(examples: Any) -> nn.Module:
    return another_training()


# Of each method, options that all differ from their defaults and matter for the result.
OPTIONS = {
    "agreement": {
        "train_loader": ragged_batches(),
        "init_prior_prec": 3.0,
        "prior_structure": "layerwise",
        "max_change": 0.3,
        "n_samples": 7,
    },
    "marglik": {
        "n_steps": 4,
        "lr": 0.3,
        "tolerance": 0,
        "prior_structure": "layerwise",
    },
    "gridsearch": {
        "val_loader": ragged_batches(seed=7),
        "pred_type": "nn",
        "link_approx": "mc",
        "n_samples": 2,
        "loss": sum_of_squares,
        "log_prior_prec_min": -1,
        "log_prior_prec_max": 2,
        "grid_size": 3,
        "log_prior_prec_base": 2.0,
    },
    "val_gd": {
        "val_loader": ragged_batches(seed=7),
        "init_prior_prec": 3.0,
        "prior_structure": "layerwise",
        "link_approx": "mc",
        "n_samples": 7,
        "n_steps": 4,
        "lr": 0.3,
        "batch_size": 3,
    },
    "second_training": {
        "train": train_again,
        "train_loader": DataLoader(Texts(), batch_size=2),
        "held_out": 0.4,
        "search": partial(GridSearch, link_approx="probit", grid_size=9),
    },
}
FEW = {"gridsearch": GRID, "val_gd": {"n_steps": 1}}
DATA = {name: required_data(name) for name in METHODS}
# Methods whose statistics are also made in the context that a test is about.
TAKE_STATISTICS = ("agreement", "val_gd")
each_method = pytest.mark.parametrize("name", METHODS)


def fields_of(name: str) -> dict[str, Field]:
    """Find a method's options."""
    return {field.name: field for field in fields(METHODS[name])}


# --- options --------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["gridsearch", "val_gd"])
def test_searches_score_the_link_of_predict_unless_told_another(validation, method):
    def objective(**link):
        history = fitted().optimize_prior_precision(
            method=method,
            val_loader=validation,
            **link,
            **FEW[method],
        )
        return history.objective

    found = objective()
    by_mean_field = objective(link_approx="mean_field")
    by_probit = objective(link_approx="probit")
    assert torch.equal(found, by_mean_field)
    assert not torch.equal(found, by_probit)


@each_method
def test_a_call_by_name_builds_the_object_of_its_options(name, monkeypatch):
    built = []

    def note(self: Any, la: Any) -> None:
        built.append(self)

    monkeypatch.setattr(METHODS[name], "__call__", note)
    options = OPTIONS[name] | {"progress_bar": True}
    fitted().optimize_prior_precision(method=name, **options)
    (found,) = built
    expected = METHODS[name](**options)
    assert vars(found) == vars(expected)


@each_method
def test_options_that_these_tests_pass_are_no_defaults(name):
    # Otherwise they could be forgotten on the way, and no test would see it.
    options = fields_of(name)
    for option, value in OPTIONS[name].items():
        assert value != options[option].default, option


@each_method
def test_an_object_keeps_its_options(name):
    method = METHODS[name](**OPTIONS[name])
    with pytest.raises(FrozenInstanceError):
        method.progress_bar = True


def options_of_all() -> dict[str, Any]:
    """Join the options of all methods."""
    options = {}
    for of_method in OPTIONS.values():
        options |= of_method
    return options


@each_method
def test_options_of_others_are_refused_and_named(name):
    la = fitted(prior_precision=0.4)
    of_all = options_of_all()
    # The host passes how to predict whatever the method is.
    ignored = PREDICTIONS if name == "marglik" else set()
    foreign = of_all.keys() - fields_of(name).keys() - ignored
    # Otherwise the loop below would ask nothing.
    assert foreign
    assert not ignored - of_all.keys()
    for option in foreign:
        got = rf'method="{name}" needs .*got .*{option}.*'
        message = f"{got}; its options are .*prior_structure"
        options = OPTIONS[name] | {option: of_all[option]}
        with pytest.raises(ValueError, match=message):
            la.optimize_prior_precision(method=name, **options)
    assert la.prior_precision.tolist() == [0.4]


@each_method
def test_an_object_has_its_options_already(name):
    la = fitted(prior_precision=0.4)
    method = METHODS[name](**OPTIONS[name])
    message = rf"Pass n_steps, grid_size to {METHODS[name].__name__}"
    with pytest.raises(ValueError, match=message):
        la.optimize_prior_precision(method=method, n_steps=5, grid_size=7)
    assert la.prior_precision.tolist() == [0.4]


# --- arguments that make no sense -----------------------------------------------------


def bad(
    message: str,
    **arguments: Any,
) -> tuple[dict[str, Any], str]:
    """Pair the arguments of a call with what its error says."""
    return arguments, message


ONE_BELOW_0 = torch.ones(8)
ONE_BELOW_0[-1] = -1

# Names of a method's data stand for them.
BAD = [
    bad("is none of", method="newton"),
    bad("needs val_loader", method="gridsearch"),
    bad("needs val_loader", method="val_gd"),
    bad("needs train_loader", method="agreement"),
    bad("needs either the trainer", method="second_training"),
    bad(
        "no data",
        method="agreement",
        train_loader=[],
        init_prior_prec=7.0,
    ),
    bad(
        "links",
        method="val_gd",
        val_loader="batches",
        link_approx="bridge",
    ),
    bad(
        "got val_loader, pred_type; its options",
        method="val_gd",
        val_loader="batches",
        pred_type="nn",
    ),
    bad("need labels", method="val_gd", val_loader="unlabelled"),
    bad("need labels", method="gridsearch", val_loader="unlabelled"),
    bad("The loader has no data", method="gridsearch", val_loader=[]),
    bad(
        "above 0",
        method="val_gd",
        val_loader="batches",
        init_prior_prec=-1.0,
    ),
    bad("for regression", optimize_sigma_noise=True),
    bad("above 0", init_prior_prec=0.0),
    bad("above 0", init_prior_prec=ONE_BELOW_0),
    bad("scalar or per-layer", prior_structure="diag"),
    bad("'layers' is none of", prior_structure="layers"),
    bad(
        "max_examples must be at",
        method="agreement",
        train_loader=[],
        max_examples=0,
    ),
]
for share in (0, 1, -0.1, math.nan):
    case = bad(
        "between 0 and 1",
        method="agreement",
        train_loader=[],
        max_change=share,
    )
    BAD.append(case)
for name in METHODS:
    no_data = dict.fromkeys(DATA[name], ())
    for count in ("n_samples", "n_steps", "grid_size", "batch_size"):
        if count in fields_of(name):
            case = bad(
                f"{count} must be at least",
                method=name,
                **{count: 0},
                **no_data,
            )
            BAD.append(case)


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_arguments_leave_the_prior_precision_alone(validation, arguments, message):
    la = fitted(prior_precision=0.4)
    loaders = {
        "batches": validation,
        "unlabelled": [without_labels(batch) for batch in validation],
    }
    loader = arguments.get("val_loader")
    if isinstance(loader, str):
        arguments = arguments | {"val_loader": loaders[loader]}
    with pytest.raises(ValueError, match=message):
        la.optimize_prior_precision(**arguments)
    assert la.prior_precision.tolist() == [0.4]


# --- where a search starts ------------------------------------------------------------


def first_point(
    la: Any,
    **options: Any,
) -> Tensor:
    """Take one step, and return where it started."""
    choose = Marglik(n_steps=1, tolerance=0, **options)
    history = choose(la)
    return history.prior_precision[0]


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag"])
def test_a_search_starts_at_a_number_that_it_is_told(structure):
    la = fitted(structure=structure)
    sizes = {"scalar": 1, "layerwise": len(la.blocks)}
    # The only structure that takes a prior precision for each weight.
    if structure == "diag":
        sizes["diag"] = la.n_params
    for prior, size in sizes.items():
        found = first_point(la, init_prior_prec=2.5, prior_structure=prior)
        expected = torch.full((size,), 2.5).double()
        assert_close(found, expected)


@pytest.mark.parametrize("structure", OURS_AND_A_HOSTS)
def test_a_search_starts_at_numbers_that_it_is_told(structure):
    la = fitted(structure=structure)
    several = torch.linspace(1, 2, len(la.blocks))
    found = first_point(la, init_prior_prec=several)
    assert_close(found, several.double())


# --- what is said ---------------------------------------------------------------------


@pytest.fixture
def grid(validation: Any) -> dict[str, Any]:
    return {
        "method": "gridsearch",
        "val_loader": validation,
        "grid_size": 2,
        "optimize_scale": False,
    }


@pytest.fixture
def descent(validation: Any) -> dict[str, Any]:
    return {
        "method": "val_gd",
        "val_loader": validation,
        "n_steps": 3,
    }


def test_nothing_is_said_that_was_not_asked_for(grid, descent, capfd):
    la = fitted()
    capfd.readouterr()  # of the fit
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.optimize_prior_precision(**grid)
        la.optimize_prior_precision(**descent)
    assert capfd.readouterr() == ("", "")


def test_bars_are_shown_where_they_are_asked_for(validation, grid, descent, capfd):
    la = fitted()
    la.optimize_prior_precision(progress_bar=True, **grid)
    la.optimize_prior_precision(progress_bar=True, **descent)
    la.optimize_prior_precision(n_steps=2, tolerance=0, progress_bar=True)
    shown = capfd.readouterr().err
    # A grid is searched while the data pass, whose bar is the first of these.
    for title in ("Predictive statistics", "validation loss", "evidence"):
        assert title in shown


def test_a_search_by_statistics_has_a_bar(validation, capfd):
    la = fitted()
    statistics = la.predictive_statistics(validation)
    search = GridSearch(val_loader=statistics, grid_size=2, progress_bar=True)
    capfd.readouterr()
    search(la)
    assert "Grid search" in capfd.readouterr().err


def test_a_choice_is_said_where_that_is_asked_for(descent, capfd):
    la = fitted()
    la.optimize_prior_precision(verbose=True, **descent)
    assert "Optimized prior precision" in capfd.readouterr().out


# --- objects --------------------------------------------------------------------------


def options_for(
    la: Any,
    name: str,
) -> dict[str, Any]:
    """Make options of a method, with statistics of a posterior where it takes some."""
    options = dict(OPTIONS[name])
    if "generator" in fields_of(name):
        options["generator"] = generator(4)
    if name in TAKE_STATISTICS:
        (data,) = required_data(name)
        options[data] = la.predictive_statistics(ragged_batches())
    # Methods without a generator draw from the global one.
    torch.manual_seed(0)
    return options


def results(
    la: Any,
    history: TuningHistory,
) -> dict[str, Tensor]:
    """Find what a search chose, and what it tried."""
    assert isinstance(history, TuningHistory)
    return {
        "chosen": la.prior_precision,
        "objective": history.objective,
        "tried": history.prior_precision,
    }


@each_method
@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.filterwarnings("ignore:The posterior is over")
def test_an_object_finds_what_its_name_finds_and_gradients_may_be_off(context, name):
    la = fitted()
    options = options_for(la, name)
    history = la.optimize_prior_precision(method=name, **options)
    expected = results(la, history)

    la = fitted()
    with context():
        options = options_for(la, name)
        method = METHODS[name](**options)
        history = method(la)
    assert_close(results(la, history), expected)
    # It is an ordinary number whatever the context was.
    assert not la.prior_precision.requires_grad
    assert not la.prior_precision.is_inference()


# --- searches that fail ---------------------------------------------------------------


@pytest.mark.parametrize("structure", OURS_AND_A_HOSTS)
def test_a_search_that_fails_on_its_way_undoes_everything(structure):
    la, X = plain_regression(structure=structure)
    la.prior_precision = 0.4
    points = []

    def predictions() -> tuple[Tensor, ...]:
        mean, covariance = la(X)
        draws = la.sample(2, generator())
        return mean, covariance, draws

    expected = predictions()

    def loss(*_: Any) -> Tensor:
        points.append(la.prior_precision.item())
        if len(points) == 5:
            raise KeyboardInterrupt
        return torch.tensor(float(len(points)))

    y = X[:, :2]
    search = GridSearch(val_loader=[(X, y)], loss=loss)
    with pytest.raises(KeyboardInterrupt):
        search(la)
    # It had tried others.
    assert len(set(points)) > 1
    assert la.prior_precision.tolist() == [0.4]
    for now, then in zip(predictions(), expected, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("structure", OURS_AND_A_HOSTS)
def test_an_interrupted_search_leaves_the_noise_and_the_temperature_as_they_were(
    structure,
):
    la, X = plain_regression(structure=structure)
    la.temperature = 0.8
    before = la.hyperparameters
    expected = la(X)
    evidence = la.log_marginal_likelihood
    calls = []

    def interrupted(*precisions: Tensor) -> Tensor:
        calls.append(evidence(*precisions))
        la.temperature = 0.9
        if len(calls) == 4:
            raise KeyboardInterrupt
        return calls[-1]

    la.log_marginal_likelihood = interrupted
    with pytest.raises(KeyboardInterrupt):
        la.optimize_prior_precision(optimize_sigma_noise=True)
    assert la.hyperparameters == before
    assert la.sigma_noise.item() == 0.5
    assert not la.sigma_noise.requires_grad
    for now, then in zip(la(X), expected, strict=True):
        assert torch.equal(now, then)


# --- modes and threads ----------------------------------------------------------------


def test_what_is_set_in_inference_mode_is_ordinary():
    la, _ = plain_regression()
    with torch.inference_mode():
        la.prior_precision = torch.tensor(3.0)
        la.sigma_noise = 0.4
        la.temperature = torch.tensor(0.9)
    for name in ("prior_precision", "sigma_noise", "temperature"):
        value = getattr(la.hyperparameters, name)
        assert not value.is_inference()
    product = la.prior_precision.requires_grad_() * la.sigma_noise
    product.backward()
    assert la.prior_precision.grad.item() == pytest.approx(0.4)


def test_no_thread_predicts_by_a_prior_precision_that_is_only_tried(validation):
    la = fitted()
    batch = ragged_batches()[0]
    futures = []

    with ThreadPoolExecutor(1) as pool:

        def loss(
            probs: Tensor,
            labels: Tensor,
        ) -> Tensor:
            if not futures:
                futures.append(pool.submit(la, batch))
                # Without a lock it would be there by then.
                wait(futures, timeout=1)
            return la.prior_precision.log().square().sum()

        search = GridSearch(val_loader=validation, loss=loss, **PRIORS_ALONE)
        search(la)
        assert la.prior_precision.item() == pytest.approx(1)
        assert torch.equal(futures[0].result(), la(batch))


@pytest.mark.parametrize("method", ["agreement", "gridsearch", "val_gd"])
def test_data_pass_once_and_their_statistics_not_at_all(method):
    la = fitted()
    batches = ragged_batches()
    statistics = la.predictive_statistics(batches, dtype=torch.float64)
    passes = count_forward_passes(la)

    def search(data: Any) -> None:
        (name,) = required_data(method)
        options = {"n_steps": 2} if method == "val_gd" else {}
        options[name] = data
        la.optimize_prior_precision(method=method, **options)

    search(statistics)
    assert len(passes) == 0
    search(batches)
    assert len(passes) == len(batches)

"""Methods by name and as objects: options, starts, what they set, and failures."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import Field, FrozenInstanceError, fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader

from laplace_lora_ext import GridSearch, Marglik, PredictiveStatistics, TuningHistory
from laplace_lora_ext.tuning import METHODS
from laplace_lora_ext.tuning.method import TuningMethod
from tests.support.models import ragged_batches, without_labels
from tests.support.posteriors import (
    GRID,
    STRUCTURES,
    another_training,
    count_forward_passes,
    fitted,
    generator,
    plain_regression,
)
from tests.support.ranks import Texts


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
        "link_approx": "mc",
        "n_samples": 2,
        "optimize_scale": False,
        "log_prior_prec_min": -1,
        "log_prior_prec_max": 2,
        "grid_size": 3,
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
    },
}
FEW = {"gridsearch": GRID, "val_gd": {"n_steps": 1}}
# Methods whose statistics are also made in the context that a test is about.
TAKE_STATISTICS = {"agreement": "train_loader", "val_gd": "val_loader"}
each_method = pytest.mark.parametrize("name", METHODS)


def fields_of(name: str) -> dict[str, Field]:
    """Find a method's options."""
    return {field.name: field for field in fields(METHODS[name])}


# --- options --------------------------------------------------------------------------


@pytest.mark.parametrize("method", FEW)
def test_searches_score_the_link_of_predict_unless_told_another(validation, method):
    def objective(**link):
        history = fitted().optimize_prior_precision(
            method=method, val_loader=validation, **link, **FEW[method]
        )
        return history.objective

    found = objective()
    assert torch.equal(found, objective(link_approx="mean_field"))
    assert not torch.equal(found, objective(link_approx="probit"))


@each_method
def test_a_call_by_name_builds_the_object_of_its_options(name, monkeypatch):
    built = []

    def note(self: Any, la: Any) -> None:
        built.append(self)

    monkeypatch.setattr(METHODS[name], "__call__", note)
    options = OPTIONS[name] | {"progress_bar": True}
    fitted().optimize_prior_precision(method=name, **options)
    (found,) = built
    # None is a default, which could be forgotten on the way.
    for option, value in OPTIONS[name].items():
        assert getattr(found, option) is value
        assert value != fields_of(name)[option].default
    method = METHODS[name](**options)
    assert vars(found) == vars(method)
    with pytest.raises(FrozenInstanceError):
        method.progress_bar = False


@each_method
def test_options_of_others_are_refused_by_name(name):
    la = fitted(prior_precision=0.4)
    of_all = {option for options in OPTIONS.values() for option in options}
    foreign = of_all - fields_of(name).keys()
    # Otherwise the loop below would ask nothing.
    assert foreign
    for option in foreign:
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
            la.optimize_prior_precision(method=name, **OPTIONS[name], **{option: 1})
    assert la.prior_precision.tolist() == [0.4]


# --- arguments that make no sense -----------------------------------------------------


def bad(message: str, **arguments: Any) -> tuple[dict[str, Any], str]:
    """Pair the arguments of a call with what its error says."""
    return arguments, message


ONE_BELOW_0 = torch.ones(8)
ONE_BELOW_0[-1] = -1

BAD = [
    bad("newton", method="newton"),
    # Whose data are not printed.
    bad("list", method=[torch.ones(1)]),
    bad("GridSearch", pred_type=GridSearch(val_loader=[torch.ones(1)])),
    bad("n_steps, grid_size", method=Marglik(), n_steps=5, grid_size=7),
    bad("argument: 'val_loader'", method="gridsearch"),
    bad("either the trainer", method="second_training"),
    bad("no data", method="agreement", train_loader=[], init_prior_prec=7.0),
    bad("link_approx", method="val_gd", val_loader="batches", link_approx="bridge"),
    bad("link_approx", method="gridsearch", val_loader="batches", link_approx="other"),
    bad("need labels", method="val_gd", val_loader="unlabelled"),
    bad("need labels", method="gridsearch", val_loader="unlabelled"),
    bad("no data", method="gridsearch", val_loader=[]),
    bad("above 0", method="val_gd", val_loader="batches", init_prior_prec=-1.0),
    bad("above 0", init_prior_prec=ONE_BELOW_0),
    bad("per-layer", prior_structure="diag"),
    bad("layers", prior_structure="layers"),
    bad("max_examples", method="agreement", train_loader=[], max_examples=0),
    bad("grid_size", method="gridsearch", val_loader=[], grid_size=0),
    bad("max_change", method="agreement", train_loader=[], max_change=0),
    bad("max_change", method="agreement", train_loader=[], max_change=1),
]


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
    with pytest.raises((ValueError, TypeError), match=message) as error:
        la.optimize_prior_precision(**arguments)
    assert "tensor" not in str(error.value)
    assert la.prior_precision.tolist() == [0.4]


# --- where a search starts ------------------------------------------------------------


def first_point(la: Any, **options: Any) -> Tensor:
    """Take one step, and return where it started."""
    return Marglik(n_steps=1, tolerance=0, **options)(la).prior_precision[0]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_search_starts_where_it_is_told(structure):
    la = fitted(structure=structure)
    sizes = {"scalar": 1, "layerwise": len(la.blocks)}
    # The only structure that takes a prior precision for each weight.
    if structure == "diag":
        sizes["diag"] = la.n_params
    for prior, size in sizes.items():
        found = first_point(la, init_prior_prec=2.5, prior_structure=prior)
        assert_close(found, torch.full((size,), 2.5).double())
    several = torch.linspace(1, 2, len(la.blocks))
    assert_close(first_point(la, init_prior_prec=several), several.double())


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
    return {"method": "val_gd", "val_loader": validation, "n_steps": 3}


def test_nothing_is_said_that_was_not_asked_for(grid, descent, capfd):
    la = fitted()
    capfd.readouterr()  # of the fit
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.optimize_prior_precision(**grid)
        la.optimize_prior_precision(**descent)
    assert capfd.readouterr() == ("", "")


def test_what_is_asked_for_is_shown(validation, grid, descent, capfd):
    la = fitted()
    la.optimize_prior_precision(progress_bar=True, **grid)
    statistics = la.predictive_statistics(validation)
    la.optimize_prior_precision(progress_bar=True, **grid | {"val_loader": statistics})
    la.optimize_prior_precision(progress_bar=True, verbose=True, **descent)
    la.optimize_prior_precision(n_steps=2, tolerance=0, progress_bar=True)
    shown = capfd.readouterr()
    assert "Optimized prior precision" in shown.out
    # A grid is searched while the data pass, whose bar is the first of these.
    for title in (
        "Predictive statistics",
        "Grid search",
        "validation loss",
        "evidence",
    ):
        assert title in shown.err


# --- objects --------------------------------------------------------------------------


def options_for(la: Any, name: str) -> dict[str, Any]:
    """Make options of a method, with statistics of a posterior where it takes some."""
    options = dict(OPTIONS[name])
    if "generator" in fields_of(name):
        options["generator"] = generator(4)
    if name in TAKE_STATISTICS:
        data = TAKE_STATISTICS[name]
        options[data] = la.predictive_statistics(ragged_batches())
    return options


def results(la: Any, history: TuningHistory) -> dict[str, Tensor]:
    """Find what a search chose, and what it tried."""
    assert isinstance(history, TuningHistory)
    return {
        "chosen": la.prior_precision,
        "objective": history.objective,
        "tried": history.prior_precision,
    }


@each_method
@pytest.mark.filterwarnings("ignore:The posterior is over")
def test_an_object_finds_what_its_name_finds_and_gradients_may_be_off(name):
    la = fitted()
    options = options_for(la, name)
    history = la.optimize_prior_precision(method=name, **options)
    expected = results(la, history)

    la = fitted()
    with torch.inference_mode():
        options = options_for(la, name)
        history = METHODS[name](**options)(la)
    assert_close(results(la, history), expected)
    # It is an ordinary number whatever the context was.
    assert not la.prior_precision.requires_grad
    assert not la.prior_precision.is_inference()


# --- what is set ----------------------------------------------------------------------


def texts() -> tuple[Any, dict[str, Any]]:
    """Fit a posterior of classes; make a search that chooses a scale."""
    return fitted(), {"val_loader": ragged_batches(seed=7)}


def numbers() -> tuple[Any, dict[str, Any]]:
    """Fit a posterior of numbers; make a search that chooses a noise."""
    la, X = plain_regression()
    return la, {"val_loader": [(X, X[:, :2])]}


@pytest.mark.parametrize(
    ("make_case", "name"),
    [*((texts, name) for name in METHODS), (numbers, "gridsearch")],
)
def test_no_choice_depends_on_an_earlier_search(make_case, name):
    la, data = make_case()
    options = OPTIONS[name]
    if make_case is numbers:
        options = data
    chosen = []
    for _ in range(2):
        # Global draws differ, on which nothing depends either.
        history = la.optimize_prior_precision(method=name, **options)
        chosen.append((results(la, history), la.sigma_noise, la.logit_scale))
        la.optimize_prior_precision(method="gridsearch", **data)
        assert la.logit_scale != 1 or make_case is numbers
        assert la.sigma_noise != 0.5 or make_case is texts
    assert_close(chosen[1], chosen[0], rtol=0, atol=0)


@each_method
def test_a_method_that_only_chooses_sets_nothing(name):
    la = fitted(prior_precision=0.4)
    history = METHODS[name](**OPTIONS[name]).choose(la)
    assert la.prior_precision.tolist() == [0.4]
    la.hyperparameters = history.chosen
    expected = fitted()
    METHODS[name](**OPTIONS[name])(expected)
    assert_close(la.prior_precision, expected.prior_precision)
    assert la.logit_scale == expected.logit_scale


def evidence_that_fails(monkeypatch: pytest.MonkeyPatch, la: Any) -> TuningMethod:
    evidence = type(la).log_marginal_likelihood
    calls = []

    def interrupted(self: Any, *precisions: Tensor) -> Tensor:
        calls.append(evidence(self, *precisions))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return calls[-1]

    monkeypatch.setattr(type(la), "log_marginal_likelihood", interrupted)
    return Marglik()


def losses_that_fail(monkeypatch: pytest.MonkeyPatch, la: Any) -> TuningMethod:
    calls = []

    def interrupted(self: Any, prior_precision: Tensor) -> None:
        calls.append(prior_precision)
        if len(calls) == 4:
            raise KeyboardInterrupt
        raise torch.linalg.LinAlgError

    monkeypatch.setattr(PredictiveStatistics, "moments", interrupted)
    X = torch.zeros(4, 5).double()
    return GridSearch(val_loader=[(X, X[:, :2])])


@pytest.mark.parametrize("failing", [evidence_that_fails, losses_that_fail])
def test_a_search_that_fails_leaves_everything(failing, monkeypatch):
    la, X = plain_regression()
    la.temperature = 0.8
    la.prior_precision = 0.4
    method = failing(monkeypatch, la)
    expected = la(X)
    with pytest.raises(KeyboardInterrupt):
        method(la)
    assert la.sigma_noise.item() == 0.5
    assert not la.sigma_noise.requires_grad
    assert la.temperature == 0.8
    assert la.prior_precision.tolist() == [0.4]
    for now, then in zip(la(X), expected, strict=True):
        assert torch.equal(now, then)


def test_other_threads_predict_by_the_old_prior_meanwhile(validation, monkeypatch):
    la = fitted()
    batch = ragged_batches()[0]
    expected = la(batch)
    moments = PredictiveStatistics.moments
    predicted = []

    with ThreadPoolExecutor(1) as pool:

        def tried(self: Any, prior_precision: Tensor) -> Any:
            if not predicted:
                predicted.append(pool.submit(la, batch).result(timeout=60))
            return moments(self, prior_precision)

        monkeypatch.setattr(PredictiveStatistics, "moments", tried)
        GridSearch(val_loader=validation, **GRID)(la)
    assert torch.equal(predicted[0], expected)
    assert not torch.equal(la(batch), expected)


def test_what_is_set_in_inference_mode_is_ordinary():
    la, _ = plain_regression()
    with torch.inference_mode():
        la.prior_precision = torch.tensor(3.0)
        la.sigma_noise = 0.4
    for name in ("prior_precision", "sigma_noise"):
        assert not getattr(la, name).is_inference()
    product = la.prior_precision.requires_grad_() * la.sigma_noise
    product.backward()
    assert la.prior_precision.grad.item() == pytest.approx(0.4)


@pytest.mark.parametrize("method", ["agreement", "gridsearch", "val_gd"])
def test_data_pass_once_and_their_statistics_not_at_all(method):
    la = fitted()
    batches = ragged_batches()
    statistics = la.predictive_statistics(batches, dtype=torch.float64)
    passes = count_forward_passes(la)

    def search(data: Any) -> None:
        name = TAKE_STATISTICS.get(method, "val_loader")
        options = {"n_steps": 2} if method == "val_gd" else {}
        la.optimize_prior_precision(method=method, **options, **{name: data})

    search(statistics)
    assert len(passes) == 0
    search(batches)
    assert len(passes) == len(batches)

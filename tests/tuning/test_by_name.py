"""Methods by name and as objects: their options, where they start, and what a failure leaves."""

import warnings
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import FrozenInstanceError, fields
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from laplace_lora_ext import GridSearch, Marglik, TuningHistory
from laplace_lora_ext.tuning import (
    METHODS,
    PREDICTIONS,
    required_data,
)
from tests.support.models import ragged_batches
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
        "loss": lambda outputs, targets: outputs.square().sum(),
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
        "train": lambda _: another_training(),
        "train_loader": DataLoader(Texts(), batch_size=2),
        "held_out": 0.4,
        "search": partial(GridSearch, link_approx="probit", grid_size=9),
    },
}
FEW = {"gridsearch": GRID, "val_gd": {"n_steps": 1}}
DATA = {name: required_data(name) for name in METHODS}
each_method = pytest.mark.parametrize("name", METHODS)


def fields_of(name: str) -> dict:
    return {field.name: field for field in fields(METHODS[name])}


@pytest.mark.parametrize("method", ["gridsearch", "val_gd"])
def test_searches_score_the_link_of_predict_unless_told_another(validation, method):
    histories = [
        fitted().optimize_prior_precision(
            method=method,
            val_loader=validation,
            **link,
            **FEW[method],
        )
        for link in (
            {},
            {"link_approx": "mean_field"},
            {"link_approx": "probit"},
        )
    ]
    by_default, by_mean_field, by_probit = (history.objective for history in histories)
    assert torch.equal(by_default, by_mean_field)
    assert not torch.equal(by_default, by_probit)


@each_method
def test_a_call_by_name_builds_the_object_of_its_options(name, monkeypatch):
    built = []
    monkeypatch.setattr(
        METHODS[name],
        "__call__",
        lambda self, la: built.append(self),
    )
    options = OPTIONS[name] | {"progress_bar": True}
    fitted().optimize_prior_precision(method=name, **options)
    assert vars(built[0]) == vars(METHODS[name](**options))
    assert all(value != fields_of(name)[option].default for option, value in options.items())
    with pytest.raises(FrozenInstanceError):
        built[0].progress_bar = False


@each_method
def test_options_of_others_are_refused_and_named(name):
    la = fitted(prior_precision=0.4)
    of_all = {option: value for options in OPTIONS.values() for option, value in options.items()}
    ignored = PREDICTIONS if name == "marglik" else set()
    foreign = of_all.keys() - fields_of(name).keys() - ignored
    assert foreign
    assert not ignored - of_all.keys()
    for option in foreign:
        message = rf'method="{name}" needs .*got .*{option}.*; its options are .*prior_structure'
        with pytest.raises(ValueError, match=message):
            la.optimize_prior_precision(
                method=name,
                **OPTIONS[name] | {option: of_all[option]},
            )
    with pytest.raises(
        ValueError,
        match=rf"Pass n_steps, grid_size to {METHODS[name].__name__}",
    ):
        la.optimize_prior_precision(
            method=METHODS[name](**OPTIONS[name]),
            n_steps=5,
            grid_size=7,
        )
    assert la.prior_precision.tolist() == [0.4]


BAD = [
    ({"method": "newton"}, "is none of"),
    ({"method": "gridsearch"}, "needs val_loader"),
    ({"method": "val_gd"}, "needs val_loader"),
    ({"method": "agreement"}, "needs train_loader"),
    ({"method": "second_training"}, "needs either the trainer"),
    (
        {
            "method": "agreement",
            "train_loader": [],
            "init_prior_prec": 7.0,
        },
        "no data",
    ),
    (
        {
            "method": "val_gd",
            "val_loader": "batches",
            "link_approx": "bridge",
        },
        "links",
    ),
    (
        {
            "method": "val_gd",
            "val_loader": "batches",
            "pred_type": "nn",
        },
        "got val_loader, pred_type; its options",
    ),
    (
        {"method": "val_gd", "val_loader": "unlabelled"},
        "need labels",
    ),
    (
        {"method": "gridsearch", "val_loader": "unlabelled"},
        "need labels",
    ),
    (
        {"method": "gridsearch", "val_loader": []},
        "The loader has no data",
    ),
    (
        {
            "method": "val_gd",
            "val_loader": "batches",
            "init_prior_prec": -1.0,
        },
        "above 0",
    ),
    ({"optimize_sigma_noise": True}, "for regression"),
    ({"init_prior_prec": 0.0}, "above 0"),
    (
        {"init_prior_prec": torch.tensor([1.0] * 7 + [-1.0])},
        "above 0",
    ),
    ({"prior_structure": "diag"}, "scalar or per-layer"),
    ({"prior_structure": "layers"}, "'layers' is none of"),
    (
        {
            "method": "agreement",
            "train_loader": [],
            "max_examples": 0,
        },
        "max_examples must be at",
    ),
    *(
        (
            {
                "method": "agreement",
                "train_loader": [],
                "max_change": value,
            },
            "between 0 and 1",
        )
        for value in (0, 1, -0.1, float("nan"))
    ),
    *(
        (
            {"method": name, option: 0} | dict.fromkeys(DATA[name], ()),
            f"{option} must be at least",
        )
        for name in METHODS
        for option in (
            "n_samples",
            "n_steps",
            "grid_size",
            "batch_size",
        )
        if option in fields_of(name)
    ),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_arguments_leave_the_prior_precision_alone(validation, arguments, message):
    la = fitted(prior_precision=0.4)
    unlabelled = [{k: v for k, v in batch.items() if k != "labels"} for batch in validation]
    loaders = {"batches": validation, "unlabelled": unlabelled}
    if isinstance(arguments.get("val_loader"), str):
        arguments = arguments | {"val_loader": loaders[arguments["val_loader"]]}
    with pytest.raises(ValueError, match=message):
        la.optimize_prior_precision(**arguments)
    assert la.prior_precision.tolist() == [0.4]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_search_starts_where_it_is_told_to(structure):
    la = fitted(structure=structure)

    def first_point(**options) -> torch.Tensor:
        return Marglik(n_steps=1, tolerance=0, **options)(la).prior_precision[0]

    shapes = {"scalar": 1, "layerwise": len(la.blocks)}
    if structure == "diag":
        shapes["diag"] = la.n_params
    for prior, size in shapes.items():
        start = first_point(init_prior_prec=2.5, prior_structure=prior)
        torch.testing.assert_close(start, torch.full((size,), 2.5).double())
    several = torch.linspace(1, 2, len(la.blocks))
    torch.testing.assert_close(first_point(init_prior_prec=several), several.double())


def test_nothing_is_said_that_was_not_asked_for(validation, capfd):
    capfd.readouterr()
    la = fitted()
    grid = {
        "method": "gridsearch",
        "val_loader": validation,
        "grid_size": 2,
    }
    descent = {
        "method": "val_gd",
        "val_loader": validation,
        "n_steps": 3,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.optimize_prior_precision(**grid)
        la.optimize_prior_precision(**descent)
    assert capfd.readouterr() == ("", "")
    la.optimize_prior_precision(progress_bar=True, **grid)
    la.optimize_prior_precision(progress_bar=True, verbose=True, **descent)
    la.optimize_prior_precision(n_steps=2, tolerance=0, progress_bar=True)
    out, err = capfd.readouterr()
    assert "Optimized prior precision" in out
    for title in (
        "Predictive statistics",
        "Grid search",
        "validation loss",
        "evidence",
    ):
        assert title in err


@each_method
@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.filterwarnings("ignore:The posterior is over")
def test_an_object_finds_what_its_name_finds_and_gradients_may_be_off(context, name):
    found = []
    for within in (nullcontext, context):
        la, options = fitted(), dict(OPTIONS[name])
        if "generator" in fields_of(name):
            options["generator"] = generator(4)
        with within():
            for data in {
                "agreement": ["train_loader"],
                "val_gd": ["val_loader"],
            }.get(name, []):
                options[data] = la.predictive_statistics(ragged_batches())
            torch.manual_seed(0)
            if found:
                history = METHODS[name](**options)(la)
            else:
                history = la.optimize_prior_precision(method=name, **options)
        assert isinstance(history, TuningHistory)
        assert not la.prior_precision.requires_grad
        assert not la.prior_precision.is_inference()
        found.append(
            [
                la.prior_precision,
                history.objective,
                history.prior_precision,
            ]
        )
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_search_that_fails_on_its_way_undoes_everything(
    structure,
):
    la, X = plain_regression(structure=structure)
    la.prior_precision = 0.4
    expected, points = (*la(X), la.sample(2, generator())), []

    def loss(*_):
        points.append(la.prior_precision.item())
        if len(points) == 5:
            raise KeyboardInterrupt
        return torch.tensor(float(len(points)))

    with pytest.raises(KeyboardInterrupt):
        GridSearch(val_loader=[(X, X[:, :2])], loss=loss)(la)
    assert len(set(points)) > 1
    assert la.prior_precision.tolist() == [0.4]
    for now, then in zip((*la(X), la.sample(2, generator())), expected, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_an_interrupted_search_leaves_the_noise_and_the_temperature_as_they_were(
    structure,
):
    la, X = plain_regression(structure=structure)
    la.temperature = 0.8
    before, expected, calls = la.hyperparameters, la(X), []

    def interrupted(*precisions):
        calls.append(evidence(*precisions))
        la.temperature = 0.9
        if len(calls) == 4:
            raise KeyboardInterrupt
        return calls[-1]

    evidence, la.log_marginal_likelihood = (
        la.log_marginal_likelihood,
        interrupted,
    )
    with pytest.raises(KeyboardInterrupt):
        la.optimize_prior_precision(optimize_sigma_noise=True)
    assert la.hyperparameters == before
    assert la.sigma_noise.item() == 0.5
    assert not la.sigma_noise.requires_grad
    for now, then in zip(la(X), expected, strict=True):
        assert torch.equal(now, then)


def test_what_is_set_in_inference_mode_is_ordinary():
    la, _ = plain_regression()
    with torch.inference_mode():
        la.prior_precision, la.sigma_noise = (
            torch.tensor(3.0),
            0.4,
        )
        la.temperature = torch.tensor(0.9)
    assert not any(value.is_inference() for value in vars(la.hyperparameters).values())
    la.prior_precision.requires_grad_().mul(la.sigma_noise).backward()
    assert la.prior_precision.grad.item() == pytest.approx(0.4)


def test_no_thread_predicts_by_a_prior_precision_that_is_only_tried(
    validation,
):
    la, (batch, *_), futures = fitted(), ragged_batches(), []

    with ThreadPoolExecutor(1) as pool:

        def loss(probs, labels):
            if not futures:
                futures.append(pool.submit(la, batch))
                wait(futures, timeout=1)  # without a lock it would be there by now
            return la.prior_precision.log().square().sum()

        GridSearch(val_loader=validation, loss=loss, **GRID)(la)
        assert la.prior_precision.item() == pytest.approx(1)
        assert torch.equal(futures[0].result(), la(batch))


@pytest.mark.parametrize("method", ["agreement", "gridsearch", "val_gd"])
def test_data_pass_once_and_their_statistics_not_at_all(method):
    la, batches = fitted(), ragged_batches()
    data, options = (
        required_data(method)[0],
        {"n_steps": 2} if method == "val_gd" else {},
    )
    statistics = la.predictive_statistics(batches, dtype=torch.float64)
    calls = count_forward_passes(la)
    for given, n_passes in (
        (statistics, 0),
        (batches, len(batches)),
    ):
        la.optimize_prior_precision(method=method, **{data: given}, **options)
        assert len(calls) == n_passes

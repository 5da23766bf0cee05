"""Methods by name and as objects, and the options that each takes."""

import warnings
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from inspect import signature

import pytest
import torch
from torch.utils.data import DataLoader

from laplace_lora_ext import GridSearch, LoRALaplace
from laplace_lora_ext.tuning import METHODS
from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import fitted, generator
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
    "marglik": {"n_steps": 4, "lr": 0.3, "tolerance": 0, "prior_structure": "layerwise"},
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
        "link_approx": "mean_field",
        "n_samples": 7,
        "n_steps": 4,
        "lr": 0.3,
        "batch_size": 3,
    },
    "second_training": {
        "train": lambda _: lora_model("bert"),
        "train_loader": DataLoader(Texts(), batch_size=2),
        "held_out": 0.4,
        "search": partial(GridSearch, link_approx="probit", grid_size=9),
    },
}
HOSTS_DEFAULTS = {
    "pred_type": "glm",
    "n_steps": 1000,
    "lr": 0.1,
    "init_prior_prec": 1.0,
    "prior_structure": "scalar",
    "val_loader": None,
    "loss": None,
    "log_prior_prec_min": -4,
    "log_prior_prec_max": 4,
    "grid_size": 100,
    "link_approx": None,
    "n_samples": 100,
    "verbose": False,
    "progress_bar": False,
}
each_method = pytest.mark.parametrize("name", METHODS)


@each_method
def test_an_object_finds_what_its_name_finds(name):
    found = []
    for by_name in (True, False):
        la, options = fitted(), OPTIONS[name] | {"generator": generator(4)}
        if "generator" not in fields_of(name):
            del options["generator"]
        torch.manual_seed(0)
        if by_name:
            history = la.optimize_prior_precision(method=name, **options)
        else:
            history = la.optimize_prior_precision(method=METHODS[name](**options))
        assert not la.prior_precision.requires_grad
        found.append([la.prior_precision, *vars(history).values()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@each_method
def test_a_call_by_name_builds_the_object_of_its_options(name, monkeypatch):
    built = []
    monkeypatch.setattr(METHODS[name], "__call__", lambda self, la: built.append(self))
    options = OPTIONS[name] | {"progress_bar": True}
    if "generator" in fields_of(name):
        options["generator"] = generator()
    fitted().optimize_prior_precision(method=name, **options)
    (method,) = built
    assert type(method) is METHODS[name]
    assert vars(method) == vars(METHODS[name](**options))
    for option, value in options.items():
        assert getattr(method, option) is value or getattr(method, option) == value
        assert value != fields_of(name)[option].default


def fields_of(name: str) -> dict:
    return {field.name: field for field in fields(METHODS[name])}


@each_method
def test_options_have_one_default_by_name_and_as_fields(name):
    parameters = signature(LoRALaplace.optimize_prior_precision).parameters
    for option, field in fields_of(name).items():
        if option == "link_approx" or option == "val_loader":
            assert parameters[option].default is None  # each method has a link of its own
        elif option in parameters:
            assert parameters[option].default == field.default, option


@each_method
def test_options_beside_an_object_are_refused(name):
    la, method = fitted(prior_precision=0.4), METHODS[name](**OPTIONS[name])
    with pytest.raises(ValueError, match=rf"Pass n_steps, grid_size to {METHODS[name].__name__}"):
        la.optimize_prior_precision(method=method, n_steps=5, grid_size=7)
    assert la.prior_precision.tolist() == [0.4]


@each_method
def test_options_that_a_method_lacks_are_refused_and_named(name):
    la = fitted(prior_precision=0.4)
    known = fields_of(name)
    foreign = {
        option: value
        for options in OPTIONS.values()
        for option, value in options.items()
        if option not in known
    }
    assert foreign
    for option, value in foreign.items():
        message = rf'method="{name}" has no option {option}; its options are .*{next(iter(known))}'
        with pytest.raises(ValueError, match=message):
            la.optimize_prior_precision(method=name, **OPTIONS[name] | {option: value})
    assert la.prior_precision.tolist() == [0.4]


@each_method
def test_defaults_of_the_host_mean_nothing_to_a_method_that_lacks_them(name):
    la = fitted()
    own = OPTIONS[name]
    la.optimize_prior_precision(method=name, **HOSTS_DEFAULTS | own)
    for option, default in HOSTS_DEFAULTS.items():
        assert signature(type(la).optimize_prior_precision).parameters[option].default == default


def test_an_object_that_is_no_method_is_refused():
    la = fitted()
    with pytest.raises(ValueError, match="none of"):
        la.optimize_prior_precision(method="newton")
    with pytest.raises((ValueError, TypeError)):
        la.optimize_prior_precision(method=object())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "gridsearch"}, "pass val_loader"),
        ({"method": "val_gd"}, "pass val_loader"),
        ({"method": "val_gd", "val_loader": []}, "no data"),
        ({"method": "gridsearch", "val_loader": []}, "no data"),
        ({"method": "gridsearch", "val_loader": [], "pred_type": "nn"}, "no data"),
        ({"method": "val_gd", "val_loader": "batches", "link_approx": "bridge"}, "links"),
        ({"method": "val_gd", "val_loader": "batches", "pred_type": "nn"}, "no option pred_type"),
        (
            {"method": "gridsearch", "val_loader": "batches", "max_change": 0.1},
            "no option max_change",
        ),
        ({"method": "val_gd", "val_loader": "unlabelled"}, "need labels"),
        ({"method": "gridsearch", "val_loader": "unlabelled"}, "need labels"),
        ({"method": "val_gd", "val_loader": "batches", "init_prior_prec": -1.0}, "above 0"),
        ({"method": "val_gd", "val_loader": "nan"}, "batch 1: .*non-finite"),
        ({"method": "gridsearch", "val_loader": "nan"}, "batch 1: .*non-finite"),
        ({"method": "agreement"}, "pass train_loader"),
        ({"method": "second_training"}, "pass train, train_loader"),
        ({"optimize_sigma_noise": True}, "for regression"),
        ({"init_prior_prec": 0.0}, "above 0"),
        ({"prior_structure": "diag"}, "scalar or per-layer"),
    ],
)
def test_bad_arguments_leave_the_prior_precision_alone(validation, arguments, message):
    la = fitted(prior_precision=0.4)
    embedding = la.model.model.get_input_embeddings()
    unlabelled = [{k: v for k, v in batch.items() if k != "labels"} for batch in validation]
    loaders = {"batches": validation, "nan": validation, "unlabelled": unlabelled}
    loader = arguments.get("val_loader", arguments.get("train_loader"))
    if loader == "nan":
        validation[0]["input_ids"].clamp_(max=58)
        validation[1]["input_ids"][:] = 59
        embedding.weight.data[59] = torch.nan
    if isinstance(loader, str):
        key = "val_loader" if "val_loader" in arguments else "train_loader"
        arguments = arguments | {key: loaders[loader]}
    with pytest.raises(ValueError, match=message):
        la.optimize_prior_precision(**arguments)
    torch.testing.assert_close(la.prior_precision, torch.tensor([0.4]).double())


def test_nothing_is_said_that_was_not_asked_for(validation, capfd):
    la = fitted()
    capfd.readouterr()
    grid = {"method": "gridsearch", "val_loader": validation, "grid_size": 2}
    descent = {"method": "val_gd", "val_loader": validation, "n_steps": 3}
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
    for title in ("Predictive statistics", "Grid search", "validation loss", "evidence"):
        assert title in err


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_methods_work_where_gradients_are_off(context, method):
    chosen = []
    for within in (nullcontext, context):
        la = fitted()
        torch.manual_seed(0)
        options = {name: value for name, value in OPTIONS[method].items() if name != "pred_type"}
        if method in ("agreement", "val_gd"):
            key = "train_loader" if method == "agreement" else "val_loader"
            with within():
                options[key] = la.predictive_statistics(ragged_batches())
        with within(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            la.optimize_prior_precision(method=method, **options)
        assert not la.prior_precision.is_inference()
        chosen.append(la.prior_precision)
    torch.testing.assert_close(*chosen)

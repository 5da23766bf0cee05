"""Methods by name and as objects: options, starts, what they set, and failures."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import DataLoader

from laplace_lora_ext import GridSearch, Marglik, TuningHistory, ValGD
from laplace_lora_ext.tuning import METHODS
from laplace_lora_ext.tuning.method import Trial, unit_of_priors
from tests.support.models import ragged_batches, without_labels
from tests.support.posteriors import (
    another_training,
    count_forward_passes,
    fitted,
    generator,
    plain_regression,
)
from tests.support.ranks import Texts

# Of each method, options that matter for the result.
OPTIONS = {
    "agreement": {"train_loader": ragged_batches(), "n_samples": 7},
    "marglik": {"n_steps": 4},
    "gridsearch": {
        "val_loader": ragged_batches(seed=7),
        "link_approx": "mc",
        "n_samples": 2,
        "grid_size": 3,
    },
    "val_gd": {
        "val_loader": ragged_batches(seed=7),
        "link_approx": "mc",
        "n_steps": 4,
        "batch_size": 3,
    },
    "second_training": {
        "train": lambda examples: another_training(),
        "train_loader": DataLoader(Texts(), batch_size=2),
        "held_out": 0.4,
    },
}
# --- arguments that make no sense -----------------------------------------------------


ONE_BELOW_0 = torch.ones(8)
ONE_BELOW_0[-1] = -1

LOSSES = {"val_loader": ragged_batches(seed=7)}
LOADER = {"train_loader": ragged_batches()}
UNLABELLED = {"val_loader": [without_labels(batch) for batch in ragged_batches()]}
BAD = [
    ({"method": "newton"}, "newton"),
    ({"pred_type": "nn"}, "pred_type 'nn'"),
    ({"method": Marglik(), "n_steps": 5, "grid_size": 7}, "n_steps, grid_size"),
    ({"method": "marglik", "grid_size": 7}, "grid_size"),
    ({"method": "second_training"}, "either the trainer"),
    ({"method": "second_training", "trainer": 1, **LOADER}, "either the trainer"),
    ({"method": "val_gd", **LOSSES, "link_approx": "bridge"}, "link_approx"),
    ({"method": "gridsearch", **LOSSES, "link_approx": "other"}, "link_approx"),
    ({"method": "val_gd", **UNLABELLED}, "need labels"),
    ({"method": "gridsearch", **UNLABELLED}, "need labels"),
    ({"method": "gridsearch", "val_loader": []}, "no data"),
    ({"init_prior_prec": ONE_BELOW_0}, "positive"),
    ({"prior_structure": "diag"}, "per-layer"),
    ({"prior_structure": "layers"}, "layers"),
]


def test_bad_arguments_leave_the_prior_precision_alone():
    la = fitted(prior_precision=0.4)
    for arguments, message in BAD:
        with pytest.raises((ValueError, TypeError), match=message):
            la.optimize_prior_precision(**arguments)
        assert la.prior_precision.tolist() == [0.4]


# --- where a search starts ------------------------------------------------------------


def test_nothing_is_said_or_shown_but_what_is_asked_for(la, capfd):
    validation = ragged_batches(seed=7)
    capfd.readouterr()  # of the fit
    statistics = la.predictive_statistics(validation)
    searches = [
        GridSearch(val_loader=validation, grid_size=2, optimize_scale=False),
        GridSearch(val_loader=statistics, grid_size=2, optimize_scale=False),
        ValGD(val_loader=statistics, n_steps=3),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for search in searches:
            search(la)
    assert capfd.readouterr() == ("", "")
    for search in (*searches, Marglik(n_steps=2)):
        la.optimize_prior_precision(method=replace(search, progress_bar=True))
    # Callers of the host name a link, which predicts nothing here.
    la.optimize_prior_precision(n_steps=2, verbose=True, link_approx="mc")
    shown = capfd.readouterr()
    assert "Optimized prior precision" in shown.out
    for title in ("Grid search", "validation loss", "evidence"):
        assert title in shown.err


def first_point(la: Any, **options: Any) -> Tensor:
    """Take one step, and return where it started."""
    return Marglik(n_steps=1, tolerance=0, **options)(la).prior_precision[0]


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag"])
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


# --- objects --------------------------------------------------------------------------


def test_a_history_says_in_a_line_what_is_chosen():
    tried = [Trial(torch.tensor([10.0**k, 4e6]), objective=k) for k in (3, 2, 4)]
    expected = "TuningHistory(3 trials; chosen: prior precision 2e+04, loss 2)"
    assert repr(TuningHistory.of_losses(tried)) == expected


def results(la: Any, history: TuningHistory) -> list[Any]:
    """Find what a search chose, and what it tried."""
    chosen = [la.prior_precision, la.logit_scale, la.sigma_noise]
    return [*chosen, history.objective, history.prior_precision]


@pytest.mark.parametrize(
    ("of_numbers", "name"), [*((False, name) for name in METHODS), (True, "gridsearch")]
)
def test_a_search_finds_the_same_whatever_was_before_and_choosing_sets_nothing(
    of_numbers, name
):
    la, data, options = fitted(), ragged_batches(seed=7), OPTIONS[name]
    if of_numbers:
        la, X = plain_regression()
        data = [(X, X[:, :2])]
        options = {"val_loader": data}
    before = la.prior_precision, la.logit_scale, la.sigma_noise
    choice = METHODS[name](**options).choose(la)
    assert (la.prior_precision, la.logit_scale, la.sigma_noise) == before
    la.hyperparameters = choice.chosen
    expected = results(la, choice)
    # An earlier search, another state of the global generator, and no gradients.
    GridSearch(val_loader=data, grid_size=3)(la)
    assert la.sigma_noise != 0.5 if of_numbers else la.logit_scale != 1
    with torch.inference_mode():
        history = la.optimize_prior_precision(method=name, **options)
    assert_close(results(la, history), expected, rtol=0, atol=0)
    assert not la.prior_precision.is_inference()
    # What is changed in place is the posterior's alone.
    la.prior_precision.mul_(2)
    assert (la.prior_precision != history.chosen.prior_precision).all()


@pytest.mark.parametrize("method", ["agreement", "gridsearch", "val_gd"])
def test_data_pass_once_and_statistics_of_any_temperature_not_at_all(la, method):
    batches = ragged_batches()
    statistics = la.predictive_statistics(batches)
    la.temperature = 0.01
    passes = count_forward_passes(la)
    name = "train_loader" if method == "agreement" else "val_loader"

    def choose(data: Any, seed: int = 0) -> Tensor:
        draws = {"n_steps": 20, "generator": generator(seed)}
        options = draws if method == "val_gd" else {}
        METHODS[method](**options, **{name: data})(la)
        return la.prior_precision

    by_statistics = choose(statistics)
    assert method != "val_gd" or choose(statistics, seed=1) != by_statistics
    assert len(passes) == 0
    # They may be readable once alone.
    found = choose(iter(batches))
    assert len(passes) == len(batches)
    # Statistics are kept in float32.
    assert_close(found, by_statistics, rtol=1e-6, atol=0)


# --- numbers --------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag"])
def test_a_priors_unit_is_told_by_eigenvalues(structure):
    la, _ = plain_regression(2, structure)
    la.temperature = 0.5
    # Another than 1, which divides nothing.
    la.prior_precision = 0.3
    P = la.posterior_precision
    P = P.diag() if structure == "diag" else P.to_matrix()
    # The unit is of the curvature at a noise of 1, divided by the temperature.
    trace = 0.5**2 * (torch.linalg.eigvalsh(P) - 0.3).sum().item()
    assert unit_of_priors(la) == pytest.approx(trace / (2 * 12), rel=1e-6)


def test_methods_of_classes_refuse_numbers():
    la, X = plain_regression()
    with pytest.raises(NotImplementedError, match=r"needs classes.*gridsearch"):
        ValGD(val_loader=[(X, X[:, :2])])(la)
    assert la.sigma_noise.item() == 0.5

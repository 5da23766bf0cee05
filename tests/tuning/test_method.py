"""What all methods share: where they start, and that a failure undoes everything."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest
import torch

from laplace_lora_ext import Agreement, GridSearch, Marglik, TuningHistory, ValGD
from laplace_lora_ext.tuning import METHODS, required_data
from tests.support.models import ragged_batches
from tests.support.posteriors import STRUCTURES, fitted


def first_point(la, **options) -> torch.Tensor:
    method = Marglik(n_steps=1, tolerance=0, **options)
    return method(la).prior_precision[0]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_search_starts_where_it_is_told_to(structure):
    la = fitted(structure=structure)
    shapes = {"scalar": 1, "layerwise": len(la.blocks)}
    if structure == "diag":
        shapes["diag"] = la.n_params
    for prior, size in shapes.items():
        start = first_point(la, init_prior_prec=2.5, prior_structure=prior)
        torch.testing.assert_close(start, torch.full((size,), 2.5).double())
    several = torch.linspace(1, 2, len(la.blocks))
    torch.testing.assert_close(first_point(la, init_prior_prec=several), several.double())


@pytest.mark.parametrize(
    "start", [0.0, -1.0, torch.tensor([1.0] * 7 + [-1.0]), torch.tensor([1.0] * 7 + [0.0])], ids=str
)
def test_a_start_that_is_not_above_0_is_refused(start):
    la = fitted(prior_precision=0.4)
    with pytest.raises(ValueError, match="init_prior_prec must be above 0"):
        Marglik(init_prior_prec=start)(la)
    assert la.prior_precision.tolist() == [0.4]


def test_options_are_fields_that_stay():
    method = ValGD(val_loader=[], n_steps=3)
    assert (method.n_steps, method.lr, method.prior_structure) == (3, 0.1, "scalar")
    with pytest.raises(FrozenInstanceError):
        method.n_steps = 4
    with pytest.raises(TypeError):
        ValGD()


def test_an_object_is_called_with_a_posterior():
    la = fitted()
    history = Marglik(prior_structure="layerwise", tolerance=0, n_steps=3)(la)
    assert isinstance(history, TuningHistory)
    assert history.prior_precision.shape == (3, len(la.blocks))
    assert len(la.prior_precision) == len(la.blocks)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_search_that_fails_on_its_way_undoes_everything(structure):
    la = fitted(structure=structure, prior_precision=0.4)
    batch, points = ragged_batches()[0], []
    expected = la(batch), la.sample(2, torch.Generator().manual_seed(0))

    def loss(*_):
        points.append(la.prior_precision.item())
        if len(points) == 5:
            raise KeyboardInterrupt
        return torch.tensor(float(len(points)))

    with pytest.raises(KeyboardInterrupt):
        GridSearch(val_loader=ragged_batches(), loss=loss)(la)
    assert len(set(points)) > 1
    assert la.prior_precision.tolist() == [0.4]
    assert torch.equal(la(batch), expected[0])
    assert torch.equal(la.sample(2, torch.Generator().manual_seed(0)), expected[1])


def test_data_that_are_missing_leave_the_prior_precision():
    la = fitted(prior_precision=0.4)
    with pytest.raises(ValueError, match="no data"):
        Agreement(train_loader=[], init_prior_prec=7.0)(la)
    assert la.prior_precision.tolist() == [0.4]


COUNTS = [
    (name, field.name)
    for name, method in METHODS.items()
    for field in fields(method)
    if field.name in ("n_samples", "n_steps", "grid_size", "batch_size")
]


@pytest.mark.parametrize(("name", "option"), COUNTS)
def test_numbers_of_things_are_at_least_1(name, option):
    data = dict.fromkeys(required_data(name), ())
    with pytest.raises(ValueError, match=f"{option} must be at least 1"):
        METHODS[name](**data, **{option: 0})


@pytest.mark.parametrize("name", METHODS)
def test_a_structure_that_does_not_exist_is_refused(name):
    with pytest.raises(ValueError, match="prior_structure 'layers' is none of"):
        METHODS[name](**dict.fromkeys(required_data(name), ()), prior_structure="layers")

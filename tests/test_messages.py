"""Errors that name a place, and warnings that point at the user's own line."""

import warnings
from pathlib import Path

import laplace
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import laplace_lora_ext
from laplace_lora_ext.messages import naming
from tests.support.models import pairs, plain_model
from tests.support.posteriors import make


@pytest.mark.parametrize("kind", [ValueError, NotImplementedError])
def test_places_are_named_from_the_outermost_in(kind):
    original = kind("non-finite numbers")
    with (
        pytest.raises(kind) as error,
        naming("batch 3"),
        naming("LoRA layer first"),
    ):
        raise original
    assert str(error.value) == "batch 3: LoRA layer first: non-finite numbers"
    assert error.value.__cause__.__cause__ is original


def the_same_of_all(*_) -> Tensor:
    """Give a search nothing to choose by."""
    return torch.tensor(1.0)


@pytest.mark.parametrize("structure", ["lowrank_kron", "kron"])
def test_fits_and_searches_warn_of_the_users_line(structure):
    """Through the host, torch and several layers of the library."""
    (six,) = pairs(n=6)
    X, y = six
    loader = DataLoader(
        TensorDataset(X, y),
        batch_size=4,
        # Six are no whole number of batches of four: two are left out.
        drop_last=True,
    )
    fitted_to = (X[:4], y[:4])
    la = make(plain_model(), structure)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        la.fit(loader)
        la.optimize_prior_precision(n_steps=1)
        la.optimize_prior_precision(
            method="agreement",
            train_loader=[fitted_to],
        )
        la.optimize_prior_precision(
            method="gridsearch",
            val_loader=[six],
            loss=the_same_of_all,
            grid_size=2,
        )
    messages = []
    for warning in caught:
        if warning.filename == __file__:
            messages.append(str(warning.message))
    for part in (
        "its data set has 6",
        "not converged in 1 steps",
        "the same at every point",
    ):
        assert any(part in message for message in messages), part
    # Neither the host's lines nor the library's own are any that a user could change.
    for package in (laplace, laplace_lora_ext):
        folder = Path(str(package.__file__)).parent
        for warning in caught:
            assert folder not in Path(warning.filename).parents, warning

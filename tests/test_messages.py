"""Errors that name a place, and warnings that point at the user's own line."""

import warnings
from pathlib import Path

import laplace
import pytest
from torch.utils.data import DataLoader, TensorDataset

import laplace_lora_ext
from laplace_lora_ext.messages import naming
from tests.support.models import pairs, plain_model
from tests.support.posteriors import make


@pytest.mark.parametrize("kind", [ValueError, NotImplementedError])
def test_places_are_named_from_the_outermost_in(kind):
    original = kind("non-finite numbers")
    with pytest.raises(kind) as error, naming("batch 3"), naming("LoRA layer first"):
        raise original
    assert str(error.value) == "batch 3: LoRA layer first: non-finite numbers"
    assert error.value.__cause__.__cause__ is original
    # A subclass may be made of more than a message.
    with pytest.raises(UnicodeDecodeError), naming("batch 3"):
        b"\xff".decode()


@pytest.mark.parametrize("structure", ["lowrank_kron", "kron"])
def test_fits_and_searches_warn_of_the_users_line(structure):
    """Through the host, torch and several layers of the library."""
    ((X, y),) = pairs(n=6)
    # Six are no whole number of batches of four: two are left out.
    loader = DataLoader(TensorDataset(X, y), batch_size=4, drop_last=True)
    la = make(plain_model(), structure)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        la.fit(loader)
        la.optimize_prior_precision(n_steps=1)
        la.optimize_prior_precision(
            method="gridsearch",
            val_loader=[(X, y)],
            optimize_scale=False,
            log_prior_prec_min=-9,
            log_prior_prec_max=-6,
            grid_size=3,
        )
    messages = [str(each.message) for each in caught if each.filename == __file__]
    for part in ("4 examples, but its", "not converged in 1", "of the grid is the"):
        assert any(part in message for message in messages), part
    # Neither the host's lines nor the library's own are any that a user could change.
    for package in (laplace, laplace_lora_ext):
        folder = Path(str(package.__file__)).parent
        for warning in caught:
            assert folder not in Path(warning.filename).parents, warning


# --- calls with something else than what is expected ----------------------------------


TOKENIZE = "must be tensors"


def test_what_is_wrong_is_named(la, batch):
    for call, message in (
        (lambda: la(batch, link_approx="nope"), "'nope' is none of"),
        (
            lambda: make(la.model.model, backend_kwargs={"num_samples": 2.5}),
            "num_samples must be",
        ),
        (lambda: la.predict_proba(["red sky", "blue"]), TOKENIZE),
        (lambda: la.fit("red sky"), TOKENIZE),
        (lambda: la({"input_ids": batch["input_ids"].numpy()}), TOKENIZE),
        (lambda: la.predict([{"input_ids": batch["input_ids"][0]}]), TOKENIZE),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()

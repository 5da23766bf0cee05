"""Threads that share a model take turns; compiled code stays outside."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.support.models import (
    first_batch,
    lora_model,
    ragged_batches,
)
from tests.support.posteriors import STRUCTURES, fitted


def test_fits_statistics_and_predictions_of_one_model_exclude_each_other():
    la = fitted()
    batches = ragged_batches()
    batch = first_batch()
    expected = la(batch)

    def fit() -> None:
        la.fit(batches)

    def collect_statistics() -> None:
        la.predictive_statistics(batches)

    def predict_by_draws() -> None:
        la(
            batch,
            pred_type="nn",
            link_approx="mc",
            n_samples=2,
        )

    # Weights that another thread draws or moves would show here.
    def predict_the_same() -> None:
        found = la(batch)
        assert_close(found, expected, rtol=0, atol=0)

    uses = [fit, collect_statistics, predict_by_draws, predict_the_same]
    with ThreadPoolExecutor(max_workers=4) as pool:
        # Each often enough that they meet.
        futures = [pool.submit(use) for use in uses * 4]
        for future in futures:
            # Raises what its thread has raised.
            future.result()


def attributes_of(model: nn.Module) -> list[dict[str, Any]]:
    """Copy what each module of a model holds."""
    return [dict(vars(module)) for module in model.modules()]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_partly_compiled_model_has_the_posterior_of_the_model_as_it_was(structure):
    batch = first_batch()
    as_it_was = fitted(structure=structure)
    expected = as_it_was.predictive_moments(batch)
    model = lora_model("bert")
    bert = model.base_model.model.bert
    bert.encoder = torch.compile(bert.encoder)
    before = attributes_of(model)
    message = "The model is compiled: fits and predictions run it eag"
    with pytest.warns(UserWarning, match=message):
        la = fitted(model=model, structure=structure)
    found = la.predictive_moments(batch)
    assert_close(found, expected, rtol=1e-12, atol=1e-15)
    assert attributes_of(model) == before

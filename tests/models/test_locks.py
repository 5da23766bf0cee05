"""Threads that share a model take turns; compiled code stays outside."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.testing import assert_close

from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import STRUCTURES, fitted


def test_fits_statistics_and_predictions_of_one_model_exclude_each_other():
    la = fitted()
    batches = ragged_batches()
    batch = batches[0]
    expected = la(batch)

    def fit():
        la.fit(batches)

    def collect_statistics():
        la.predictive_statistics(batches)

    def predict_by_draws():
        la(batch, pred_type="nn", link_approx="mc", n_samples=2)

    def predict_the_same():
        assert_close(la(batch), expected, rtol=0, atol=0)

    uses = [fit, collect_statistics, predict_by_draws, predict_the_same]
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(use) for use in uses * 4]:
            future.result()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_partly_compiled_model_has_the_posterior_of_the_model_as_it_was(structure):
    batch = ragged_batches()[0]
    model = lora_model("bert")
    bert = model.base_model.model.bert
    bert.encoder = torch.compile(bert.encoder)
    before = [dict(vars(module)) for module in model.modules()]
    expected = fitted(structure=structure).predictive_moments(batch)
    with pytest.warns(
        UserWarning, match="The model is compiled: fits and predictions run it eag"
    ):
        la = fitted(model=model, structure=structure)
    found = la.predictive_moments(batch)
    assert_close(found, expected, rtol=1e-12, atol=1e-15)
    assert [dict(vars(module)) for module in model.modules()] == before

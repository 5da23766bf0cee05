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
    expected = la(batches[0])
    uses = [
        lambda: la.fit(batches),
        lambda: la.predictive_statistics(batches),
        lambda: la(batches[0], pred_type="nn", link_approx="mc", n_samples=2),
        lambda: assert_close(la(batches[0]), expected, rtol=0, atol=0),
    ]
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(use) for use in uses * 4]:
            future.result()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_partly_compiled_model_has_the_posterior_of_the_model_as_it_was(structure):
    batch = ragged_batches()[0]
    model = lora_model("bert")
    model.base_model.model.bert.encoder = torch.compile(model.base_model.model.bert.encoder)
    before = [dict(vars(module)) for module in model.modules()]
    expected = fitted(structure=structure).predictive_moments(batch)
    with pytest.warns(UserWarning, match="The model is compiled: fits and predictions run it eag"):
        la = fitted(model=model, structure=structure)
    assert_close(la.predictive_moments(batch), expected, rtol=1e-12, atol=1e-15)
    assert [dict(vars(module)) for module in model.modules()] == before

"""Numbers that make no posterior are refused, and new ones are heeded."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laplace_lora_ext import from_pretrained
from tests.support.models import ragged_batches
from tests.support.posteriors import STRUCTURES, fitted

IMPOSSIBLE = [0.0, -1, float("nan"), float("inf"), np.float32(-1), torch.tensor(-1.0)]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["prior_precision", "sigma_noise", "temperature"])
def test_what_makes_no_gaussian_is_refused_and_changes_nothing(name, structure):
    la, (batch, *_) = fitted(structure=structure), ragged_batches()
    before, expected = getattr(la, name), la.predictive_moments(batch)
    for value in IMPOSSIBLE:
        with pytest.raises(ValueError, match=f"{name} must be positive and finite, not "):
            setattr(la, name, value)
    assert getattr(la, name) is before
    torch.testing.assert_close(la.predictive_moments(batch).f_var, expected.f_var)


def test_one_block_without_a_positive_prior_precision_is_refused():
    la = fitted(structure="diag")
    values = torch.ones(len(la.blocks))
    values[3] = -1
    with pytest.raises(ValueError, match=r"prior_precision must be positive.*1\.0, -1\.0, 1\.0"):
        la.log_marginal_likelihood(values)
    assert la.prior_precision.tolist() == [1.0]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_new_temperature_is_that_of_a_posterior_made_with_it(structure):
    la, (batch, *_) = fitted(structure=structure), ragged_batches()
    la(batch)
    la.temperature = 0.3
    other = fitted(structure=structure, temperature=0.3)
    torch.testing.assert_close(
        la.predictive_moments(batch).f_var, other.predictive_moments(batch).f_var
    )
    assert la.log_marginal_likelihood() == other.log_marginal_likelihood()


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("value", [torch.ones(8), torch.ones(0), np.array([2.0]), "2", None, [2.0]])
def test_a_temperature_is_one_number(value, structure):
    la = fitted(structure=structure)
    with pytest.raises(ValueError, match="temperature must be one number, not "):
        la.temperature = value
    assert la.temperature == 1.0


@pytest.mark.parametrize("value", [2, np.float32(2), np.int64(2), torch.tensor([[2.0]])])
def test_a_temperature_of_any_type_can_be_saved(value, tmp_path):
    la, (batch, *_) = fitted(), ragged_batches()
    la.temperature = value
    la.save_pretrained(tmp_path)
    loaded = from_pretrained(la.model.model, tmp_path)
    assert torch.equal(la(batch), loaded(batch))
    la.temperature = 2.0
    assert torch.equal(la(batch), loaded(batch))

"""What must not matter: batch size, padding, the order of modules, one run or two."""

from functools import partial

import pytest
import torch
from torch.testing import assert_close

from tests.support.models import ragged_batches
from tests.support.posteriors import KFAC_APPROX, fitted

# As many columns as there are: what a rank leaves out depends on the order of the rows.
whole = partial(fitted, rank=100)
# Sums in other orders, and eigendecompositions of them.
CLOSE = {"rtol": 1e-8, "atol": 1e-10}


def assert_same_posterior(found, expected):
    assert found.n_data == expected.n_data
    assert_close(found.H.to_matrix(), expected.H.to_matrix(), **CLOSE)
    evidence = found.log_marginal_likelihood()
    expected_evidence = expected.log_marginal_likelihood()
    assert_close(evidence, expected_evidence, **CLOSE)


@pytest.mark.parametrize(
    ("kind", "other_batches", "kfac_approx"),
    [
        ("gpt2", ragged_batches(batch_size=1), "gradient"),
        ("gpt2", ragged_batches(batch_size=8), "expand"),
        ("gpt2", ragged_batches(padding_side="left", padded_to=20), "expand"),
        # It counts positions from the first real token by itself.
        ("gpt_neox", ragged_batches(padding_side="left", padded_to=12), "expand"),
        ("bert", ragged_batches(padded_to=20), "gradient"),
    ],
)
def test_batch_size_padding_side_and_amount(kind, other_batches, kfac_approx):
    batches = ragged_batches()
    reference = whole(kind, batches, kfac_approx=kfac_approx)
    other = whole(kind, other_batches, kfac_approx=kfac_approx)
    assert_same_posterior(other, reference)
    expected = torch.cat([reference(batch) for batch in batches])
    found = torch.cat([other(batch) for batch in other_batches])
    assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_two_runs_are_one_and_refitting_starts_afresh(kfac_approx):
    batches = ragged_batches()
    once = whole("bert", batches, kfac_approx=kfac_approx)
    twice = whole("bert", batches[:1], kfac_approx=kfac_approx)
    twice.fit(batches[1:], override=False)
    assert_same_posterior(twice, once)
    # Nothing of both is left.
    twice.fit(batches)
    assert_same_posterior(twice, once)

"""What must not matter: batch size, padding, the order of modules, one run or two."""

from functools import partial

import pytest
import torch
from torch.testing import assert_close

from tests.support.models import ragged_batches
from tests.support.posteriors import KFAC_APPROX, fitted

whole = partial(fitted, rank=100)  # as many columns as there are
CLOSE = {"rtol": 1e-8, "atol": 1e-10}


def assert_same_posterior(first, second):
    assert_close(first.H.to_matrix(), second.H.to_matrix(), **CLOSE)
    assert_close(first.log_marginal_likelihood(), second.log_marginal_likelihood(), **CLOSE)
    assert first.n_data == second.n_data


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("gpt2", {"batch_size": 1}),
        ("gpt2", {"batch_size": 8}),
        ("gpt2", {"padding_side": "left", "padded_to": 20}),
        ("gpt_neox", {"padding_side": "left", "padded_to": 12}),
        ("bert", {"padded_to": 20}),
    ],
)
def test_batch_size_padding_side_and_amount(kind, way, kfac_approx):
    reference = whole(kind, ragged_batches(), kfac_approx=kfac_approx)
    batches = ragged_batches(**way)
    other = whole(kind, batches, kfac_approx=kfac_approx)
    assert_same_posterior(reference, other)
    found, expected = (
        torch.cat([la(batch) for batch in data])
        for la, data in ((other, batches), (reference, ragged_batches()))
    )
    assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_two_runs_are_one_and_refitting_starts_afresh(kfac_approx):
    batches = ragged_batches()
    once = whole("bert", batches, kfac_approx=kfac_approx)
    twice = whole("bert", batches[:1], kfac_approx=kfac_approx)
    twice.fit(batches[1:], override=False)
    assert_same_posterior(once, twice)
    twice.fit(batches)
    assert_same_posterior(once, twice)

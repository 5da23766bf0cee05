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
    assert_close(
        first.H.to_matrix(),
        second.H.to_matrix(),
        **CLOSE,
    )
    assert_close(
        first.log_marginal_likelihood(), second.log_marginal_likelihood(), **CLOSE
    )
    assert first.n_data == second.n_data


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
@pytest.mark.parametrize(
    ("kind", "other_batches"),
    [
        ("gpt2", ragged_batches(batch_size=1)),
        ("gpt2", ragged_batches(batch_size=8)),
        ("gpt2", ragged_batches(padding_side="left", padded_to=20)),
        ("gpt_neox", ragged_batches(padding_side="left", padded_to=12)),
        ("bert", ragged_batches(padded_to=20)),
    ],
    ids=[
        "one text a batch",
        "one batch",
        "padded on the left",
        "padded on the left, another model",
        "padded further",
    ],
)
def test_batch_size_padding_side_and_amount(kind, other_batches, kfac_approx):
    batches = ragged_batches()
    reference = whole(kind, batches, kfac_approx=kfac_approx)
    other = whole(kind, other_batches, kfac_approx=kfac_approx)
    assert_same_posterior(reference, other)
    expected = torch.cat([reference(batch) for batch in batches])
    found = torch.cat([other(batch) for batch in other_batches])
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

"""Loaders that are empty, cut short, or of something else than batches."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.support.models import pairs, plain_model
from tests.support.posteriors import fitted, make

((X, Y),) = pairs(n=6)
Pair = tuple[Tensor, Tensor]


@pytest.mark.parametrize("loader", [[], DataLoader(TensorDataset(X[:0]))])
def test_an_empty_loader_is_refused(la, loader):
    with pytest.raises(ValueError, match="no data"):
        la.fit(loader)


@pytest.mark.parametrize("batch", [X, (X, Y, None), None])
def test_a_batch_that_is_neither_a_mapping_nor_a_pair_is_refused(la, batch):
    with pytest.raises(TypeError, match=rf"pair.*{type(batch).__name__}"):
        la.fit([batch])


def test_lists_of_tokens_want_a_collator():
    # As in a data set of tokenised texts that no collator has made tensors of.
    rows = [{"input_ids": [3, 4], "labels": 1}, {"input_ids": [5], "labels": 0}]
    la = fitted()
    for call, data in ((la.fit, rows), (la.predict, rows), (la, rows[0])):
        with pytest.raises(TypeError, match="collators"):
            call(data)


# --- six examples, in batches of four at most -----------------------------------------


class Stream(IterableDataset):
    """A data set without a length."""

    def __iter__(self) -> Iterator[Pair]:
        yield from zip(X, Y, strict=True)


FOUR_AND_TWO = [(X[:4], Y[:4]), (X[4:], Y[4:])]
LOADERS = {
    "data set": DataLoader(TensorDataset(X, Y), batch_size=4),
    # Its data set's length is that of batches, not of examples.
    "data set of batches": DataLoader(FOUR_AND_TWO, batch_size=None),
    "stream": DataLoader(Stream(), batch_size=4),
    "generator": (batch for batch in FOUR_AND_TWO),
}


@pytest.mark.parametrize("name", LOADERS)
def test_what_is_seen_whole_is_counted_without_a_warning(name):
    la = make(plain_model())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The loader gave")
        la.fit(LOADERS[name])
    assert la.n_data == 6


def test_drop_last_counts_what_was_seen_and_warns(la):
    loader = DataLoader(TensorDataset(X, Y), batch_size=4, drop_last=True)
    with pytest.warns(UserWarning, match=r"4 examples.*data set has 6") as caught:
        la.fit(loader)
    assert la.n_data == 4
    # It is given once.
    (warning,) = [each for each in caught if "data set has" in str(each.message)]
    # It points to the user's own line.
    assert warning.filename == __file__
    found = la.log_marginal_likelihood()
    la.fit([FOUR_AND_TWO[0]])
    assert torch.equal(found, la.log_marginal_likelihood())

"""Loaders that are empty, cut short, or of something else than batches."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    TensorDataset,
)

from tests.support.models import pairs
from tests.support.posteriors import fitted

NO_EXAMPLES = TensorDataset(torch.zeros(0, 5))
Pair = tuple[Tensor, Tensor]


@pytest.mark.parametrize(
    "loader",
    [
        pytest.param([], id="a list"),
        pytest.param(iter(()), id="an iterator"),
        pytest.param(DataLoader(NO_EXAMPLES), id="a loader"),
    ],
)
def test_an_empty_loader_is_refused(la, loader):
    with pytest.raises(ValueError, match="no data"):
        la.fit(loader)


((X, Y),) = pairs()
NEITHER = {
    "tensor": X,
    "tuple of one": (X,),
    "tuple of three": (X, Y, None),
    "none": None,
}


@pytest.mark.parametrize("batch", NEITHER.values(), ids=NEITHER)
def test_a_batch_that_is_neither_a_mapping_nor_a_pair_is_refused(la, batch):
    name = type(batch).__name__
    message = rf"a pair \(X, y\), not {name}"
    with pytest.raises(TypeError, match=message):
        la.fit([batch])


# As in a data set of tokenised texts that no collator has made tensors of.
ROWS = [
    {"input_ids": [3, 4], "labels": 1},
    {"input_ids": [5], "labels": 0},
]


def test_a_fit_of_lists_of_tokens_wants_a_collator():
    la = fitted()
    with pytest.raises(TypeError, match="as collators make them"):
        la.fit(ROWS)


def test_predictions_from_lists_of_tokens_want_a_collator():
    la = fitted()
    with pytest.raises(TypeError, match="as collators make them"):
        la.predict(ROWS)


def test_a_prediction_from_a_list_of_tokens_wants_a_collator():
    la = fitted()
    with pytest.raises(TypeError, match="as collators make them"):
        la(ROWS[0])


# --- six examples, in batches of four at most -----------------------------------------


def six_examples() -> Pair:
    (batch,) = pairs(n=6)
    return batch


def four_and_two() -> list[Pair]:
    """Make a batch of four examples and one of two."""
    return pairs(n=4) + pairs(n=2)


class Stream(IterableDataset):
    """A data set without a length."""

    def __iter__(self) -> Iterator[Pair]:
        X, y = six_examples()
        yield from zip(X, y, strict=True)


def data_set() -> DataLoader:
    examples = TensorDataset(*six_examples())
    return DataLoader(examples, batch_size=4)


def data_set_of_batches() -> DataLoader:
    return DataLoader(four_and_two(), batch_size=None)


def stream() -> DataLoader:
    return DataLoader(Stream(), batch_size=4)


def generator() -> Iterator[Pair]:
    yield from four_and_two()


@pytest.mark.parametrize(
    "make_loader",
    [
        data_set,
        # Its data set's length is that of batches, not of examples.
        data_set_of_batches,
        stream,
        generator,
    ],
)
def test_what_is_seen_whole_is_counted_without_a_warning(la, make_loader):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The loader gave")
        la.fit(make_loader())
    assert la.n_data == 6


def test_drop_last_counts_what_was_seen_and_warns(la):
    X, y = six_examples()
    loader = DataLoader(
        TensorDataset(X, y),
        batch_size=4,
        drop_last=True,
    )
    message = r"4 examples.*data set has 6"
    with pytest.warns(UserWarning, match=message) as caught:
        la.fit(loader)
    assert la.n_data == 4
    ours = []
    for warning in caught:
        if "data set has" in str(warning.message):
            ours.append(warning)
    # It is given once.
    (warning,) = ours
    # It points to the user's own line.
    assert warning.filename == __file__

    found = la.log_marginal_likelihood()
    four = (X[:4], y[:4])
    la.fit([four])
    expected = la.log_marginal_likelihood()
    assert torch.equal(found, expected)

"""Loaders that are empty, cut short, or of something else than batches."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.support.models import pairs
from tests.support.posteriors import fitted

NO_EXAMPLES = TensorDataset(torch.zeros(0, 5))


@pytest.mark.parametrize(
    "loader",
    [[], iter(()), DataLoader(NO_EXAMPLES)],
)
def test_an_empty_loader_is_refused(la, loader):
    with pytest.raises(ValueError, match="no data"):
        la.fit(loader)


((X, Y),) = pairs()


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(X, id="tensor"),
        pytest.param((X,), id="tuple of one"),
        pytest.param((X, Y, None), id="tuple of three"),
        pytest.param(None, id="none"),
        pytest.param("text", id="text"),
    ],
)
def test_a_batch_that_is_neither_a_mapping_nor_a_pair_is_refused(la, batch):
    message = rf"a pair \(X, y\), not {type(batch).__name__}"
    with pytest.raises(TypeError, match=message):
        la.fit([batch])


def fit(la, rows) -> None:
    la.fit(rows)


def predict(la, rows) -> None:
    la.predict(rows)


def predict_one(la, rows) -> None:
    la(rows[0])


@pytest.mark.parametrize("use", [fit, predict, predict_one])
def test_lists_of_tokens_want_a_collator(use):
    rows = [
        {"input_ids": [3, 4], "labels": 1},
        {"input_ids": [5], "labels": 0},
    ]
    with pytest.raises(TypeError, match="as collators make them"):
        use(fitted(), rows)


# --- six examples, in batches of four at most -----------------------------------------


def six_examples() -> tuple[torch.Tensor, torch.Tensor]:
    ((X, y),) = pairs(n=6)
    return X, y


def four_and_two() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make a batch of four examples and one of two."""
    return [*pairs(n=4), *pairs(n=2)]


class Stream(IterableDataset):
    """A data set without a length."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        X, y = six_examples()
        yield from zip(X, y, strict=True)


def data_set() -> DataLoader:
    return DataLoader(TensorDataset(*six_examples()), batch_size=4)


def data_set_of_batches() -> DataLoader:
    return DataLoader(four_and_two(), batch_size=None)


def stream() -> DataLoader:
    return DataLoader(Stream(), batch_size=4)


def generator() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield from four_and_two()


@pytest.mark.parametrize(
    "make_loader", [data_set, data_set_of_batches, stream, generator]
)
def test_what_is_seen_whole_is_counted_without_a_warning(la, make_loader):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The loader gave")
        la.fit(make_loader())
    assert la.n_data == 6


def test_drop_last_counts_what_was_seen_and_warns(la):
    X, y = six_examples()
    loader = DataLoader(TensorDataset(X, y), batch_size=4, drop_last=True)
    with pytest.warns(UserWarning, match=r"4 examples.*data set has 6") as caught:
        la.fit(loader)
    assert la.n_data == 4
    (warning,) = [each for each in caught if "data set has" in str(each.message)]
    # It points to the user's own line.
    assert warning.filename == __file__
    found = la.log_marginal_likelihood()
    la.fit([(X[:4], y[:4])])
    assert torch.equal(found, la.log_marginal_likelihood())

"""Loaders that are empty, cut short, or of something else than batches."""

import warnings
from collections.abc import Iterator

import pytest
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.support.models import pairs

((X, Y),) = pairs(n=6)
# A data set of six, and one whose length is that of batches, not of examples.
EXAMPLES = TensorDataset(X, Y)
FOUR_AND_TWO = [(X[:4], Y[:4]), (X[4:], Y[4:])]


@pytest.mark.parametrize(
    ("loader", "error", "message"),
    [
        ([], ValueError, "no data"),
        ([X], ValueError, r"Tensor.*pairs \(X, y\)"),
        ([(X, Y, None)], TypeError, "pair.*tuple"),
    ],
)
def test_what_is_no_data_is_refused(unfitted, loader, error, message):
    with pytest.raises(error, match=message):
        unfitted.fit(loader)


class Stream(IterableDataset):
    """A data set without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(X, Y, strict=True)


def test_what_is_seen_whole_is_counted_without_a_warning(unfitted):
    loaders = (
        DataLoader(EXAMPLES, batch_size=4),
        DataLoader(FOUR_AND_TWO, batch_size=None),
        DataLoader(Stream(), batch_size=4),
        iter(FOUR_AND_TWO),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The loader gave")
        for loader in loaders:
            unfitted.fit(loader)
            assert unfitted.n_data == 6

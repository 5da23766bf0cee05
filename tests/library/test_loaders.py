"""Loaders that are empty, cut short, or of something else than batches."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.support.models import pairs
from tests.support.posteriors import fitted


@pytest.mark.parametrize("loader", [[], iter(()), DataLoader(TensorDataset(torch.zeros(0, 5)))])
def test_an_empty_loader_is_refused(la, loader):
    with pytest.raises(ValueError, match="no data"):
        la.fit(loader)


@pytest.mark.parametrize(
    "batch",
    [pairs()[0][0], (pairs()[0][0],), (*pairs()[0], None), None, "text"],
    ids=lambda b: type(b).__name__,
)
def test_a_batch_that_is_neither_a_mapping_nor_a_pair_is_refused(la, batch):
    with pytest.raises(TypeError, match=rf"a pair \(X, y\), not {type(batch).__name__}"):
        la.fit([batch])


def test_lists_of_tokens_want_a_collator():
    la = fitted()
    rows = [{"input_ids": [3, 4], "labels": 1}, {"input_ids": [5], "labels": 0}]
    for use in (la.fit, la.predict, lambda rows: la(rows[0])):
        with pytest.raises(TypeError, match="as collators make them"):
            use(rows)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from zip(*pairs(n=6)[0], strict=True)


WHOLE = {
    "data set": lambda: DataLoader(TensorDataset(*pairs(n=6)[0]), batch_size=4),
    "data set of batches": lambda: DataLoader([pairs(n=n)[0] for n in (4, 2)], batch_size=None),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "generator": lambda: (pairs(n=n)[0] for n in (4, 2)),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_what_is_seen_whole_is_counted_without_a_warning(la, kind):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The loader gave")
        la.fit(WHOLE[kind]())
    assert la.n_data == 6


def test_drop_last_counts_what_was_seen_and_warns(la):
    X, y = pairs(n=6)[0]
    loader = DataLoader(TensorDataset(X, y), batch_size=4, drop_last=True)
    with pytest.warns(UserWarning, match=r"4 examples.*data set has 6") as caught:
        la.fit(loader)
    assert la.n_data == 4
    (one,) = (each for each in caught if "data set has" in str(each.message))
    assert one.filename == __file__
    evidence = la.log_marginal_likelihood()
    la.fit([(X[:4], y[:4])])
    assert torch.equal(evidence, la.log_marginal_likelihood())

"""Predictions of whole data sets, against those of each example alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import datasets
import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader

from laplace_lora_ext import Prediction
from tests.support.dense import unpadded
from tests.support.models import ragged_batches
from tests.support.posteriors import fitted, generator
from tests.support.ranks import (
    Texts,
    accelerated,
    assert_alike,
    failures,
    on_ranks,
    strided_loader,
)

CLOSE = {"rtol": 1e-9, "atol": 1e-11}
LENGTHS = [2, 7, 4, 5, 7, 3, 6, 2, 7, 4, 1]


def rows() -> list[dict]:
    """Make texts of several lengths without padding, as a tokenizer leaves them."""
    examples = []
    for batch in ragged_batches(lengths=LENGTHS, batch_size=1):
        (ids,) = unpadded(batch, 0)["input_ids"]
        label = batch["labels"].item()
        examples.append({"input_ids": ids.tolist(), "labels": label})
    return examples


def collate(records: list[dict]) -> dict[str, torch.Tensor]:
    """Pad texts to the longest of them."""
    longest = max(len(record["input_ids"]) for record in records)
    ids = []
    mask = []
    for record in records:
        n_real = len(record["input_ids"])
        n_padded = longest - n_real
        ids.append(record["input_ids"] + [0] * n_padded)
        mask.append([1] * n_real + [0] * n_padded)
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": torch.tensor(mask),
        "labels": torch.tensor([record["labels"] for record in records]),
    }


@pytest.fixture(scope="module")
def la():
    return fitted()


@pytest.fixture(scope="module")
def expected(la) -> Prediction:
    """Predictions of one example at a time, in the data's order."""
    alone = []
    for row in rows():
        decision = la.predict(collate([row]), n_samples=50, generator=generator())
        alone.append(decision)
    parts = [torch.cat(of_examples) for of_examples in zip(*alone, strict=True)]
    return Prediction(*parts)


class Rows:
    """A data set with indices and nothing else."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict:
        return rows()[index]


BATCHES = {"collate_fn": collate, "batch_size": 4}


def loader():
    return DataLoader(Rows(), **BATCHES)


def batches():
    return list(loader())


def one_by_one():
    return (collate([row]) for row in rows())


def data_set():
    return datasets.Dataset.from_list(rows())


@dataclass(frozen=True)
class Given:
    """Data, and what a prediction must be told to make batches of them."""

    data: Callable[[], Any]
    options: Mapping[str, Any] = field(default_factory=dict)


DATA = {
    "DataLoader": Given(loader),
    "list of batches": Given(batches),
    "generator": Given(one_by_one),
    "datasets": Given(data_set, BATCHES),
    "indexed": Given(Rows, {"collate_fn": collate, "batch_size": 1}),
    "list of rows": Given(rows, {"collate_fn": collate, "batch_size": 32}),
}


@pytest.mark.parametrize("kind", DATA)
def test_data_are_predicted_in_their_order(la, expected, kind, capsys):
    given = DATA[kind]
    found = la.predict(
        given.data(),
        n_samples=50,
        generator=generator(),
        **given.options,
    )
    assert_close(tuple(found), tuple(expected), **CLOSE)
    assert not capsys.readouterr().err
    proba = la.predict_proba(given.data(), progress_bar=True, **given.options)
    assert_close(torch.from_numpy(proba), expected.probabilities, **CLOSE)
    # A bar has an end only where there is a length.
    if kind != "generator":
        assert "[Predictions]: 100%" in capsys.readouterr().err


def test_long_texts_come_first_and_little_is_padded(la):
    shapes = []

    def note_shape(_, inputs):
        (batch,) = inputs
        shapes.append(tuple(batch["input_ids"].shape))

    with la.model.register_forward_pre_hook(note_shape):
        la.predict_proba(Rows(), collate_fn=collate, batch_size=4)
    assert shapes == [(4, 7), (4, 5), (3, 2)]


def test_every_batch_gets_the_same_draws(la):
    (batch,) = ragged_batches(batch_size=8)
    twice = la.predict([batch, batch], "mc", n_samples=5, generator=generator())
    once = la.predict(batch, "mc", n_samples=5, generator=generator())
    first, second = twice.probabilities.split(8)
    assert torch.equal(first, once.probabilities)
    assert torch.equal(second, once.probabilities)
    proba = la.predict_proba([batch, batch], "mc")
    assert (proba[:8] == proba[8:]).all()


def test_ranks_share_a_data_set_and_a_sharded_loader(la):
    def predicted(data, **options):
        return la.predict(data, n_samples=5, generator=generator(), **options)

    def of_rows(rank):
        return predicted(rows(), collate_fn=collate, batch_size=2)

    def strided(rank):
        return predicted(strided_loader(11))

    def prepared(rank):
        loader = DataLoader(Texts(11), batch_size=2)
        return predicted(accelerated(rank, 3, loader))

    def assert_shared(job, expected):
        assert_alike(on_ranks(job, 3), expected, rtol=1e-7, atol=1e-10)

    assert_shared(of_rows, of_rows(0))
    assert_shared(strided, strided(0))
    assert_shared(prepared, strided(0))


def test_a_rank_may_predict_batches_alone(la):
    def job(rank):
        if rank == 0:
            return la.predict_proba(ragged_batches())
        return None

    first, second = on_ranks(job, 2)
    assert first.shape == (8, 3)
    assert second is None


def test_the_error_of_a_rank_in_shared_data_is_everyones(la):
    data = [
        {"input_ids": [3, 4], "labels": 0},
        {"input_ids": [5], "labels": 0},
    ]

    def job(rank):
        if rank:
            la.blocks[0].weight.data.fill_(torch.nan)
        return la.predict_proba(data, collate_fn=collate, batch_size=1)

    first, second = failures(on_ranks(job, 2))
    assert "Rank 1 failed" in first
    assert "weights" in second

"""Predictions of whole data sets, against those of each example alone."""

import datasets
import pytest
import torch
from torch.utils.data import DataLoader

from laplace_lora_ext import Prediction
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
    """Texts of several lengths without padding, as a tokenizer leaves them."""
    examples = ragged_batches(lengths=LENGTHS, batch_size=1)
    real = [
        (
            b["input_ids"][0][b["attention_mask"][0].bool()],
            b["labels"],
        )
        for b in examples
    ]
    return [{"input_ids": ids.tolist(), "labels": label.item()} for ids, label in real]


def collate(records: list[dict]) -> dict[str, torch.Tensor]:
    longest = max(len(record["input_ids"]) for record in records)
    ids = [record["input_ids"] + [0] * (longest - len(record["input_ids"])) for record in records]
    mask = [[1] * len(r["input_ids"]) + [0] * (longest - len(r["input_ids"])) for r in records]
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
    """One example at a time, in the data's order."""
    alone = [la.predict(collate([row]), n_samples=50, generator=generator()) for row in rows()]
    return Prediction(*map(torch.cat, zip(*alone, strict=True)))


class Rows:
    """A data set with indices and nothing else."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict:
        return rows()[index]


BATCHES = {"collate_fn": collate, "batch_size": 4}
DATA = {
    "DataLoader": (lambda: DataLoader(Rows(), **BATCHES), {}),
    "list of batches": (
        lambda: list(DataLoader(Rows(), **BATCHES)),
        {},
    ),
    "generator": (lambda: (collate([row]) for row in rows()), {}),
    "datasets": (
        lambda: datasets.Dataset.from_list(rows()),
        BATCHES,
    ),
    "indexed": (Rows, {"collate_fn": collate, "batch_size": 1}),
    "list of rows": (
        rows,
        {"collate_fn": collate, "batch_size": 32},
    ),
}


@pytest.mark.parametrize("kind", DATA)
def test_data_are_predicted_in_their_order(la, expected, kind, capsys):
    make_data, how = DATA[kind]
    found = la.predict(make_data(), n_samples=50, generator=generator(), **how)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    assert not capsys.readouterr().err
    proba = torch.from_numpy(la.predict_proba(make_data(), progress_bar=True, **how))
    torch.testing.assert_close(proba, expected.probabilities, **CLOSE)
    assert "[Predictions]: 100%" in capsys.readouterr().err or kind == "generator"


def test_long_texts_come_first_and_little_is_padded(la):
    shapes = []
    handle = la.model.register_forward_pre_hook(
        lambda _, args: shapes.append(tuple(args[0]["input_ids"].shape))
    )
    la.predict_proba(Rows(), collate_fn=collate, batch_size=4)
    handle.remove()
    assert shapes == [(4, 7), (4, 5), (3, 2)]


def test_every_batch_gets_the_same_draws(la):
    (batch,) = ragged_batches(batch_size=8)
    found = la.predict([batch, batch], "mc", n_samples=5, generator=generator())
    assert torch.equal(found.probabilities[:8], found.probabilities[8:])
    once = la.predict(batch, "mc", n_samples=5, generator=generator())
    assert torch.equal(found.probabilities[:8], once.probabilities)
    proba = la.predict_proba([batch, batch], "mc")
    assert (proba[:8] == proba[8:]).all()


def test_ranks_share_a_data_set_and_a_sharded_loader(la):
    def predicted(data, **how):
        return la.predict(data, n_samples=5, generator=generator(), **how)

    def of_rows(_):
        return predicted(rows(), collate_fn=collate, batch_size=2)

    def strided(_):
        return predicted(strided_loader(11))

    def prepared(rank):
        return predicted(accelerated(rank, 3, DataLoader(Texts(11), batch_size=2)))

    for job, one in (
        (of_rows, of_rows(0)),
        (strided, strided(0)),
        (prepared, strided(0)),
    ):
        assert_alike(on_ranks(job, 3), one, rtol=1e-7, atol=1e-10)


def test_a_rank_may_predict_batches_alone_and_its_error_in_shared_data_is_everyones(
    la,
):
    first, second = on_ranks(
        lambda rank: la.predict_proba(ragged_batches()) if rank == 0 else None,
        2,
    )
    assert first.shape == (8, 3)
    assert second is None

    def job(rank):
        data = [
            {"input_ids": [3, 4], "labels": 0},
            {"input_ids": [5], "labels": 0},
        ]
        if rank:
            la.blocks[0].weight.data.fill_(torch.nan)
        return la.predict_proba(data, collate_fn=collate, batch_size=1)

    first, second = failures(on_ranks(job, 2))
    assert "Rank 1 failed" in first
    assert "weights" in second

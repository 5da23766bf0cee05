"""Predictions of whole data sets, against those of each example alone."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from laplace_lora_ext import Prediction
from tests.support.models import ragged_batches
from tests.support.posteriors import fitted, generator
from tests.support.ranks import Texts, accelerated, failures, on_ranks, strided_loader

LENGTHS = [2, 7, 4, 5, 7, 3, 6, 2, 7, 4, 1]


@pytest.fixture(scope="module")
def la():
    return fitted()


def predicted(la, data) -> Prediction:
    return la.predict(data, n_samples=50, generator=generator())


DATA = {
    "DataLoader": lambda batches: DataLoader(batches, batch_size=None),
    "list": list,
    "generator": lambda batches: (batch for batch in batches),
}


@pytest.mark.parametrize("kind", DATA)
def test_data_are_predicted_in_their_order(la, kind, capsys):
    alone = [predicted(la, one) for one in ragged_batches(lengths=LENGTHS, batch_size=1)]
    expected = Prediction(*map(torch.cat, zip(*alone, strict=True)))
    batches = ragged_batches(lengths=LENGTHS, batch_size=4)
    found = predicted(la, DATA[kind](batches))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert not capsys.readouterr().err
    proba = torch.from_numpy(la.predict_proba(DATA[kind](batches), progress_bar=True))
    torch.testing.assert_close(proba, expected.probabilities, rtol=1e-9, atol=1e-11)
    assert "[Predictions]: 100%" in capsys.readouterr().err or kind == "generator"


def test_every_batch_gets_the_same_draws(la):
    (batch,) = ragged_batches(batch_size=8)
    found = la.predict([batch, batch], "mc", n_samples=5, generator=generator())
    assert torch.equal(found.probabilities[:8], found.probabilities[8:])
    once = la.predict(batch, "mc", n_samples=5, generator=generator())
    assert torch.equal(found.probabilities[:8], once.probabilities)
    proba = la.predict_proba([batch, batch], "mc")
    assert (proba[:8] == proba[8:]).all()


def test_ranks_share_a_divided_loader(la):
    expected = predicted(la, strided_loader(11))
    for loader in (
        lambda _: strided_loader(11),
        lambda rank: accelerated(rank, 3, DataLoader(Texts(11), batch_size=2)),
    ):
        for result in on_ranks(lambda rank, loader=loader: predicted(la, loader(rank)), 3):
            assert not isinstance(result, Exception), result
            torch.testing.assert_close(result, expected, rtol=1e-7, atol=1e-10)


def test_a_rank_may_predict_batches_alone_and_its_error_in_shared_data_is_everyones(la):
    first, second = on_ranks(
        lambda rank: la.predict_proba(ragged_batches()) if rank == 0 else None, 2
    )
    assert first.shape == (8, 3)
    assert second is None

    def job(rank):
        if rank:
            la.blocks[0].weight.data.fill_(torch.nan)
        return la.predict_proba(strided_loader(2))

    first, second = failures(on_ranks(job, 2))
    assert "Rank 1 failed" in first
    assert "weights" in second

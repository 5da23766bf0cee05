"""Predictions of whole data sets, against those of each example alone."""

from collections.abc import Callable, Sequence
from typing import Any

import datasets
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from laplace_lora_ext import Prediction
from laplace_lora_ext.predictive import data_sets
from tests.support.choices import prompts_of
from tests.support.models import Batch, ragged_batches
from tests.support.posteriors import fitted, generator, plain_regression
from tests.support.ranks import assert_alike, on_ranks

# Of texts alone and of the same texts padded beside others, in float64.
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
# So many that batches of four leave some over, in no order.
LENGTHS = (2, 7, 4, 5, 7, 3, 6, 2, 7, 4, 1)


Row = dict[str, Any]


def rows() -> list[Row]:
    """Make texts of several lengths without padding, as a tokenizer leaves them."""
    examples = []
    for batch in ragged_batches(lengths=LENGTHS, batch_size=1):
        (ids,) = prompts_of(batch)
        examples.append({"input_ids": ids, "labels": batch["labels"].item()})
    return examples


def collate(records: Sequence[Row]) -> Batch:
    """Pad texts to the longest of them."""
    texts = [torch.tensor(record["input_ids"]) for record in records]
    masks = [torch.ones_like(text) for text in texts]
    return {
        "input_ids": pad_sequence(texts, batch_first=True),
        "attention_mask": pad_sequence(masks, batch_first=True),
        "labels": torch.tensor([record["labels"] for record in records]),
    }


# Of the module, for no test here changes it but in a process of its own.
@pytest.fixture(scope="module")
def la():
    return fitted()


@pytest.fixture(scope="module")
def expected(la) -> Prediction:
    """Predictions of one example at a time, in the data's order."""
    alone = [
        la.predict(collate([row]), n_samples=50, generator=generator())
        for row in rows()
    ]
    # Of all examples, one quantity after another.
    quantities = zip(*alone, strict=True)
    return Prediction(*map(torch.cat, quantities))


def of_size(batch_size: int) -> dict[str, Any]:
    """Tell how rows make batches of a size."""
    return {"collate_fn": collate, "batch_size": batch_size}


# Data, and what a prediction must be told to make batches of them.
DATA: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "loader": (lambda: DataLoader(rows(), **of_size(4)), {}),
    "generator": (lambda: (collate([row]) for row in rows()), {}),
    "datasets": (lambda: datasets.Dataset.from_list(rows()), of_size(4)),
}


@pytest.mark.parametrize("kind", DATA)
def test_data_are_predicted_in_their_order(la, expected, kind, capsys):
    make_data, options = DATA[kind]
    draws = {"n_samples": 50, "generator": generator()}
    found = la.predict(make_data(), **draws, **options)
    assert_close(tuple(found), tuple(expected), **CLOSE)
    assert not capsys.readouterr().err
    la.predict_proba(make_data(), progress_bar=True, **options)
    # A bar has an end only where there is a length.
    end = "" if kind == "generator" else ": 100%"
    assert f"[Predictions]{end}" in capsys.readouterr().err


class Counted(list[Row]):
    """Counts how often each example is read, as where images must be decoded."""

    def __init__(self) -> None:
        super().__init__(rows())
        self.n_read = [0] * len(self)

    def __getitem__(self, index: int) -> Row:
        self.n_read[index] += 1
        return super().__getitem__(index)


def test_long_texts_come_first_and_each_example_is_read_once(la, expected, monkeypatch):
    shapes = []

    def note_shape(module: torch.nn.Module, inputs: tuple[Batch]) -> None:
        shapes.append(tuple(inputs[0]["input_ids"].shape))

    data = Counted()
    with la.model.register_forward_pre_hook(note_shape):
        la.predict_proba(data, **of_size(4))
    # As they come, each batch has a text of seven tokens.
    assert shapes == [(4, 7), (4, 5), (3, 2)]
    assert data.n_read == [1] * len(data)
    # More examples than are read at once keep their order.
    monkeypatch.setattr(data_sets, "_BATCHES_AT_ONCE", 2)
    found = la.predict_proba(rows(), **of_size(2))
    assert_close(torch.from_numpy(found), expected.probabilities, **CLOSE)
    # Others than texts are all as long.
    numbers, X = plain_regression()
    assert_close(numbers.predict(X, collate_fn=torch.stack).mean, numbers(X)[0])


def by_five_draws(la: Any, data: Any, **options: Any) -> Prediction:
    """Predict with the same noise each time."""
    return la.predict(data, n_samples=5, generator=generator(), **options)


def test_every_batch_gets_the_same_draws(la, eight_texts):
    both = [eight_texts, eight_texts]
    twice = by_five_draws(la, both, link_approx="mc")
    once = by_five_draws(la, eight_texts, link_approx="mc")
    assert torch.equal(twice.probabilities, once.probabilities.repeat(2, 1))
    few = la.predict_proba(eight_texts, "mc", n_samples=5, generator=generator())
    assert torch.equal(torch.from_numpy(few), once.probabilities)
    first, second = la.predict_proba(both, "mc").reshape(2, 8, 3)
    assert first.tolist() == second.tolist()
    many = la(eight_texts, link_approx="mc", n_samples=100_000, generator=generator())
    # Of one draw, the error would be larger.
    assert_close(torch.from_numpy(first), many, rtol=0, atol=1e-3)


def test_loaders_of_another_order_are_refused(la):
    texts = rows()
    batches = BatchSampler(RandomSampler(texts), 2, False)
    for unordered in ({"batch_sampler": batches}, {"sampler": range(5, 0, -1)}):
        with pytest.raises(ValueError, match="shuffle=False"):
            la.predict(DataLoader(texts, collate_fn=collate, **unordered))
    # Draws of two or three are often in order.
    for n_texts in (2, 3):
        with pytest.raises(ValueError, match="shuffle=False"):
            la.predict(DataLoader(texts[:n_texts], shuffle=True, collate_fn=collate))


def test_texts_of_several_lengths_want_a_collator(la):
    with pytest.raises(ValueError, match="collate_fn"):
        la.predict(datasets.Dataset.from_list(rows()))


# --- several processes ----------------------------------------------------------------


def test_ranks_share_a_data_set(la):
    def job(rank: int = 0) -> Prediction:
        return by_five_draws(la, rows(), **of_size(2))

    # A text may be beside others there, and padded to another length.
    assert_alike(on_ranks(job, 3), job(), rtol=1e-7, atol=1e-10)


def test_a_rank_may_predict_batches_alone(la):
    def job(rank: int) -> Any:
        return la.predict_proba(ragged_batches()) if rank == 0 else None

    first, _ = on_ranks(job, 2)
    assert first.shape == (8, 3)

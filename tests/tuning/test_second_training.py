"""The prior precision that held-out examples choose for another training."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import pad
from torch.testing import assert_close
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler

from laplace_lora_ext import GridSearch, SecondTraining
from laplace_lora_ext.training.trainers import Examples
from tests.support.models import ragged_batches
from tests.support.posteriors import another_training, fitted, generator
from tests.support.ranks import Texts
from tests.support.trainers import values

# Odd, so that batches of two leave one over.
N = 11


class Training:
    """Returns another model, and remembers what it was to train on."""

    seen: Any = None

    def __call__(self, examples: Any) -> nn.Module:
        self.seen = examples
        return another_training()


def loader(places: Sequence[int] = range(N)) -> DataLoader:
    """Load the texts at some places."""
    return DataLoader(Subset(Texts(N), places), batch_size=2)


@pytest.mark.parametrize(
    "start",
    # Numbers to start from are multiplied as a whole. By default a head has its own.
    [
        {"init_prior_prec": torch.linspace(0.5, 2, 10).double()},
        {"prior_structure": "scalar"},
    ],
)
def test_it_takes_over_what_the_held_out_examples_choose(start):
    la = fitted(modules_to_save=True)
    before = values(la.model)
    train = Training()
    history = la.optimize_prior_precision(
        method="second_training",
        train=train,
        train_loader=loader(),
        held_out=0.3,
        generator=generator(3),
        **start,
    )
    examples = Examples.of_loader(loader())
    division = examples.divided(la, 0.3, generator(3))
    assert train.seen.indices == division.rest.indices
    # Others than without a generator.
    assert division.indices != examples.divided(la, 0.3, None).indices

    rest = loader(train.seen.indices)
    other = fitted(model=another_training(), batches=rest, modules_to_save=True)
    # By the default link.
    expected = GridSearch(val_loader=loader(division.indices), **start)(other)
    assert torch.equal(la.prior_precision.double(), other.prior_precision.double())
    assert_close(history.objective, expected.objective)
    (posterior,) = history.posteriors
    assert torch.equal(posterior.prior_precision, la.prior_precision)
    assert_close(values(la.model), before, rtol=0, atol=0)


# --- what can't work ------------------------------------------------------------------


def in_place(la: Any) -> nn.Module:
    """Train the fitted model, and another."""
    la.blocks[0].weight.data.mul_(1.5)
    return another_training()


# Options of the call, or a training by the fitted posterior, and what is said.
REFUSED = [
    ({"held_out": 1.0}, "between 0 and 1"),
    ({"held_out": 0.01}, "too few"),
    ({"held_out": 0.99}, "too few"),
    ({"train_loader": [1, 2]}, "pass a DataLoader"),
    (lambda la: la.model.model, "weights of the"),
    (in_place, "changed"),
]


@pytest.mark.parametrize(("case", "message"), REFUSED)
def test_what_can_not_work_is_refused(case, message):
    la = fitted(prior_precision=0.4)
    options = {"train": Training(), "train_loader": loader()}
    options |= case if isinstance(case, dict) else {"train": lambda _: case(la)}
    with pytest.raises((ValueError, RuntimeError), match=message):
        la.optimize_prior_precision(method="second_training", **options)
    # It is left as it was.
    assert la.prior_precision.tolist() == [0.4]


# --- loaders --------------------------------------------------------------------------


# Neither all texts nor every second.
PART = [1, 2, 4, 7, 9]


@pytest.mark.parametrize(
    ("given", "places", "n_held_out"),
    [
        (DataLoader(Texts(N), 2, sampler=SubsetRandomSampler(PART)), PART, 2),
        # Of unlike sizes, as no `batch_size` would make them.
        (
            DataLoader(Texts(N), batch_sampler=[[0, 4], [2, 6, 8], [10]]),
            range(0, N, 2),
            2,
        ),
        # Whose batches are the examples.
        (DataLoader(ragged_batches(), batch_size=None), range(3), 1),
    ],
)
def test_each_example_that_a_loader_gives_is_trained_on_or_held_out(
    la, given, places, n_held_out
):
    train = Training()
    choose = SecondTraining(train=train, train_loader=given, held_out=0.4)
    choose(la)
    groups, _ = Examples.of_loader(given)._groups_and_contents(la)
    assert len(groups) == len(places)
    rest, held, _ = Examples.of_loader(given).divided(la, 0.4, None)
    assert sorted([*rest.indices, *held.indices]) == list(places)
    assert len(held) == n_held_out
    assert list(train.seen.indices) == list(rest.indices)


def test_copies_are_held_out_together_whatever_their_padding_and_label(la):
    texts = [*Texts(6)]
    copies = [
        {
            name: pad(value, (0, 2)) if value.ndim else (value + 1) % 3
            for name, value in text.items()
        }
        for text in texts
    ]
    given = DataLoader(texts + copies, batch_size=1)
    rest, held, _ = Examples.of_loader(given).divided(la, 0.4, None)
    of_held = {place % 6 for place in held.indices}
    assert len(held) == 2 * len(of_held) == 4
    assert not of_held & {place % 6 for place in rest.indices}

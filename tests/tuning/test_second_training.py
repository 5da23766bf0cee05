"""The prior precision that held-out examples choose for another training."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, Sampler, Subset, SubsetRandomSampler

from laplace_lora_ext import GridSearch, SecondTraining
from laplace_lora_ext.processes.shards import divide
from laplace_lora_ext.training.trainers import Examples
from laplace_lora_ext.tuning import gridsearch
from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import another_training, fitted, generator, make
from tests.support.ranks import Texts, failures, on_ranks, strided_loader
from tests.support.trainers import values

# Odd, so that batches of two leave one over.
N = 11


class Training:
    """Returns a model, and remembers what it was to train on."""

    def __init__(self, model: nn.Module | None = None) -> None:
        if model is None:
            model = another_training()
        self.model = model
        self.seen: Any = None

    def __call__(self, examples: Any) -> nn.Module:
        self.seen = examples
        return self.model


def loader(examples: Any = None) -> DataLoader:
    if examples is None:
        examples = Texts(N)
    return DataLoader(examples, batch_size=2)


def loader_of(places: Sequence[int]) -> DataLoader:
    """Load the texts at some places of all."""
    texts = Subset(Texts(N), places)
    return loader(texts)


def held_out_of(examples: Subset) -> list[int]:
    """Find the places of the texts that a training was not given."""
    seen = set(examples.indices)
    return [place for place in range(N) if place not in seen]


@pytest.mark.parametrize("structure", ["lowrank_kron", "kron"])
def test_it_takes_over_what_the_held_out_examples_choose(structure):
    la = fitted(structure=structure)
    before = values(la.model)
    train = Training()
    history = la.optimize_prior_precision(
        method="second_training", train=train, train_loader=loader(), held_out=0.3
    )
    held_out = held_out_of(train.seen)
    assert len(held_out) == 3

    other = fitted(
        model=another_training(),
        batches=loader_of(train.seen.indices),
        structure=structure,
    )
    # By the default link.
    expected = GridSearch(val_loader=loader_of(held_out))(other)
    assert torch.equal(la.prior_precision.double(), other.prior_precision.double())
    assert_close(history.objective, expected.objective)
    (posterior,) = history.posteriors
    assert torch.equal(posterior.prior_precision, la.prior_precision)
    assert_close(values(la.model), before, rtol=0, atol=0)


# --- what is said, and what is drawn --------------------------------------------------


def test_a_choice_at_an_end_of_the_grid_is_said_once(monkeypatch):
    monkeypatch.setattr(gridsearch, "_is_best", lambda losses, place: True)
    with pytest.warns(UserWarning, match="of the grid is the") as said:
        fitted().optimize_prior_precision(
            method="second_training",
            train=lambda examples: another_training(),
            train_loader=loader(),
        )
    (found,) = [one for one in said if "of the grid" in str(one.message)]
    assert found.filename == __file__


def test_the_examples_depend_on_the_generator_alone():
    def held_out(draws: torch.Generator | None) -> list[int]:
        train = Training()
        choose = SecondTraining(train=train, train_loader=loader(), generator=draws)
        choose(fitted())
        return held_out_of(train.seen)

    # None is not chance: a choice can be repeated without one.
    without = held_out(None)
    assert held_out(None) == without
    first = held_out(generator(3))
    again = held_out(generator(3))
    another = held_out(generator(4))
    assert again == first
    assert another != first


# --- several processes ----------------------------------------------------------------


def test_two_processes_choose_as_one():
    def chosen(rank: int) -> tuple[Tensor, list[int]]:
        batches = strided_loader(N)
        # At this rank nothing is left out, so that no order matters.
        la = fitted(batches=batches, rank=24)
        train = Training()
        history = la.optimize_prior_precision(
            method="second_training", train=train, train_loader=batches
        )
        places = list(train.seen.indices)
        return history.objective, places

    expected, taken = chosen(0)
    for objective, places in on_ranks(chosen, 2):
        assert_close(objective, expected)
        assert places == taken


def test_processes_with_data_of_their_own_are_refused():
    def job(rank: int) -> None:
        texts = Texts(N + rank)
        own = loader(texts)
        la = fitted(batches=own)
        choose = SecondTraining(train=Training(), train_loader=own)
        choose(la)

    results = on_ranks(job, 2)
    for message in failures(results):
        assert "DistributedSampler" in message


# --- what can't work ------------------------------------------------------------------


def in_place(la: Any) -> nn.Module:
    """Train the fitted model, and another."""
    la.blocks[0].weight.data.mul_(1.5)
    return another_training()


# Options of the call, or a training by the fitted posterior, and what is said.
REFUSED = [
    ({"held_out": 1.0}, "between 0 and 1"),
    ({"held_out": 0.01}, "too few"),
    ({"train_loader": [1, 2]}, "pass a DataLoader"),
    (lambda la: None, "return the model"),
    (lambda la: la.model.model, "weights of the"),
    (lambda la: deepcopy(la.model.model), "weights of the"),
    (in_place, "changed"),
    (lambda la: another_training("gpt2"), "none of the weights"),
]


@pytest.mark.parametrize(("case", "message"), REFUSED)
def test_what_can_not_work_is_refused(case, message):
    la = fitted(prior_precision=0.4)
    options = {"train": Training(), "train_loader": loader()}
    options |= case if isinstance(case, dict) else {"train": lambda _: case(la)}
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        la.optimize_prior_precision(method="second_training", **options)
    # It is left as it was.
    assert la.prior_precision.tolist() == [0.4]


def test_a_posterior_that_is_not_fitted_has_no_second_training():
    untouched = Training()
    choose = SecondTraining(train=untouched, train_loader=loader())
    with pytest.raises(AttributeError, match="not fitted"):
        choose(make(lora_model("bert")))
    assert untouched.seen is None


# --- loaders --------------------------------------------------------------------------


class Every2nd(Sampler):
    """A user's own sampler."""

    def __init__(self) -> None:
        self.calls = 0

    def __iter__(self) -> Iterator[int]:
        self.calls += 1
        return iter(range(0, N, 2))

    def __len__(self) -> int:
        return (N + 1) // 2


class Table(Texts):
    """Rows that keep their columns."""

    def select(self, places: Sequence[int]) -> Subset:
        return Subset(self, places)


# Neither all texts nor every second.
PART = [1, 2, 4, 7, 9]
# Of unlike sizes, as no `batch_size` would make them.
BATCHES = [[0, 4], [2, 6, 8], [10]]


@dataclass(frozen=True)
class Data:
    """A loader, the places of the examples that it gives, and how many to hold out."""

    make_loader: Callable[[], DataLoader]
    places: Sequence[int]
    share: float
    n_held_out: int


def every_2nd() -> DataLoader:
    return DataLoader(Texts(N), sampler=Every2nd())


def part() -> DataLoader:
    return DataLoader(Texts(N), sampler=SubsetRandomSampler(PART))


def batches() -> DataLoader:
    return DataLoader(Texts(N), batch_sampler=BATCHES)


def whole_batches() -> DataLoader:
    return DataLoader(ragged_batches(batch_size=1), batch_size=None)


DATA = [
    Data(loader, range(N), 0.3, 3),
    # Whose rows keep their columns.
    Data(lambda: loader(Table(N)), range(N), 0.3, 3),
    Data(part, PART, 0.4, 2),
    Data(every_2nd, range(0, N, 2), 0.3, 2),
    Data(batches, range(0, N, 2), 0.3, 2),
    Data(whole_batches, range(8), 0.2, 2),
]


@pytest.fixture(params=DATA)
def data(request: pytest.FixtureRequest) -> Data:
    return request.param


def test_each_example_that_a_loader_gives_is_trained_on_or_held_out(data):
    given = data.make_loader()
    la = fitted()
    groups = Examples.of_loader(given).groups(la)
    part, rest, _ = divide(given, data.share, groups)
    places = sorted([*part.indices, *rest.indices])
    assert places == list(data.places)
    assert len(rest) == data.n_held_out
    # A copy of the sampler was asked.
    n_calls = getattr(given.sampler, "calls", 0)
    assert n_calls == 0
    train = Training()
    choose = SecondTraining(train=train, train_loader=given, held_out=data.share)
    choose(la)
    assert list(train.seen.indices) == list(part.indices)


def test_numbers_to_start_from_are_multiplied_as_a_whole():
    la = fitted()
    base = torch.linspace(0.5, 2, 8).double()
    history = la.optimize_prior_precision(
        method="second_training",
        train=Training(),
        train_loader=loader(),
        init_prior_prec=base,
    )
    factors = history.prior_precision.double() / base
    assert_close(factors, factors[:, :1].expand(-1, 8))
    expected = torch.logspace(-4, 4, 100).double()
    assert_close(factors[:-1, 0], expected, rtol=1e-5, atol=0)

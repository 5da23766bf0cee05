"""The prior precision that held-out examples choose for another training."""

import math
from collections.abc import (
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import (
    DataLoader,
    Sampler,
    Subset,
    SubsetRandomSampler,
)

from laplace_lora_ext import GridSearch, SecondTraining, ValGD
from laplace_lora_ext.processes.shards import divide
from laplace_lora_ext.training.examples import Examples
from laplace_lora_ext.tuning.scales import scale_penalty
from tests.support.models import (
    head_of,
    lora_model,
    ragged_batches,
)
from tests.support.posteriors import (
    STRUCTURES,
    another_training,
    fitted,
    generator,
    make,
    validation_loss,
)
from tests.support.ranks import (
    Texts,
    failures,
    on_ranks,
    strided_loader,
)
from tests.support.trainers import values

# Odd, so that batches of two leave one over.
N = 11


class Training:
    """Returns a model, and remembers what it was to train on."""

    def __init__(
        self,
        model: nn.Module | None = None,
    ) -> None:
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


@pytest.mark.parametrize("structure", STRUCTURES)
def test_it_takes_over_what_the_held_out_examples_choose(structure):
    la = fitted(structure=structure)
    before = values(la.model)
    train = Training()
    search = {"link_approx": "mean_field"}
    settings = {}
    if structure == "lowrank_kron":
        settings["backend_kwargs"] = {"rank": 3}
    else:
        search["grid_size"] = 9
    history = la.optimize_prior_precision(
        method="second_training",
        train=train,
        train_loader=loader(),
        held_out=0.3,
        search=partial(GridSearch, **search),
    )
    held_out = held_out_of(train.seen)
    assert len(held_out) == 3

    model = another_training()
    other = make(model, structure, **settings)
    seen = loader_of(train.seen.indices)
    other.fit(seen)
    expected = other.optimize_prior_precision(
        method="gridsearch",
        val_loader=loader_of(held_out),
        **search,
    )
    chosen = la.prior_precision.double()
    best = other.prior_precision.double()
    assert torch.equal(chosen, best)
    assert_close(history.objective, expected.objective)
    after = values(la.model)
    assert_close(after, before, rtol=0, atol=0)


def test_held_out_examples_are_searched_by_the_default_link():
    def objective(**options: Any) -> Tensor:
        history = fitted().optimize_prior_precision(
            method="second_training",
            train=Training(),
            train_loader=loader(),
            **options,
        )
        return history.objective

    by_mean_field = partial(GridSearch, link_approx="mean_field")
    expected = objective(search=by_mean_field)
    found = objective()
    assert torch.equal(found, expected)


# --- several trainings ----------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A training's posterior, and the places of the texts that it has not seen."""

    posterior: Any
    held_out: list[int]

    def loss(
        self,
        prior_precision: Tensor,
        logit_scale: float,
    ) -> float:
        """Sum the losses of the texts that were held out, at a prior and a scale."""
        self.posterior.logit_scale = logit_scale
        mean = validation_loss(
            self.posterior,
            prior_precision,
            loader_of(self.held_out),
            link_approx="mean_field",
        )
        return mean * len(self.held_out)


@dataclass(frozen=True)
class Several:
    """A posterior, five trainings for it, and what they went through together."""

    la: Any
    parts: list[Part]
    history: Any


# Of the module, for it fits and searches for each of five trainings.
@pytest.fixture(scope="module")
def several() -> Several:
    la = fitted()
    parts: list[Part] = []

    def train(examples: Subset) -> nn.Module:
        model = another_training()
        # No two trainings end alike.
        factor = 1 + len(parts)
        head_of(model).weight.data *= factor
        posterior = make(
            model,
            backend_kwargs={"rank": 3},
        )
        seen = loader_of(examples.indices)
        posterior.fit(seen)
        part = Part(
            posterior=posterior,
            held_out=held_out_of(examples),
        )
        parts.append(part)
        return model

    history = la.optimize_prior_precision(
        method="second_training",
        train=train,
        train_loader=loader(),
        trainings=5,
    )
    return Several(la, parts, history)


def test_several_trainings_ask_every_example(several):
    asked = []
    sizes = []
    for part in several.parts:
        asked += part.held_out
        sizes.append(len(part.held_out))
    asked.sort()
    assert asked == list(range(N))
    sizes.sort()
    assert sizes == [2, 2, 2, 2, 3]


def test_several_trainings_losses_are_those_of_all_held_out_examples(several):
    # Each by the posterior that has not seen it, at one prior and scale.
    history = several.history
    for point in (0, 40, 60, 100):
        prior = history.prior_precision[point]
        scale = history.logit_scale[point].item()
        losses = [part.loss(prior, scale) for part in several.parts]
        log_scale = math.log(scale)
        penalty = scale_penalty(log_scale).item()
        expected = (sum(losses) + penalty) / N
        found = history.objective[point].item()
        assert found == pytest.approx(expected, rel=1e-4)


def test_several_trainings_choose_together(several):
    la = several.la
    history = several.history
    best = history.objective.argmin()
    best_prior = history.prior_precision[best]
    best_scale = history.logit_scale[best]
    assert la.prior_precision.item() == best_prior.item()
    assert la.logit_scale == best_scale.item()
    # Otherwise nothing would show that it was taken over.
    assert la.logit_scale != 1


# --- what is said, and what is drawn --------------------------------------------------


@pytest.mark.parametrize("trainings", [1, 3])
def test_a_choice_at_an_end_of_the_grid_is_said_once(trainings):
    def train(examples: Any) -> nn.Module:
        return another_training()

    la = fitted()
    search = partial(
        GridSearch,
        optimize_scale=False,
        # So broad that all between is worse.
        log_prior_prec_min=-9,
        log_prior_prec_max=-6,
        grid_size=3,
    )
    message = "prior precision of the grid is the"
    with pytest.warns(UserWarning, match=message) as said:
        la.optimize_prior_precision(
            method="second_training",
            train=train,
            train_loader=loader(),
            trainings=trainings,
            search=search,
        )
    of_grid = [one for one in said if "of the grid" in str(one.message)]
    (found,) = of_grid
    assert found.filename == __file__


def test_the_examples_depend_on_the_generator_alone():
    def held_out(draws: torch.Generator | None) -> list[int]:
        train = Training()
        choose = SecondTraining(
            train=train,
            train_loader=loader(),
            generator=draws,
        )
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
            method="second_training",
            train=train,
            train_loader=batches,
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
        choose = SecondTraining(
            train=Training(),
            train_loader=own,
        )
        choose(la)

    results = on_ranks(job, 2)
    for message in failures(results):
        assert "DistributedSampler" in message


# --- what can't work ------------------------------------------------------------------

# Trainings by the fitted posterior that they are made for.
Train = Callable[[Any], nn.Module]


def in_place(la: Any) -> Train:
    """Trains the fitted model, and another."""

    def train(examples: Any) -> nn.Module:
        weight = la.blocks[0].weight
        weight.data.mul_(1.5)
        return another_training()

    return train


def none(la: Any) -> Callable[[Any], None]:
    """Trains a model and keeps it to itself."""

    def train(examples: Any) -> None:
        return None

    return train


def the_same_model(la: Any) -> Train:
    def train(examples: Any) -> nn.Module:
        return la.model.model

    return train


def a_copy(la: Any) -> Train:
    def train(examples: Any) -> nn.Module:
        return deepcopy(la.model.model)

    return train


def another(la: Any) -> Train:
    return Training()


def a_language_model(la: Any) -> Train:
    return Training(another_training("gpt2"))


def descent(
    val_loader: Any,
    **others: Any,
) -> ValGD:
    """Searches along a path of its own."""
    return ValGD(
        val_loader=val_loader,
        n_steps=2,
        **others,
    )


@dataclass(frozen=True)
class Refused:
    """A training, options of the call, and the error."""

    message: str
    options: Mapping[str, Any] = field(default_factory=dict)
    train: Callable[[Any], Any] = another
    error: type[Exception] = ValueError


REFUSED = [
    Refused("between 0 and 1", {"held_out": 1.0}),
    Refused("11 examples are too few", {"held_out": 0.01}),
    Refused("11 examples are too few", {"held_out": 0.99}),
    Refused("11 examples are too few", {"held_out": 0.06, "trainings": 2}),
    Refused("trainings must be at least 1", {"trainings": 0}),
    Refused("can't each hold out another 0.2", {"trainings": 6}),
    Refused("use GridSearch", {"trainings": 2, "search": descent}),
    Refused("pass a DataLoader", {"train_loader": [1, 2]}),
    Refused("must return the model", train=none, error=TypeError),
    Refused("weights of the", train=the_same_model),
    Refused("weights of the", train=a_copy),
    Refused("changed", train=in_place, error=RuntimeError),
    Refused("none of the weights", train=a_language_model),
]


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_work_is_refused(case):
    la = fitted(prior_precision=0.4)
    options = {
        "train": case.train(la),
        "train_loader": loader(),
        **case.options,
    }
    with pytest.raises(case.error, match=case.message):
        la.optimize_prior_precision(
            method="second_training",
            **options,
        )
    # It is left as it was.
    assert la.prior_precision.tolist() == [0.4]


def test_a_posterior_that_is_not_fitted_has_no_second_training():
    unfitted = make(lora_model("bert"))
    untouched = Training()
    choose = SecondTraining(
        train=untouched,
        train_loader=loader(),
    )
    with pytest.raises(AttributeError, match="not fitted"):
        choose(unfitted)
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


def loader_of_all() -> DataLoader:
    return loader(Texts(N))


def loader_of_a_table() -> DataLoader:
    return loader(Table(N))


# Neither all texts nor every second.
PART = [1, 2, 4, 7, 9]


def loader_of_a_part() -> DataLoader:
    return DataLoader(
        Texts(N),
        sampler=SubsetRandomSampler(PART),
    )


def loader_with_its_own_sampler() -> DataLoader:
    return DataLoader(
        Texts(N),
        sampler=Every2nd(),
    )


def loader_with_its_own_batches() -> DataLoader:
    # Of unlike sizes, as no `batch_size` would make them.
    batches = [
        [0, 4],
        [2, 6, 8],
        [10],
    ]
    return DataLoader(Texts(N), batch_sampler=batches)


def loader_of_whole_batches() -> DataLoader:
    batches = ragged_batches(batch_size=1)
    return DataLoader(batches, batch_size=None)


@dataclass(frozen=True)
class Data:
    """A loader, the places of the examples that it gives, and how many to hold out."""

    make_loader: Callable[[], DataLoader]
    places: Sequence[int]
    share: float
    n_held_out: int


DATA = {
    "all": Data(
        loader_of_all,
        places=range(N),
        share=0.3,
        n_held_out=3,
    ),
    "with columns": Data(
        loader_of_a_table,
        places=range(N),
        share=0.3,
        n_held_out=3,
    ),
    "part": Data(
        loader_of_a_part,
        places=PART,
        share=0.4,
        n_held_out=2,
    ),
    "own sampler": Data(
        loader_with_its_own_sampler,
        places=range(0, N, 2),
        share=0.3,
        n_held_out=2,
    ),
    "own batches": Data(
        loader_with_its_own_batches,
        places=range(0, N, 2),
        share=0.3,
        n_held_out=2,
    ),
    "whole batches": Data(
        loader_of_whole_batches,
        places=range(8),
        share=0.2,
        n_held_out=2,
    ),
}


@pytest.fixture(params=DATA)
def data(request: pytest.FixtureRequest) -> Data:
    return DATA[request.param]


def test_each_example_that_a_loader_gives_is_trained_on_or_held_out(data):
    given = data.make_loader()
    la = fitted()
    groups = Examples.of_loader(given).groups(la, data.share)
    ((part, rest, _),) = divide(given, data.share, groups)
    places = sorted([*part.indices, *rest.indices])
    assert places == list(data.places)
    assert len(rest) == data.n_held_out
    # A copy of the sampler was asked.
    n_calls = getattr(given.sampler, "calls", 0)
    assert n_calls == 0
    train = Training()
    choose = SecondTraining(
        train=train,
        train_loader=given,
        held_out=data.share,
    )
    choose(la)
    assert list(train.seen.indices) == list(part.indices)


def test_numbers_to_start_from_are_multiplied_as_a_whole(data):
    la = fitted()
    base = torch.linspace(0.5, 2, 8).double()
    search = partial(
        GridSearch,
        link_approx="probit",
        grid_size=5,
        optimize_scale=False,
    )
    la.optimize_prior_precision(
        method="second_training",
        train=Training(),
        train_loader=data.make_loader(),
        held_out=data.share,
        init_prior_prec=base,
        search=search,
    )
    factors = la.prior_precision / base
    first = factors[:1]
    assert_close(factors, first.expand(8))
    # The grid of five points has every second power of ten.
    half = first.log10().item() / 2
    nearest = round(half)
    assert half == pytest.approx(nearest)

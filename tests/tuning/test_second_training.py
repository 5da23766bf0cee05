"""The prior precision that held-out examples choose for another training."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, Sampler, Subset, SubsetRandomSampler

from laplace_lora_ext import GridSearch, SecondTraining, ValGD
from laplace_lora_ext.training.examples import divided
from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import STRUCTURES, fitted, generator, make
from tests.support.ranks import Texts, failures, on_ranks, strided_loader

N = 11


def another(kind: str = "bert"):
    """What a training on fewer texts might end with."""
    model = lora_model(kind)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data += 0.2 * torch.randn(weight.shape, generator=generator()).double()
    return model


class Training:
    """Returns a model, and remembers what it was to train on."""

    def __init__(self, model=None):
        self.model, self.seen = another() if model is None else model, None

    def __call__(self, examples):
        self.seen = examples
        return self.model


def loader(examples=None, batch_size=2):
    return DataLoader(Texts(N) if examples is None else examples, batch_size=batch_size)


def split(train):
    """Places of the examples that were trained on, and of those that were held out."""
    taken = list(train.seen.indices)
    return taken, [place for place in range(N) if place not in taken]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_it_takes_over_what_the_held_out_examples_choose(structure):
    la, train = fitted(structure=structure), Training()
    before = {name: value.clone() for name, value in la.model.state_dict().items()}
    # The other structures predict at each point anew.
    points = {} if structure == "lowrank_kron" else {"grid_size": 9}
    search = partial(GridSearch, link_approx="mean_field", **points)
    options = {"search": search} if points else {}
    history = la.optimize_prior_precision(
        method="second_training", train=train, train_loader=loader(), held_out=0.3, **options
    )
    taken, held_out = split(train)
    assert len(held_out) == 3
    settings = {"backend_kwargs": {"rank": 3}} if structure == "lowrank_kron" else {}
    other = make(another(), structure, **settings)
    other.fit(loader(Subset(Texts(N), taken)))
    expected = other.optimize_prior_precision(
        method="gridsearch",
        val_loader=loader(Subset(Texts(N), held_out)),
        link_approx="mean_field",
        **points,
    )
    assert torch.equal(la.prior_precision.double(), other.prior_precision.double())
    torch.testing.assert_close(history.objective, expected.objective)
    assert all(torch.equal(la.model.state_dict()[name], before[name]) for name in before)


def test_several_trainings_ask_every_example_and_choose_together():
    la, others, held_out = fitted(), [], []

    def train(examples):
        taken = list(examples.indices)
        held_out.append([place for place in range(N) if place not in taken])
        model = another()
        model.base_model.model.classifier.modules_to_save.default.weight.data *= 1 + len(others)
        others.append((model, taken))
        return model

    history = la.optimize_prior_precision(
        method="second_training", train=train, train_loader=loader(), trainings=5
    )
    assert sorted(place for places in held_out for place in places) == list(range(N))
    assert sorted(map(len, held_out)) == [2, 2, 2, 2, 3]
    loss = torch.zeros(100, dtype=torch.float64)
    for (model, taken), places in zip(others, held_out, strict=True):
        other = make(model, backend_kwargs={"rank": 3})
        other.fit(loader(Subset(Texts(N), taken)))
        found = other.optimize_prior_precision(
            method="gridsearch",
            val_loader=loader(Subset(Texts(N), places)),
            link_approx="mean_field",
        )
        loss += len(places) * found.objective / N
    torch.testing.assert_close(history.objective, loss)
    assert la.prior_precision.item() == history.prior_precision[loss.argmin()].item()


def test_factors_of_a_layerwise_prior():
    la, base = fitted(), torch.linspace(0.5, 2, 8).double()
    la.optimize_prior_precision(
        method="second_training",
        train=Training(),
        train_loader=loader(),
        init_prior_prec=base,
        search=partial(GridSearch, link_approx="probit", grid_size=5),
    )
    factors = la.prior_precision / base
    torch.testing.assert_close(factors, factors[:1].expand(8))
    assert factors[0].log10().item() in (-4, -2, 0, 2, 4)


def test_the_examples_depend_on_the_generator_alone():
    found = []
    for seed in (None, None, 3, 3, 4):
        train = Training()
        method = SecondTraining(
            train=train,
            train_loader=loader(),
            generator=None if seed is None else generator(seed),
        )
        method(fitted())
        found.append(split(train)[1])
    assert found[0] == found[1]
    assert found[2] == found[3] != found[4]


def test_a_data_set_with_columns_keeps_them():
    class Table(Texts):
        def select(self, places):
            self.selected = places
            return Subset(self, places)

    table = Table(N)
    fitted().optimize_prior_precision(
        method="second_training", train=Training(), train_loader=loader(table)
    )
    assert len(table.selected) == 2  # the last one selected is what is held out


def test_examples_that_a_sampler_leaves_out_are_not_used():
    used, predicted, la, train = [1, 2, 4, 7, 9], [], fitted(), Training()

    class Noting(Texts):
        def __getitem__(self, place):
            predicted.append(place)
            return super().__getitem__(place)

    sampler = SubsetRandomSampler(used)
    of_part = DataLoader(Noting(N), batch_size=2, sampler=sampler)
    la.optimize_prior_precision(
        method="second_training", train=train, train_loader=of_part, held_out=0.4
    )
    assert len(train.seen) == 3
    assert set(predicted) == set(used)


def test_a_data_set_of_whole_batches_stays_one():
    la, train, batches = fitted(), Training(), ragged_batches(batch_size=1)
    whole = DataLoader(batches, batch_size=None)
    la.optimize_prior_precision(method="second_training", train=train, train_loader=whole)
    assert len(train.seen) == 6


def in_place(la):
    """Trains the fitted model, and another."""

    def train(_):
        la.blocks[0].weight.data.mul_(1.5)
        return another()

    return train


def descent(val_loader, **others):
    """Searches along a path of its own."""
    return ValGD(val_loader=val_loader, n_steps=2, **others)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"held_out": 1.0}, ValueError, "between 0 and 1"),
        ({"held_out": 0.01}, ValueError, "11 examples are too few"),
        ({"held_out": 0.99}, ValueError, "11 examples are too few"),
        ({"held_out": 0.06, "trainings": 2}, ValueError, "11 examples are too few"),
        ({"trainings": 0}, ValueError, "trainings must be at least 1"),
        ({"trainings": 6}, ValueError, "at most 5"),
        ({"trainings": 2, "search": descent}, ValueError, "use GridSearch"),
        ({"train_loader": [1, 2]}, ValueError, "pass a DataLoader"),
        ({"train": lambda _: None}, TypeError, "must return the model"),
        ({"train": lambda la: lambda _: la.model.model}, ValueError, "shares LoRA weights"),
        ({"train": in_place}, RuntimeError, "changed"),
        ({"train": Training(another("gpt2"))}, ValueError, "class_token_ids"),
    ],
)
def test_what_can_not_work_is_refused(options, error, message):
    la = fitted(prior_precision=0.4)
    given = {"train": Training(), "train_loader": loader()} | options
    if given["train"] is in_place or message == "shares LoRA weights":
        given["train"] = given["train"](la)
    with pytest.raises(error, match=message):
        la.optimize_prior_precision(method="second_training", **given)
    assert la.prior_precision.tolist() == [0.4]


def test_nothing_is_trained_for_a_posterior_that_is_not_fitted():
    train = Training()
    with pytest.raises(AttributeError, match="not fitted"):
        make(lora_model("bert")).optimize_prior_precision(
            method="second_training", train=train, train_loader=loader()
        )
    assert train.seen is None


def test_two_processes_choose_as_one():
    def chosen(rank=0, of=strided_loader):
        la, train = fitted(batches=of(N), rank=24), Training()  # exact: no order matters
        history = la.optimize_prior_precision(
            method="second_training", train=train, train_loader=of(N)
        )
        return history.objective, list(train.seen.indices)

    expected, taken = chosen()
    for objective, places in on_ranks(chosen, 2):
        torch.testing.assert_close(objective, expected)
        assert places == taken
    own = on_ranks(lambda rank: chosen(of=lambda n: loader(Texts(n + rank))), 2)
    assert all("DistributedSampler" in message for message in failures(own))


def test_another_number_of_classes_is_refused():
    la = fitted()
    options = {"method": "second_training", "train_loader": loader()}
    larger = lora_model("bert", n_labels=4)
    with pytest.raises(ValueError, match="a model of 4 outputs, and the fitted one has 3"):
        la.optimize_prior_precision(train=lambda _: larger, **options)
    assert la.prior_precision == 1


@pytest.mark.parametrize("is_copy", [True, False])
def test_a_copy_of_the_fitted_model_is_warned_of(is_copy, recwarn):
    la = fitted()
    model = deepcopy(la.model.model) if is_copy else another()
    la.optimize_prior_precision(
        method="second_training", train=lambda _: model, train_loader=loader()
    )
    assert is_copy == any("equal those of the fitted" in str(w.message) for w in recwarn)


def test_weights_in_the_same_place_are_shared():
    la, other = fitted(), another()
    named = dict(other.named_parameters())
    of_fitted = dict(la.model.model.named_parameters())
    name = next(name for name in named if "lora_A" in name)
    named[name].data = of_fitted[name].data
    with pytest.raises(ValueError, match="shares LoRA weights with it"):
        la.optimize_prior_precision(
            method="second_training", train=lambda _: other, train_loader=loader()
        )


class Every2nd(Sampler):
    """A user's own sampler."""

    def __init__(self, n):
        self.n, self.calls = n, 0

    def __iter__(self):
        self.calls += 1
        return iter(range(0, self.n, 2))

    def __len__(self):
        return (self.n + 1) // 2


@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
def test_examples_that_a_users_sampler_leaves_out_take_no_part(kind):
    sampler = Every2nd(N)
    batches = [[0, 4], [2, 6, 8], [10]]
    options = {"sampler": sampler} if kind == "sampler" else {"batch_sampler": batches}
    data = DataLoader(Texts(N), **options)
    ((part, rest),) = divided(data, 0.3)
    assert sorted([*part.indices, *rest.indices]) == list(range(0, N, 2))
    assert len(rest) == 2
    assert sampler.calls == 0  # a copy was asked

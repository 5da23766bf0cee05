"""The prior precision that held-out examples choose for another training."""

from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from laplace_lora_ext import GridSearch, SecondTraining, ValGD
from tests.support.models import lora_model
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


def descent(val_loader, **others):
    """Searches along a path of its own."""
    return ValGD(val_loader=val_loader, n_steps=2, **others)


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


def in_place(la):
    """Trains the fitted model, and another."""

    def train(_):
        la.blocks[0].weight.data.mul_(1.5)
        return another()

    return train


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"held_out": 1.0}, ValueError, "between 0 and 1"),
        ({"held_out": 0.01}, ValueError, "11 examples are too few"),
        ({"trainings": 6}, ValueError, "at most 5"),
        ({"trainings": 2, "search": descent}, ValueError, "use GridSearch"),
        ({"train": lambda la: lambda _: None}, TypeError, "must return the model"),
        ({"train": lambda la: lambda _: la.model.model}, ValueError, "shares LoRA weights"),
        ({"train": in_place}, RuntimeError, "changed"),
        (
            {"train": lambda _: Training(lora_model("bert", n_labels=4))},
            ValueError,
            "a model of 4 outputs, and the fitted one has 3",
        ),
    ],
)
def test_what_can_not_work_is_refused(options, error, message):
    la = fitted(prior_precision=0.4)
    train = options.get("train", lambda _: Training())(la)
    given = {"train_loader": loader()} | options | {"train": train}
    with pytest.raises(error, match=message):
        la.optimize_prior_precision(method="second_training", **given)
    assert la.prior_precision.tolist() == [0.4]
    unfitted, untouched = make(lora_model("bert")), Training()
    with pytest.raises(AttributeError, match="not fitted"):
        SecondTraining(train=untouched, train_loader=loader())(unfitted)
    assert untouched.seen is None

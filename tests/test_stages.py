"""Training in stages: held-out texts choose the prior, and are learnt in the end."""

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.state import AcceleratorState
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
)

from laplace_lora_ext import (
    LaplaceMixture,
    from_pretrained,
    in_stages,
    train_in_stages,
)
from laplace_lora_ext.metrics import quality
from laplace_lora_ext.training.stages import (
    Stage,
    Stages,
    choose_priors,
    joined,
    with_choice,
)
from tests.support.models import (
    base_model,
    lora_model,
    plain_model,
    without_labels,
)
from tests.support.posteriors import (
    fitted,
    generator,
    validation_loss,
)
from tests.support.ranks import Texts, on_ranks
from tests.support.snapshots import Snapshot
from tests.support.trainers import (
    N,
    Stop,
    Watch,
    trainer_of,
    values,
)

BATCH = Texts(4).batches[0]
# With it nothing is left out of a factor, so that the curvature is the same in any
# order.
FULL_RANK = 24


# --- texts ----------------------------------------------------------------------------


class Learnable(Texts):
    """Four texts of five have the label that their tokens tell."""

    def __getitem__(self, index):
        text = super().__getitem__(index)
        is_real = text["attention_mask"].bool()
        told = index % 3
        tokens = torch.where(is_real, 10 + told, text["input_ids"])
        label = told if index % 5 else 0
        return text | {
            "input_ids": tokens,
            "labels": torch.tensor(label),
        }


class Endless(IterableDataset):
    def __iter__(self):
        return iter([])


def labelled(labels):
    texts = Texts(len(labels))
    return [text | {"labels": label} for text, label in zip(texts, labels, strict=True)]


def of_two_classes(*others):
    """Texts of two classes, but for the given ones."""
    labels = torch.arange(N) % 2
    labels[list(others)] = 2
    return labelled(labels)


def packed():
    """Texts whose positions begin anew within them."""
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3])
    return [text | {"position_ids": positions} for text in Texts(N)]


def fresh_base(dtype=torch.float32):
    """The model that an adapter of `lora_model("bert")` belongs to."""
    torch.manual_seed(0)
    return base_model("bert").to(dtype)


# --- the parts ------------------------------------------------------------------------


def test_what_is_trained_is_a_list():
    assert list(Stages(held_out=0.2, members=2)) == [
        Stage("stage_1", member=0, folder=Path("stage_1"), share=0.8, number=1),
        Stage(
            "stage_1", member=1, folder=Path("stage_1/member_1"), share=0.8, number=2
        ),
        Stage("stage_2", member=0, folder=Path(), share=0.25, number=3),
        Stage(
            "stage_2", member=1, folder=Path("stage_2/member_1"), share=0.25, number=4
        ),
    ]


def test_each_stage_trains_its_own_member():
    model = lora_model("bert")
    loader = DataLoader(Texts(N), batch_size=4)
    trained = []

    def train(model, examples, share):
        flags = {
            name.split(".lora_A.")[1].split(".")[0]
            for name, weight in model.named_parameters()
            if ".lora_A." in name and weight.requires_grad
        }
        trained.append((model.active_adapter, flags, len(examples), share))

    in_stages(train, model, loader, 0.25, members=2)
    assert trained == [
        ("default", {"default"}, 15, 0.75),
        ("member_1", {"member_1"}, 15, 0.75),
        ("default", {"default"}, N, 0.25),
        ("member_1", {"member_1"}, N, 0.25),
    ]
    assert model.active_adapter == "default"


@pytest.mark.parametrize("n_posteriors", [1, 2])
def test_a_choice_leaves_the_posteriors_as_they_are(n_posteriors):
    las = [fitted() for _ in range(n_posteriors)]
    priors = [2.0, 3.0][:n_posteriors]
    for la, prior in zip(las, priors, strict=True):
        la.prior_precision = prior
    choice = choose_priors(las, [BATCH])
    assert [la.prior_precision.item() for la in las] == priors
    best = joined(with_choice(las, choice))
    probabilities = best(BATCH, link_approx="mean_field")
    chosen = choice.history.objective.argmin()
    loss = choice.history.objective[chosen] - choice.history.penalty[chosen]
    # Between two scales at which losses are summed, it is interpolated.
    nll = quality(probabilities, BATCH["labels"])["nll"]
    assert nll == pytest.approx(loss.item(), rel=1e-4)
    logit_scale = choice.history.logit_scale[chosen].item()
    assert best.members[0].logit_scale == logit_scale
    assert logit_scale != 1
    assert [la.prior_precision.item() for la in las] == priors


# --- stages of a trainer --------------------------------------------------------------


@dataclass(frozen=True)
class Shares:
    """Settings of a trainer, and the steps that its stages take of them."""

    settings: Mapping[str, Any]
    held_out: float
    steps: tuple[int, int]
    warmup_steps: tuple[int, int] = (0, 0)


SHARES = {
    "steps": Shares(
        settings={"max_steps": 10},
        held_out=0.2,
        steps=(8, 2),
    ),
    "warmup": Shares(
        settings={"max_steps": 10, "warmup_steps": 5},
        held_out=0.4,
        steps=(6, 2),
        warmup_steps=(3, 1),
    ),
    "epochs": Shares(
        settings={"max_steps": -1, "num_train_epochs": 2},
        held_out=0.2,
        steps=(8, 3),
    ),
    "accumulated gradients": Shares(
        settings={
            "max_steps": -1,
            "gradient_accumulation_steps": 2,
        },
        held_out=0.2,
        steps=(6, 3),
    ),
    # 1 - 0.7 is a little more than 0.3, which must not add a step.
    "most texts held out": Shares(
        settings={
            "max_steps": -1,
            "per_device_train_batch_size": 2,
        },
        held_out=0.7,
        steps=(9, 8),
    ),
}


@pytest.mark.parametrize("name", SHARES)
def test_each_stage_takes_its_share_of_the_steps(tmp_path, name):
    case = SHARES[name]
    watch = Watch()
    trainer = trainer_of(tmp_path, watch, **case.settings)
    train_in_stages(trainer, case.held_out)
    assert tuple(map(len, watch.steps)) == case.steps
    for n_warmup, steps in zip(case.warmup_steps, watch.steps, strict=True):
        first_rate, n_remembered = steps[0]
        assert n_remembered == 0  # by the optimizer
        assert first_rate == (0 if n_warmup else 1e-2)
        rates = [rate for rate, _ in steps]
        assert rates.index(max(rates)) == n_warmup
    first, second = case.steps
    logged = [entry for entry in trainer.state.log_history if "learning_rate" in entry]
    stages = [entry["stage"] for entry in logged]
    assert stages == ["stage_1"] * first + ["stage_2"] * second


def test_the_seed_chooses_what_is_held_out_and_the_second_stage_learns_it(
    tmp_path,
):
    watch = Watch()
    for seed in (1, 2):
        trainer = trainer_of(
            tmp_path,
            watch,
            data_seed=seed,
            max_steps=2,
            save_strategy="no",
        )
        with pytest.warns(UserWarning, match="looks trained"):
            train_in_stages(trainer, 0.25)
    assert [len(data) for data in watch.data] == [15, N, 15, N]
    one, _, other, _ = watch.data
    assert one.indices != other.indices


@pytest.mark.parametrize("place", range(0, N, 4))
def test_the_last_text_of_a_class_is_never_held_out(place):
    seen = []

    def train(model, examples, share):
        seen.append(examples)

    loader = DataLoader(of_two_classes(place), batch_size=4)
    in_stages(train, lora_model("bert"), loader, 0.4)
    labels = torch.stack([text["labels"] for text in seen[0]])
    assert sorted(labels.bincount().tolist()) == [1, 5, 6]


def test_the_prior_is_what_the_held_out_texts_choose(tmp_path):
    watch = Watch()
    model = lora_model("bert")
    data = Learnable(N)
    trainer = trainer_of(
        tmp_path,
        watch,
        model=model,
        data=data,
        learning_rate=0.05,
        max_steps=20,
        save_strategy="no",
    )
    la = train_in_stages(trainer, 0.4, backend_kwargs={"rank": FULL_RANK})
    of_first_stage = watch.data[0].indices
    held_out = [place for place in range(N) if place not in of_first_stage]

    # The same by hand: the first stage's adapter, fitted to its texts, on a grid.
    first = PeftModel.from_pretrained(fresh_base(torch.float64), tmp_path / "stage_1")
    rest = list(DataLoader(Subset(data, of_first_stage), N))
    validation = list(DataLoader(Subset(data, held_out), N))
    of_first = fitted(batches=rest, model=first, rank=FULL_RANK)
    history = of_first.optimize_prior_precision(
        method="gridsearch", val_loader=validation
    )
    best = history.objective.argmin()
    assert 0 < best < 100
    figures = trainer.state.log_history[-1]
    chosen = la.prior_precision.item()
    loss = validation_loss(of_first, chosen, validation, link_approx="mean_field")
    assert figures["laplace_held_out_nll"] == pytest.approx(loss, rel=1e-4)
    assert (
        figures["laplace_prior_precision"] == chosen == of_first.prior_precision.item()
    )
    assert figures["laplace_logit_scale"] == la.logit_scale
    assert la.logit_scale == pytest.approx(of_first.logit_scale)
    assert la.logit_scale != 1

    # The posterior is that of the second stage's weights, with what the first has
    # chosen.
    of_second = fitted(batches=DataLoader(data, N), model=model, rank=FULL_RANK)
    of_second.prior_precision = chosen
    of_second.logit_scale = la.logit_scale
    torch.testing.assert_close(la(BATCH), of_second(BATCH))


@pytest.mark.parametrize(("adapter", "members"), [("mine", 1), ("default", 2)])
def test_all_is_in_the_output_folder_and_the_logs(tmp_path, adapter, members):
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])
    model = get_peft_model(fresh_base(), config, adapter)
    trainer = trainer_of(
        tmp_path,
        model=model,
        eval_data=Texts(9),
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
    )
    la = train_in_stages(trainer, members=members)

    log = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert log == trainer.state.log_history
    predicted = []
    labels = []
    for batch in DataLoader(Texts(9), batch_size=5):
        predicted.append(la(batch, link_approx="mean_field"))
        labels.append(batch["labels"])
    expected = quality(torch.cat(predicted), torch.cat(labels))
    assert log[-1]["eval_laplace_nll"] == pytest.approx(expected["nll"], abs=1e-5)

    assert (tmp_path / "stage_1" / "checkpoint-4").exists()
    if members == 1:
        loaded = PeftModel.from_pretrained(fresh_base(), tmp_path / adapter)
        again = from_pretrained(loaded, tmp_path)
        evaluations = [entry for entry in log if "eval_loss" in entry]
        of_second = [e["eval_loss"] for e in evaluations if e["stage"] == "stage_2"]
        loss = trainer.evaluate()["eval_loss"]
        assert loss == pytest.approx(min(of_second), rel=1e-5)
    else:
        again = LaplaceMixture.from_pretrained(fresh_base(), tmp_path)
        one, other = (member.mean for member in la.members)
        assert not torch.equal(one, other)  # the best of "default" is not the other's
    torch.testing.assert_close(again(BATCH), la(BATCH))
    assert model.active_adapter == adapter


def test_rows_of_embeddings_belong_to_each_member(tmp_path):
    model = lora_model("bert", torch.float32, trainable_token_indices=[1, 5])
    trainer = trainer_of(tmp_path, model=model)
    with pytest.warns(
        UserWarning, match=r"1 of 9 matrices, such as .*trainable_tokens_delta"
    ):
        la = train_in_stages(trainer, members=2)
    one, other = (
        weight
        for name, weight in model.named_parameters()
        if "trainable_tokens_delta" in name
    )
    assert not torch.equal(one, other)
    again = LaplaceMixture.from_pretrained(fresh_base(), tmp_path)
    torch.testing.assert_close(again(BATCH), la(BATCH))
    # A member's folder is also that of one posterior, under any adapter's name.
    folder = tmp_path / "member_1"
    renamed = PeftModel.from_pretrained(fresh_base(), folder, "mine")
    member = from_pretrained(renamed, folder)
    torch.testing.assert_close(member(BATCH), la.members[1](BATCH))


# --- runs that were killed ------------------------------------------------------------


def moved(folder, to):
    """Move a folder, so that later checkpoints have earlier times."""
    folder.rename(to)
    for path in to.rglob("*"):
        step = path.parent.name.rpartition("-")[2]
        time = 2e9 - int(step) if step.isdigit() else 2e9
        os.utime(path, (time, time))
    return to


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(("members", "stops"), [(1, (3, 6, 7)), (2, (8,))])
def test_a_run_that_was_killed_goes_on_to_the_same_weights(tmp_path, members, stops):
    whole = trainer_of(tmp_path / "whole", max_steps=6)
    expected = train_in_stages(whole, members=members)
    weights = values(whole.model)
    # Of five steps of the first stage, for each member, and two of the second.
    for stop in stops:
        folder = tmp_path / str(stop)
        has_others = stop == 3  # checkpoints of other trainings
        if has_others:
            trainer_of(folder, learning_rate=0.1).train()
            another = trainer_of(folder, learning_rate=0.1, max_steps=8)
            train_in_stages(another, members=members)

        killed = trainer_of(folder, Stop(stop), max_steps=6)
        args = killed.args
        data = killed.train_dataset
        with pytest.raises(RuntimeError, match="killed"):
            train_in_stages(killed, members=members)
        assert killed.args == args
        assert killed.train_dataset == data
        assert killed.optimizer is None
        assert list(killed.model.peft_config) == ["default"]
        if has_others:
            folder = moved(folder, tmp_path / "moved")

        watch = Watch()
        resumed = trainer_of(folder, watch, max_steps=6)
        la = train_in_stages(resumed, resume_from_checkpoint=True, members=members)
        assert sum(map(len, watch.steps)) == 7 * members - stop + 1
        found = values(resumed.model)
        assert [
            name for name in weights if not torch.equal(found[name], weights[name])
        ] == []
        assert torch.equal(la(BATCH), expected(BATCH))
        assert losses_of(resumed) == losses_of(whole)


def test_a_run_goes_on_with_the_same_texts_alone(tmp_path):
    with pytest.raises(RuntimeError, match="killed"):
        train_in_stages(trainer_of(tmp_path, Stop(3), max_steps=6))
    watch = Watch()
    trainer = trainer_of(tmp_path, watch, max_steps=6)
    with pytest.raises(
        ValueError,
        match="stage_1 is of a training on 16 examples, not 12",
    ):
        train_in_stages(trainer, 0.4, resume_from_checkpoint=True)
    assert watch.steps == []


# --- what cannot work -----------------------------------------------------------------


@dataclass(frozen=True)
class Refused:
    """Attributes that a trainer has, arguments of the call, and what the error says."""

    message: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)


def no_model():
    """A `model_init` of the user's."""


def loader_of_ones_own():
    return DataLoader(Texts(N))


REFUSED = {
    "no data": Refused(
        "has a length",
        attributes={"train_dataset": None},
    ),
    "endless data": Refused(
        "has a length",
        attributes={"train_dataset": Endless()},
    ),
    "nothing to train": Refused(
        "is_trainable=True",
        attributes={"model": lora_model("bert").requires_grad_(False)},
    ),
    "model_init": Refused(
        "model_init makes a new model",
        attributes={"model_init": no_model},
    ),
    "an optimizer": Refused(
        "was given an optimizer",
        attributes={"optimizer": object()},
    ),
    "a loader": Refused(
        "must read self.train_data",
        attributes={"get_train_dataloader": loader_of_ones_own},
    ),
    "one text a class": Refused(
        "No class has examples",
        attributes={"train_dataset": labelled(torch.arange(3))},
        arguments={"held_out": 0.4},
    ),
    "packed texts": Refused(
        "packed",
        attributes={"train_dataset": packed()},
    ),
    "all held out": Refused(
        "between 0 and 1",
        arguments={"held_out": 1.0},
    ),
    "none held out": Refused(
        "too few",
        arguments={"held_out": 0.01},
    ),
    "no members": Refused(
        "members must be",
        arguments={"members": 0},
    ),
    "a member's name": Refused(
        "has an adapter 'member_1' already",
        arguments={"members": 2},
    ),
    "likelihood": Refused(
        "best",
        arguments={"likelihood": "best"},
    ),
}
# What a refused call leaves in a trainer.
KEPT = (
    "args",
    "train_dataset",
    "optimizer",
    "lr_scheduler",
    "state",
    "model",
)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_before_any_training(tmp_path, name):
    case = REFUSED[name]
    watch = Watch()
    trainer = trainer_of(tmp_path, watch)
    trainer.model.add_adapter("member_1", trainer.model.peft_config["default"])
    vars(trainer).update(case.attributes)
    before = {attribute: getattr(trainer, attribute) for attribute in KEPT}
    model = Snapshot(trainer.model)
    with pytest.raises((ValueError, NotImplementedError), match=case.message):
        train_in_stages(trainer, **case.arguments)
    assert watch.steps == []
    for attribute, value in before.items():
        assert getattr(trainer, attribute) is value, attribute
    model.assert_equal(trainer.model)


# --- a loop of one's own --------------------------------------------------------------


def differences():
    """Twelve inputs, and examples whose targets are differences of their numbers."""
    X = torch.randn(12, 5, generator=generator()).double()
    return X, [(x, x[:2] - x[2:4]) for x in X]


def no_training(model, examples, share):
    """Weights that a loop leaves as they are."""


def test_a_loop_of_ones_own_trains_on_what_its_loader_gives():
    model = plain_model(2)
    calls = []
    X, data = differences()
    places = [0, 1, 2, 4, 5, 7, 8, 9, 10, 11]

    def train(trained, examples, share):
        assert trained is model
        x, _ = next(iter(DataLoader(examples, len(examples))))
        seen = [place for place in range(12) if X[place].tolist() in x.tolist()]
        calls.append((seen, share))
        for weight in model.parameters():
            weight.data.mul_(0.9)

    loader = DataLoader(data, batch_size=4, sampler=SubsetRandomSampler(places))
    la = in_stages(
        train,
        model,
        loader,
        0.3,
        likelihood="regression",
        sigma_noise=0.5,
    )
    (rest, first_share), everything = calls
    assert len(rest) == 7
    assert first_share == 0.7
    assert set(rest) < set(places)
    assert everything == (places, 0.25)
    assert la.likelihood == "regression"
    assert la.n_data == 10
    assert la.sigma_noise.item() != 0.5  # the held-out texts have chosen it


@pytest.mark.parametrize("sigma_noise", [0.01, 1.0, 100.0])
def test_the_noise_of_numbers_is_chosen_wherever_it_starts(sigma_noise):
    _, data = differences()
    loader = DataLoader(data, batch_size=4)
    model = plain_model(2)
    la = in_stages(
        no_training,
        model,
        loader,
        0.3,
        likelihood="regression",
        sigma_noise=sigma_noise,
    )
    expected = in_stages(no_training, model, loader, 0.3, likelihood="regression")
    assert la.sigma_noise.item() == pytest.approx(expected.sigma_noise.item(), rel=1e-5)
    assert la.prior_precision.item() == pytest.approx(
        expected.prior_precision.item(), rel=1e-4
    )


# --- several processes ----------------------------------------------------------------


def in_ranks(rank, folder):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29517",
    }
    # Of the process that this one was forked from.
    PartialState._reset_state()
    AcceleratorState._reset_state()
    trainer = trainer_of(
        folder,
        max_steps=2,
        ddp_backend="gloo",
        eval_data=Texts(9),
    )
    la = train_in_stages(trainer, members=2)
    return la(BATCH), (la.n_data, trainer.state.log_history[-1])


def without_training(rank=0):
    """A text of the rare class is on each rank, and one of them is held out."""
    texts = of_two_classes(3, 8)
    sampler = None
    if dist.is_initialized():
        sampler = DistributedSampler(texts, shuffle=False)
    la = in_stages(
        no_training,
        lora_model("bert"),
        DataLoader(texts, batch_size=2, sampler=sampler),
        generator=generator(42),
        backend_kwargs={"rank": FULL_RANK},
    )
    return la.prior_precision, la.n_data


def test_processes_train_and_choose_together(tmp_path):
    (one, figures), (other, same) = on_ranks(in_ranks, 2, tmp_path)
    torch.testing.assert_close(one, other)
    assert figures == same
    assert figures[0] == N
    expected, _ = without_training()
    for prior_precision, n_data in on_ranks(without_training, 2):
        torch.testing.assert_close(prior_precision, expected, rtol=0.01, atol=0)
        assert n_data == N


# --- losses of the user's own ---------------------------------------------------------


def weighted(model, inputs, *, counts, **_):
    """The loss of a trainer with class weights."""
    counts.append(len(inputs["labels"]))
    logits = model(**without_labels(inputs)).logits
    weights = torch.tensor([1.0, 2.0, 5.0])
    return torch.nn.functional.cross_entropy(logits, inputs["labels"], weight=weights)


def of_outputs(outputs, labels, *, counts, **_):
    """A `compute_loss_func`: the same loss, of what the model has returned."""
    counts.append(len(labels))
    weights = torch.tensor([1.0, 2.0, 5.0])
    return torch.nn.functional.cross_entropy(outputs["logits"], labels, weight=weights)


@pytest.mark.parametrize(
    "kind", ["class weights", "compute_loss_func", "label_smoothing_factor"]
)
def test_losses_of_ones_own_move_the_weights_and_not_the_likelihood(kind, tmp_path):
    counts: list[int] = []
    smoothing = 0.3 if kind == "label_smoothing_factor" else 0.0
    model = lora_model("bert", torch.float32)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.zeros_(weight)
    plain = copy.deepcopy(model)
    trainer = trainer_of(tmp_path / kind, model=model, label_smoothing_factor=smoothing)
    if kind == "class weights":
        trainer.compute_loss = partial(weighted, counts=counts)
    elif kind == "compute_loss_func":
        trainer.compute_loss_func = partial(of_outputs, counts=counts)
    la = train_in_stages(trainer)
    if not smoothing:
        assert sum(counts) > 0
    n_trained = len(counts)

    (batch,) = [trainer.data_collator(list(trainer.train_dataset))]
    model.eval()
    logits = model(**without_labels(batch)).logits.detach()
    expected = torch.nn.functional.cross_entropy(
        logits, batch["labels"], reduction="sum"
    )
    torch.testing.assert_close(la.loss.float(), expected, rtol=1e-4, atol=1e-4)
    ordinary = trainer_of(tmp_path / "plain", model=plain)
    train_in_stages(ordinary)
    assert not torch.allclose(
        plain.eval()(**without_labels(batch)).logits, logits, atol=1e-3
    )

    # A student's loss is not the user's.
    la.distill(trainer, None)
    assert len(counts) == n_trained

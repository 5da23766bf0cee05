"""Training in stages: held-out texts choose the prior, and are learnt in the end."""

import json
import math
import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.state import AcceleratorState
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
)
from transformers import TrainerCallback

from laplace_lora_ext import (
    GridSearch,
    LaplaceMixture,
    from_pretrained,
    in_stages,
    train_in_stages,
)
from laplace_lora_ext.metrics import quality
from laplace_lora_ext.training.stages import choose_priors, joined, with_choice
from laplace_lora_ext.tuning.losses import PENALTY
from tests.support.models import (
    Batch,
    base_model,
    lora_model,
    plain_model,
    untrained,
    without_labels,
)
from tests.support.posteriors import fitted, generator, normal, validation_loss
from tests.support.ranks import Texts, on_ranks
from tests.support.snapshots import Snapshot
from tests.support.trainers import N, Stop, Watch, trainer_of, values

BATCH, *_ = Texts(4).batches
# With it nothing is left out of a factor, so that the curvature is the same in any
# order.
ALL_COLUMNS = 24


# --- texts ----------------------------------------------------------------------------


class Learnable(Texts):
    """Four texts of five have the label that their tokens tell."""

    def __getitem__(self, index):
        text = super().__getitem__(index)
        is_real = text["attention_mask"].bool()
        told = index % 3
        tokens = torch.where(is_real, 10 + told, text["input_ids"])
        label = told if index % 5 else 0
        return text | {"input_ids": tokens, "labels": torch.tensor(label)}


class Endless(IterableDataset):
    """Texts without a length, of which nothing can be held out."""

    def __iter__(self):
        return iter([])


def labelled(labels: Tensor) -> list[Batch]:
    """Make a text for each label."""
    texts = Texts(len(labels))
    relabelled = []
    for text, label in zip(texts, labels, strict=True):
        with_label = text | {"labels": label}
        relabelled.append(with_label)
    return relabelled


def of_two_classes(*others: int) -> list[Batch]:
    """Make texts of two classes, but for the given ones."""
    labels = torch.arange(N) % 2
    labels[list(others)] = 2
    return labelled(labels)


def packed() -> list[Batch]:
    """Make texts whose positions begin anew within them."""
    of_three = torch.arange(3)
    of_four = torch.arange(4)
    positions = {"position_ids": torch.cat([of_three, of_four])}
    return [text | positions for text in Texts(N)]


def fresh_base(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Make the model that an adapter of `lora_model("bert")` belongs to."""
    torch.manual_seed(0)
    model = base_model("bert")
    return model.to(dtype)


# --- the parts ------------------------------------------------------------------------


def trainable_adapters(model: nn.Module) -> set[str]:
    """Name the adapters that have a trainable A."""
    adapters = set()
    for name, weight in model.named_parameters():
        _, is_of_a, rest = name.partition(".lora_A.")
        if is_of_a and weight.requires_grad:
            adapter, *_ = rest.split(".")
            adapters.add(adapter)
    return adapters


def test_each_stage_trains_its_own_member():
    model = lora_model("bert")
    loader = DataLoader(Texts(N), batch_size=4)
    trained = []

    def train(model, examples, share):
        adapter = model.active_adapter
        assert trainable_adapters(model) == {adapter}
        stage = (adapter, len(examples), share)
        trained.append(stage)

    in_stages(train, model, loader, 0.25, members=2)
    assert trained == [
        ("default", 15, 0.75),
        ("member_1", 15, 0.75),
        ("default", N, 0.25),
        ("member_1", N, 0.25),
    ]
    assert model.active_adapter == "default"


def priors_of(posteriors: list) -> list[float]:
    return [la.prior_precision.item() for la in posteriors]


@pytest.mark.parametrize("priors", [[2.0], [2.0, 3.0]])
def test_a_choice_leaves_the_posteriors_as_they_are(priors):
    las = []
    for prior in priors:
        la = fitted()
        la.prior_precision = prior
        las.append(la)
    choice = choose_priors(las, [BATCH])
    assert priors_of(las) == priors
    chosen = with_choice(las, choice)
    best = joined(chosen)
    probabilities = best(BATCH, link_approx="mean_field")
    figures = quality(probabilities, BATCH["labels"])

    history = choice.history
    # Between two scales at which losses are summed, it is interpolated.
    assert figures["nll"] == pytest.approx(history.loss, rel=1e-4)
    logit_scale = history.logit_scale[history.choice]
    member, *_ = best.members
    assert member.logit_scale == logit_scale.item()
    assert logit_scale != 1
    assert priors_of(las) == priors


# --- stages of a trainer --------------------------------------------------------------


# Settings of a trainer, the share held out, and each stage's steps and warm-up.
SHARES: list[tuple[dict[str, Any], float, tuple[int, int], tuple[int, int]]] = [
    ({"max_steps": 10}, 0.2, (8, 2), (0, 0)),
    ({"max_steps": 10, "warmup_steps": 5}, 0.4, (6, 2), (3, 1)),
    ({"max_steps": -1, "num_train_epochs": 2}, 0.2, (8, 3), (0, 0)),
    ({"max_steps": -1, "gradient_accumulation_steps": 2}, 0.2, (6, 3), (0, 0)),
    # 1 - 0.7 is a little more than 0.3, which must not add a step.
    ({"max_steps": -1, "per_device_train_batch_size": 2}, 0.7, (9, 8), (0, 0)),
]


@pytest.mark.parametrize(("settings", "share", "expected", "warmup"), SHARES)
def test_each_stage_takes_its_share_of_the_steps(
    tmp_path, settings, share, expected, warmup
):
    watch = Watch()
    trainer = trainer_of(tmp_path, watch, **settings)
    train_in_stages(trainer, share)
    assert tuple(map(len, watch.steps)) == expected
    for n_warmup, steps in zip(warmup, watch.steps, strict=True):
        rates = [rate for rate, _ in steps]
        highest = max(rates)
        assert rates.index(highest) == n_warmup
        (first_rate, n_remembered), *_ = steps
        assert first_rate == (0 if n_warmup else 1e-2)
        # Each stage has an optimizer of its own.
        assert n_remembered == 0
    stages = []
    for entry in trainer.state.log_history:
        if "learning_rate" in entry:
            stages.append(entry["stage"])
    first, second = expected
    in_first = ["stage_1"] * first
    in_second = ["stage_2"] * second
    assert stages == in_first + in_second


def test_the_seed_chooses_what_is_held_out_and_the_second_stage_learns_it(tmp_path):
    watch = Watch()
    # 0 is a seed too, and no lack of one.
    for seed in (None, 0):
        trainer = trainer_of(
            tmp_path, watch, data_seed=seed, max_steps=2, save_strategy="no"
        )
        with pytest.warns(UserWarning, match="looks trained"):
            train_in_stages(trainer, 0.25)
    n_texts = [len(data) for data in watch.data]
    assert n_texts == [15, N, 15, N]
    one, _, other, _ = watch.data
    assert one.indices != other.indices


@pytest.mark.parametrize("place", range(0, N, 4))
def test_the_last_text_of_a_class_is_never_held_out(place):
    seen = []

    def train(model, examples, share):
        seen.append(examples)

    texts = of_two_classes(place)
    loader = DataLoader(texts, batch_size=4)
    model = lora_model("bert")
    in_stages(train, model, loader, 0.4)
    in_first_stage, *_ = seen
    labels = [int(text["labels"]) for text in in_first_stage]
    n_of_classes = Counter(labels).values()
    assert sorted(n_of_classes) == [1, 5, 6]


def of_first_stage(folder: Path, examples: Subset):
    """Fit a posterior of the first stage's adapter to its texts."""
    base = fresh_base(torch.float64)
    model = PeftModel.from_pretrained(base, folder / "stage_1")
    return fitted(batches=in_one_batch(examples), model=model, rank=ALL_COLUMNS)


def in_one_batch(examples: Dataset) -> list[Batch]:
    loader = DataLoader(examples, batch_size=N)
    return list(loader)


class TwoWords(Texts):
    """Texts of one word, repeated, that tells their class."""

    def __getitem__(self, place: int) -> Batch:
        text = super().__getitem__(place)
        label = place % 2
        word = torch.full_like(text["input_ids"], 5 + 9 * label)
        return text | {"input_ids": word, "labels": label}


def test_the_penalty_of_a_scale_is_no_part_of_the_held_out_loss(tmp_path, monkeypatch):
    histories = []
    choose = GridSearch.choose

    def noted(self, la):
        histories.append(choose(self, la))
        return histories[-1]

    monkeypatch.setattr(GridSearch, "choose", noted)
    # So few steps that the model is less sure than it might be.
    trainer = trainer_of(tmp_path, data=TwoWords(N), save_strategy="no")
    la = train_in_stages(trainer, 0.4)
    assert la.logit_scale > 1.1
    (history,) = histories
    n_held_out = 8
    penalty = PENALTY * math.log(la.logit_scale) ** 2 / n_held_out
    loss = history.chosen.objective - penalty
    *_, figures = trainer.state.log_history
    assert figures["laplace_held_out_nll"] == pytest.approx(loss, rel=1e-6)


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
    settings = {"rank": ALL_COLUMNS}
    la = train_in_stages(trainer, 0.4, backend_kwargs=settings)
    chosen = la.prior_precision.item()

    # The same by hand: the first stage's adapter, fitted to its texts, on a grid.
    in_first_stage, *_ = watch.data
    trained_on = in_first_stage.indices
    held_out = [place for place in range(N) if place not in trained_on]
    validation = in_one_batch(Subset(data, held_out))
    by_hand = of_first_stage(tmp_path, Subset(data, trained_on))
    history = by_hand.optimize_prior_precision(
        method="gridsearch", val_loader=validation
    )
    # Within the grid, so that another choice of texts would make another.
    assert 0 < history.choice < 100
    assert chosen == by_hand.prior_precision.item()
    assert la.logit_scale == pytest.approx(by_hand.logit_scale)
    assert la.logit_scale != 1
    loss = validation_loss(by_hand, chosen, validation, link_approx="mean_field")
    *_, figures = trainer.state.log_history
    assert figures["laplace_held_out_nll"] == pytest.approx(loss, rel=1e-4)
    assert figures["laplace_prior_precision"] == chosen
    assert figures["laplace_logit_scale"] == la.logit_scale

    # The posterior is that of the second stage's weights, with what the first has
    # chosen.
    of_second = fitted(batches=in_one_batch(data), model=model, rank=ALL_COLUMNS)
    of_second.prior_precision = chosen
    of_second.logit_scale = la.logit_scale
    assert_same_prediction(la, of_second)


def assert_same_prediction(la, other) -> None:
    found = la(BATCH)
    expected = other(BATCH)
    assert_close(found, expected)


def in_folder_with_evaluations(folder: Path, adapter: str, members: int):
    """Train an adapter of that name in stages, with nine texts to evaluate."""
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])
    model = get_peft_model(fresh_base(), config, adapter)
    texts = Texts(9)
    trainer = trainer_of(
        folder,
        model=model,
        eval_data=texts,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
    )
    la = train_in_stages(trainer, members=members)
    assert model.active_adapter == adapter
    checkpoint = folder / "stage_1" / "checkpoint-4"
    assert checkpoint.exists()
    content = (folder / "trainer_state.json").read_text()
    log = json.loads(content)["log_history"]
    assert log == trainer.state.log_history
    *_, last = log
    figures = quality_of(la, texts)
    nll = figures["nll"]
    assert last["eval_laplace_nll"] == pytest.approx(nll, abs=1e-5)
    return la, trainer


def quality_of(la, texts: Texts) -> dict[str, float]:
    """Measure mean-field predictions of labelled texts."""
    predicted = []
    labels = []
    for batch in DataLoader(texts, batch_size=5):
        p = la(batch, link_approx="mean_field")
        predicted.append(p)
        labels.append(batch["labels"])
    return quality(torch.cat(predicted), torch.cat(labels))


class Trajectory(TrainerCallback):
    """Copies the trained weights before a training, and after each step."""

    def __init__(self) -> None:
        self.stages: list[list[Tensor]] = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.stages.append([trained_vector(model)])

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.stages[-1].append(trained_vector(model))


def trained_vector(model: nn.Module) -> Tensor:
    """Copy what requires a gradient, as one vector."""
    weights = [each for each in model.parameters() if each.requires_grad]
    return torch.cat([weight.detach().flatten() for weight in weights])


def test_each_stage_leaves_the_mean_of_its_steps(tmp_path):
    seen = Trajectory()
    watch = Watch()
    trainer = trainer_of(tmp_path, seen, watch, max_steps=20, warmup_steps=5)
    la = train_in_stages(trainer, average=True)
    first, second = seen.stages
    # Of 16 and 5 steps, after the weights at the beginning.
    assert torch.allclose(second[0], torch.stack(first[-10:]).mean(0), atol=1e-7)
    mean = torch.stack(second[-3:]).mean(0)
    assert torch.allclose(trained_vector(trainer.model), mean, atol=1e-7)
    # What is fitted is what is saved.
    read = from_pretrained(PeftModel.from_pretrained(fresh_base(), tmp_path), tmp_path)
    assert torch.equal(read(BATCH), la(BATCH))
    for steps in watch.steps:
        rates = [rate for rate, _ in steps]
        assert rates[-1] == max(rates) == 1e-2


def test_all_is_in_the_output_folder_and_the_logs(tmp_path):
    la, trainer = in_folder_with_evaluations(tmp_path, "mine", members=1)
    loaded = PeftModel.from_pretrained(fresh_base(), tmp_path / "mine")
    again = from_pretrained(loaded, tmp_path)
    assert_same_prediction(again, la)
    # The best weights of the second stage alone are loaded at its end.
    losses = []
    for entry in trainer.state.log_history:
        is_of_second = entry.get("stage") == "stage_2"
        if is_of_second and "eval_loss" in entry:
            losses.append(entry["eval_loss"])
    figures = trainer.evaluate()
    best = min(losses)
    assert figures["eval_loss"] == pytest.approx(best, rel=1e-5)


def test_all_members_are_in_the_output_folder_and_the_logs(tmp_path):
    la, _ = in_folder_with_evaluations(tmp_path, "default", members=2)
    again = LaplaceMixture.from_pretrained(fresh_base(), tmp_path)
    assert_same_prediction(again, la)
    one, other = la.members
    # The best weights of "default" are not the other's.
    assert not torch.equal(one.mean, other.mean)


def test_rows_of_embeddings_belong_to_each_member(tmp_path):
    model = lora_model("bert", torch.float32, trainable_token_indices=[1, 5])
    trainer = trainer_of(tmp_path, model=model)
    message = r"1 of 9 matrices, such as .*trainable_tokens_delta"
    with pytest.warns(UserWarning, match=message):
        la = train_in_stages(trainer, members=2)
    rows = []
    for name, weight in model.named_parameters():
        if "trainable_tokens_delta" in name:
            rows.append(weight)
    one, other = rows
    assert not torch.equal(one, other)
    again = LaplaceMixture.from_pretrained(fresh_base(), tmp_path)
    assert_same_prediction(again, la)
    # A member's folder is also that of one posterior, under any adapter's name.
    folder = tmp_path / "member_1"
    renamed = PeftModel.from_pretrained(fresh_base(), folder, "mine")
    member = from_pretrained(renamed, folder)
    _, second = la.members
    assert_same_prediction(member, second)


# --- runs that were killed ------------------------------------------------------------


def moved(folder: Path, to: Path) -> Path:
    """Move a folder, so that later checkpoints have earlier times."""
    folder.rename(to)
    for path in to.rglob("*"):
        _, _, step = path.parent.name.rpartition("-")
        n_steps = int(step) if step.isdigit() else 0
        time = 2e9 - n_steps
        os.utime(path, (time, time))
    return to


def losses_of(trainer) -> list[float]:
    losses = []
    for entry in trainer.state.log_history:
        if "loss" in entry:
            losses.append(entry["loss"])
    return losses


def leave_checkpoints_of_other_trainings(folder: Path) -> None:
    alone = trainer_of(folder, learning_rate=0.1)
    alone.train()
    in_two = trainer_of(folder, learning_rate=0.1, max_steps=8)
    train_in_stages(in_two)


def killed_at(folder: Path, step: int, **arguments: Any) -> None:
    """Begin a training that is killed at a step, and leaves its trainer as it was."""
    trainer = trainer_of(folder, Stop(step), max_steps=6)
    args = trainer.args
    data = trainer.train_dataset
    callbacks = list(trainer.callback_handler.callbacks)
    with pytest.raises(RuntimeError, match="killed"):
        train_in_stages(trainer, **arguments)
    assert trainer.callback_handler.callbacks == callbacks
    assert trainer.args == args
    assert trainer.train_dataset == data
    assert trainer.optimizer is None
    assert list(trainer.model.peft_config) == ["default"]


# Of five steps of the first stage, for each member, and two of the second.
@pytest.mark.parametrize(
    ("members", "stop", "average"),
    [
        pytest.param(1, 3, False, id="in the first stage, beside other trainings"),
        pytest.param(1, 6, False, id="at the second stage's first step"),
        pytest.param(1, 7, False, id="at the last step"),
        pytest.param(2, 8, False, id="in the second member's first stage"),
        pytest.param(1, 4, True, id="while the first stage is averaged"),
        pytest.param(1, 6, True, id="at the first step from an average"),
        pytest.param(2, 13, 0.9, id="while the second stage is averaged"),
    ],
)
def test_a_run_that_was_killed_goes_on_to_the_same_weights(
    tmp_path, members, stop, average
):
    arguments = {"members": members, "average": average}
    whole = trainer_of(tmp_path / "whole", max_steps=6)
    expected = train_in_stages(whole, **arguments)
    weights = values(whole.model)

    folder = tmp_path / "killed"
    if stop == 3:
        leave_checkpoints_of_other_trainings(folder)
    killed_at(folder, stop, **arguments)
    if stop == 3:
        folder = moved(folder, tmp_path / "moved")

    watch = Watch()
    resumed = trainer_of(folder, watch, max_steps=6)
    la = train_in_stages(resumed, resume_from_checkpoint=True, **arguments)
    n_steps = sum(len(steps) for steps in watch.steps)
    assert n_steps == 7 * members - stop + 1
    found = values(resumed.model)
    for name, value in weights.items():
        assert torch.equal(found[name], value), name
    assert torch.equal(la(BATCH), expected(BATCH))
    assert losses_of(resumed) == losses_of(whole)


REVERSED = [Texts(N)[place] for place in reversed(range(N))]
RESUMED = {
    "another share held out": ({}, {"held_out": 0.4}, "with held-out examples="),
    "another seed": ({"seed": 7}, {}, "with seed=42, and this one has 7"),
    "the seed 0 of the data": ({"data_seed": 0}, {}, "with data_seed=None, and .* 0"),
    "texts in another order": ({"data": REVERSED}, {}, "with held-out examples="),
    "another rate": ({"learning_rate": 0.1}, {}, "with learning_rate=0.01"),
    "averaged": ({}, {"average": True}, "with average=0.0, and this one has 0.6"),
    "more members": ({}, {"members": 2}, "with members=1, and this one has 2"),
}


@pytest.mark.parametrize(
    ("settings", "arguments", "message"), RESUMED.values(), ids=RESUMED
)
def test_a_run_goes_on_as_it_began_alone(tmp_path, settings, arguments, message):
    with pytest.raises(RuntimeError, match="killed"):
        train_in_stages(trainer_of(tmp_path, Stop(3), max_steps=6))
    watch = Watch()
    trainer = trainer_of(tmp_path, watch, max_steps=6, **settings)
    with pytest.raises(ValueError, match=f"stage_1 is of a training {message}"):
        train_in_stages(trainer, resume_from_checkpoint=True, **arguments)
    assert watch.steps == []


# --- what cannot work -----------------------------------------------------------------


def no_model():
    """A `model_init` of the user's."""


def loader_of_ones_own():
    return DataLoader(Texts(N))


# Attributes that a trainer has, arguments of the call, and what the error says.
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"train_dataset": None}, {}, "has a length"),
    ({"train_dataset": Endless()}, {}, "has a length"),
    ({"model": lora_model("bert").requires_grad_(False)}, {}, "is_trainable=True"),
    ({"model_init": no_model}, {}, "model_init makes a new model"),
    ({"optimizer": object()}, {}, "was given an optimizer"),
    ({"get_train_dataloader": loader_of_ones_own}, {}, "must read self.train_data"),
    (
        {"train_dataset": labelled(torch.arange(3))},
        {"held_out": 0.4},
        "No class has examples",
    ),
    ({"train_dataset": packed()}, {}, "packed"),
    ({}, {"held_out": 1.0}, "between 0 and 1"),
    ({}, {"held_out": 0.01}, "too few"),
    ({}, {"members": 0}, "members must be"),
    ({}, {"members": 2}, "has an adapter 'member_1' already"),
    ({}, {"likelihood": "best"}, "best"),
]
# What a refused call leaves in a trainer.
KEPT = ("args", "train_dataset", "optimizer", "lr_scheduler", "state", "model")


@pytest.mark.parametrize(("attributes", "arguments", "message"), REFUSED)
def test_what_cannot_work_is_refused_before_any_training(
    tmp_path, attributes, arguments, message
):
    watch = Watch()
    trainer = trainer_of(tmp_path, watch)
    trainer.model.add_adapter("member_1", trainer.model.peft_config["default"])
    vars(trainer).update(attributes)
    before = {attribute: getattr(trainer, attribute) for attribute in KEPT}
    model = Snapshot(trainer.model)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        train_in_stages(trainer, **arguments)
    assert watch.steps == []
    for attribute, value in before.items():
        assert getattr(trainer, attribute) is value, attribute
    model.assert_equal(trainer.model)


# --- a loop of one's own --------------------------------------------------------------


def differences() -> list[tuple[Tensor, Tensor]]:
    """Make twelve examples whose targets are differences of their numbers."""
    examples = []
    for x in normal(12, 5):
        y = x[:2] - x[2:4]
        examples.append((x, y))
    return examples


def no_training(model, examples, share):
    """Leave the weights as they are."""


def of_regression(train, model, loader, **settings):
    """Hold out three tenths of a regression's examples."""
    return in_stages(train, model, loader, 0.3, likelihood="regression", **settings)


def test_a_loop_of_ones_own_trains_on_what_its_loader_gives():
    model = plain_model(2)
    data = differences()
    left_out = (3, 6)
    places = [place for place in range(12) if place not in left_out]
    calls = []

    def train(trained, examples, share):
        assert trained is model
        inputs = [x.tolist() for x, _ in examples]
        seen = []
        for place, (x, _) in enumerate(data):
            if x.tolist() in inputs:
                seen.append(place)
        calls.append((seen, share))
        # As a training would, so that the second stage has another model.
        for weight in model.parameters():
            weight.data.mul_(0.9)

    loader = DataLoader(data, batch_size=4, sampler=SubsetRandomSampler(places))
    la = of_regression(train, model, loader, sigma_noise=0.5)
    (rest, first_share), everything = calls
    assert len(rest) == 7
    assert first_share == 0.7
    assert set(rest) < set(places)
    assert everything == (places, 0.25)
    assert la.likelihood == "regression"
    assert la.n_data == len(places)
    # The held-out examples have chosen it.
    assert la.sigma_noise.item() != 0.5


@pytest.mark.parametrize("sigma_noise", [0.01, 1.0, 100.0])
def test_the_noise_of_numbers_is_chosen_wherever_it_starts(sigma_noise):
    loader = DataLoader(differences(), batch_size=4)
    model = plain_model(2)
    found = of_regression(no_training, model, loader, sigma_noise=sigma_noise)
    expected = of_regression(no_training, model, loader)
    assert_close(found.sigma_noise, expected.sigma_noise, rtol=1e-5, atol=0)
    assert_close(found.prior_precision, expected.prior_precision, rtol=1e-4, atol=0)


# --- several processes ----------------------------------------------------------------


def in_ranks(rank: int, folder: Path):
    """Train two members on one of two ranks; return a prediction and figures."""
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
    trainer = trainer_of(folder, max_steps=2, ddp_backend="gloo", eval_data=Texts(9))
    la = train_in_stages(trainer, members=2, average=True)
    figures = trainer.state.log_history[-1]
    return la(BATCH), la.n_data, figures


def without_training(_=0) -> tuple[Tensor, int]:
    """Choose a prior where each of two ranks has a text of a rare class."""
    # Of these two, one is held out.
    texts = of_two_classes(3, 8)
    sampler = None
    if dist.is_initialized():
        sampler = DistributedSampler(texts, shuffle=False)
    la = in_stages(
        no_training,
        lora_model("bert"),
        DataLoader(texts, batch_size=2, sampler=sampler),
        generator=generator(42),
        backend_kwargs={"rank": ALL_COLUMNS},
    )
    return la.prior_precision, la.n_data


def test_processes_train_and_choose_together(tmp_path):
    first, second = on_ranks(in_ranks, 2, tmp_path)
    prediction, *figures = first
    other_prediction, *other_figures = second
    assert_close(prediction, other_prediction)
    assert figures == other_figures
    n_data, _ = figures
    assert n_data == N


def test_processes_choose_as_one_does():
    expected, _ = without_training()
    for prior_precision, n_data in on_ranks(without_training, 2):
        # Predictions of single examples are rounded to float32 on the way.
        assert_close(prior_precision, expected, rtol=0.01, atol=0)
        assert n_data == N


# --- losses of the user's own ---------------------------------------------------------


WEIGHTS_OF_CLASSES = torch.tensor([1.0, 2.0, 5.0])


def weighted(model, inputs, *, counts: list[int], **_) -> Tensor:
    """Compute the loss of a trainer with class weights."""
    texts = without_labels(inputs)
    outputs = model(**texts)
    return of_outputs(outputs, inputs["labels"], counts=counts)


def of_outputs(outputs, labels, *, counts: list[int], **_) -> Tensor:
    """Compute the same loss of what the model has returned, and count the labels."""
    counts.append(len(labels))
    return cross_entropy(outputs["logits"], labels, weight=WEIGHTS_OF_CLASSES)


def new_encoder() -> nn.Module:
    return untrained(lora_model("bert", torch.float32))


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    model.eval()
    output = model(**without_labels(batch))
    return output.logits.detach()


@pytest.mark.parametrize(
    "kind", ["class weights", "compute_loss_func", "label_smoothing_factor"]
)
def test_losses_of_ones_own_move_the_weights_and_not_the_likelihood(kind, tmp_path):
    counts: list[int] = []
    smoothing = 0.3 if kind == "label_smoothing_factor" else 0.0
    model = new_encoder()
    trainer = trainer_of(tmp_path / kind, model=model, label_smoothing_factor=smoothing)
    if kind == "class weights":
        trainer.compute_loss = partial(weighted, counts=counts)
    elif kind == "compute_loss_func":
        trainer.compute_loss_func = partial(of_outputs, counts=counts)
    la = train_in_stages(trainer)
    n_trained = sum(counts)
    if not smoothing:
        assert n_trained > 0

    batch = trainer.data_collator(list(trainer.train_dataset))
    logits = logits_of(model, batch)
    of_likelihood = cross_entropy(logits, batch["labels"], reduction="sum")
    assert_close(la.loss.float(), of_likelihood, rtol=1e-4, atol=1e-4)
    plain = new_encoder()
    train_in_stages(trainer_of(tmp_path / "plain", model=plain))
    assert not torch.allclose(logits_of(plain, batch), logits, atol=1e-3)

    # A student's loss is not the user's.
    la.distill(trainer, None)
    assert sum(counts) == n_trained

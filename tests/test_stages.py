"""Training in stages: held-out texts choose the prior, and are learnt in the end."""

import json
import os
import re
import warnings

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

from laplace_lora_ext import LaplaceMixture, from_pretrained, in_stages, train_in_stages
from laplace_lora_ext.metrics import quality
from tests.support.models import base_model, lora_model, plain_model
from tests.support.posteriors import fitted, generator, validation_loss
from tests.support.ranks import Texts, on_ranks
from tests.support.snapshots import Snapshot
from tests.support.trainers import N, Stop, Watch, trainer_of, values

BATCH = Texts(4).batches[0]


class Learnable(Texts):
    """Four texts of five have the label that their tokens tell."""

    def __getitem__(self, index):
        text = super().__getitem__(index)
        tokens = torch.where(text["attention_mask"].bool(), 10 + index % 3, text["input_ids"])
        return text | {"input_ids": tokens, "labels": torch.tensor(index * (index % 5 > 0) % 3)}


@pytest.mark.parametrize(
    ("settings", "held_out", "steps", "warmup"),
    [
        ({"max_steps": 10}, 0.2, (8, 2), 0),
        ({"max_steps": 10, "warmup_steps": 5}, 0.4, (6, 2), (3, 1)),
        ({"max_steps": -1, "num_train_epochs": 2}, 0.2, (8, 3), 0),
        ({"max_steps": -1, "gradient_accumulation_steps": 2}, 0.2, (6, 3), 0),
        ({"max_steps": -1, "per_device_train_batch_size": 2}, 0.7, (9, 8), 0),  # 0.3 / (1 - 0.7)
    ],
    ids=str,
)
def test_each_stage_takes_its_share_of_the_steps(tmp_path, settings, held_out, steps, warmup):
    watch = Watch()
    trainer = trainer_of(tmp_path, watch, **settings)
    train_in_stages(trainer, held_out)
    assert tuple(map(len, watch.steps)) == steps
    for number, rates in zip(warmup or (0, 0), watch.steps, strict=True):
        rate, size = rates[0]
        assert size == 0  # the optimizer remembers nothing
        assert rate == (0 if number else 1e-2)
        assert max(range(len(rates)), key=lambda i: rates[i][0]) == number
    stages = [e["stage"] for e in trainer.state.log_history if "learning_rate" in e]
    assert stages == ["stage_1"] * steps[0] + ["stage_2"] * steps[1]


def test_the_seed_chooses_what_is_held_out_and_the_second_stage_learns_it(tmp_path):
    watch = Watch()
    for seed in (1, 2):
        settings = {"max_steps": 2, "save_strategy": "no"}
        with pytest.warns(UserWarning, match="looks trained"):
            train_in_stages(trainer_of(tmp_path, watch, data_seed=seed, **settings), 0.25)
    assert [len(data) for data in watch.data] == [15, N, 15, N]
    assert watch.data[0].indices != watch.data[2].indices


@pytest.mark.parametrize("place", range(0, N, 4))
def test_the_last_text_of_a_class_is_never_held_out(place):
    seen = []
    loader = DataLoader(of_two_classes(place), batch_size=4)
    in_stages(lambda *given: seen.append(given[1]), lora_model("bert"), loader, 0.4)
    first = torch.stack([text["labels"] for text in seen[0]])
    assert sorted(first.bincount().tolist()) == [1, 5, 6]


def test_the_prior_is_what_the_held_out_texts_choose(tmp_path):
    watch, model, data = Watch(), lora_model("bert"), Learnable(N)
    settings = {"learning_rate": 0.05, "max_steps": 20, "save_strategy": "no"}
    trainer = trainer_of(tmp_path, watch, model=model, data=data, **settings)
    la = train_in_stages(trainer, 0.4, backend_kwargs={"rank": 24})  # exact in any order
    rest = watch.data[0].indices
    held = [place for place in range(N) if place not in rest]
    rest, held = (list(DataLoader(Subset(data, places), 20)) for places in (rest, held))
    torch.manual_seed(0)
    first = PeftModel.from_pretrained(base_model("bert").double(), tmp_path / "stage_1")
    of_first = fitted(batches=rest, model=first, rank=24)
    grid = torch.logspace(-4, 4, 100).tolist()
    losses = [validation_loss(of_first, point, held, link_approx="mean_field") for point in grid]
    assert 0 < losses.index(min(losses)) < 99
    figures, found = trainer.state.log_history[-1], la.prior_precision.item()
    assert figures["laplace_held_out_nll"] == pytest.approx(min(losses), rel=1e-5)
    assert figures["laplace_prior_precision"] == found
    assert found == pytest.approx(grid[losses.index(min(losses))])
    of_second = fitted(batches=DataLoader(data, 20), model=model, rank=24)
    of_second.prior_precision = found
    torch.testing.assert_close(la(BATCH), of_second(BATCH))


@pytest.mark.parametrize(("adapter", "members"), [("mine", 1), ("default", 2)])
def test_all_is_in_the_output_folder_and_the_logs(tmp_path, adapter, members):
    torch.manual_seed(0)
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])
    model = get_peft_model(base_model("bert"), config, adapter)
    settings = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    trainer = trainer_of(tmp_path, model=model, eval_data=Texts(9), **settings)
    la = train_in_stages(trainer, members=members)
    log = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert log == trainer.state.log_history
    best = [min(e["eval_loss"] for e in log if "eval_loss" in e and e["stage"] == stage)
            for stage in ("stage_1", "stage_2")]  # fmt: skip
    eval_batches = list(DataLoader(Texts(9), batch_size=5))
    predicted = torch.cat([la(batch, link_approx="mean_field") for batch in eval_batches])
    expected = quality(predicted, torch.cat([batch["labels"] for batch in eval_batches]))
    assert log[-1]["eval_laplace_nll"] == pytest.approx(expected["nll"], abs=1e-5)
    assert (tmp_path / "stage_1" / "checkpoint-4").exists()
    torch.manual_seed(0)
    fresh = base_model("bert")
    if members == 1:
        fresh = PeftModel.from_pretrained(fresh, tmp_path / adapter)
        again = from_pretrained(fresh, tmp_path)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(best[1], rel=1e-5)
    else:
        again = LaplaceMixture.from_pretrained(fresh, tmp_path)
        one, other = (member.mean for member in la.members)
        assert not torch.equal(one, other)  # the best of "default" is not the other's
    torch.testing.assert_close(again(BATCH), la(BATCH))
    assert model.active_adapter == adapter


def test_rows_of_embeddings_belong_to_each_member(tmp_path):
    model = lora_model("bert", torch.float32, trainable_token_indices=[1, 5])
    with pytest.warns(UserWarning, match=r"Other trainable weights.*trainable_tokens_delta"):
        la = train_in_stages(trainer_of(tmp_path, model=model), members=2)
    deltas = [w for name, w in model.named_parameters() if "trainable_tokens_delta" in name]
    assert not torch.equal(*deltas)
    torch.manual_seed(0)
    again = LaplaceMixture.from_pretrained(base_model("bert"), tmp_path)
    torch.testing.assert_close(again(BATCH), la(BATCH))
    torch.manual_seed(0)
    renamed = PeftModel.from_pretrained(base_model("bert"), tmp_path / "member_1", "mine")
    torch.testing.assert_close(
        from_pretrained(renamed, tmp_path / "member_1")(BATCH), la.members[1](BATCH)
    )


def moved(folder, to):
    """A folder elsewhere, in which every later checkpoint has an earlier time, and marks later."""
    folder.rename(to)
    for path in to.rglob("*"):
        step = path.parent.name.rpartition("-")[2]
        time = 2e9 - int(step) if step.isdigit() else 2e9
        os.utime(path, (time, time))
    return to


@pytest.mark.parametrize(("members", "stops"), [(1, (3, 6, 7)), (2, (8,))])
def test_a_run_that_was_killed_goes_on_to_the_same_weights(tmp_path, members, stops):
    options = {"members": members}
    whole = trainer_of(tmp_path / "whole", max_steps=6)
    expected, weights = train_in_stages(whole, **options), values(whole.model)
    for at in stops:  # of five steps of the first stage, for each member, and two of the second
        folder = tmp_path / str(at)
        if at == 3:  # there are checkpoints of other trainings
            trainer_of(folder, learning_rate=0.1).train()
            train_in_stages(trainer_of(folder, learning_rate=0.1, max_steps=8), **options)
        trainer = trainer_of(folder, Stop(at), max_steps=6)
        args, data = trainer.args, trainer.train_dataset
        with pytest.raises(RuntimeError, match="killed"):
            train_in_stages(trainer, **options)
        assert (trainer.args, trainer.train_dataset, trainer.optimizer) == (args, data, None)
        assert list(trainer.model.peft_config) == ["default"]
        if at == 3:
            folder = moved(folder, tmp_path / "moved")
        steps = Watch()
        trainer = trainer_of(folder, steps, max_steps=6)
        la = train_in_stages(trainer, resume_from_checkpoint=True, **options)
        assert sum(map(len, steps.steps)) == 7 * members - at + 1
        found = values(trainer.model)
        assert [name for name in weights if not torch.equal(found[name], weights[name])] == []
        assert torch.equal(la(BATCH), expected(BATCH))
        logs = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (trainer, whole)]
        assert logs[0] == logs[1]


def test_a_run_goes_on_with_the_same_texts_alone(tmp_path):
    with pytest.raises(RuntimeError, match="killed"):
        train_in_stages(trainer_of(tmp_path, Stop(3), max_steps=6))
    trainer = trainer_of(tmp_path, steps := Watch(), max_steps=6)
    with pytest.raises(ValueError, match="stage_1 is of a training on 16 examples, not 12"):
        train_in_stages(trainer, 0.4, resume_from_checkpoint=True)
    assert steps.steps == []


class Endless(IterableDataset):
    def __iter__(self):
        return iter([])


def labelled(labels):
    return [
        text | {"labels": label} for text, label in zip(Texts(len(labels)), labels, strict=True)
    ]


def of_two_classes(*others):
    """Texts of two classes, but for the given ones."""
    labels = torch.arange(N) % 2
    labels[list(others)] = 2
    return labelled(labels)


POSITIONS = torch.tensor([0, 1, 2, 0, 1, 2, 3])


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"train_dataset": None}, {}, "has a length"),
        ({"train_dataset": Endless()}, {}, "has a length"),
        ({"model": lora_model("bert").requires_grad_(False)}, {}, "is_trainable=True"),
        ({"model_init": lambda: None}, {}, "model_init makes a new model"),
        ({"optimizer": object()}, {}, "was given an optimizer"),
        ({"get_train_dataloader": lambda: DataLoader(Texts(N))}, {}, "must read self.train_data"),
        ({"train_dataset": labelled(torch.arange(3))}, {"held_out": 0.4}, "No class has examples"),
        ({"train_dataset": [t | {"position_ids": POSITIONS} for t in Texts(N)]}, {}, "packed"),
        ({}, {"held_out": 1.0}, "between 0 and 1"),
        ({}, {"held_out": 0.01}, "too few"),
        ({}, {"members": 0}, "members must be"),
        ({}, {"members": 2}, "has an adapter 'member_1' already"),
        ({}, {"likelihood": "best"}, "best"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_is_refused_before_any_training(tmp_path, change, options, message):
    trainer = trainer_of(tmp_path, watch := Watch())
    trainer.model.add_adapter("member_1", trainer.model.peft_config["default"])
    vars(trainer).update(change)
    names = "args", "train_dataset", "optimizer", "lr_scheduler", "state", "model"
    before, model = [getattr(trainer, name) for name in names], Snapshot(trainer.model)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        train_in_stages(trainer, **options)
    assert watch.steps == []
    assert all(getattr(trainer, n) is value for n, value in zip(names, before, strict=True))
    model.assert_equal(trainer.model)


def test_a_loop_of_ones_own_trains_on_what_its_loader_gives():
    model, calls = plain_model(2), []
    X = torch.randn(12, 5, generator=generator()).double()
    data, places = [(x, x[:2] - x[2:4]) for x in X], [0, 1, 2, 4, 5, 7, 8, 9, 10, 11]

    def train(trained, examples, share):
        assert trained is model
        x, _ = next(iter(DataLoader(examples, len(examples))))
        calls.append(([p for p in range(12) if X[p].tolist() in x.tolist()], share))
        for weight in model.parameters():
            weight.data.mul_(0.9)

    loader = DataLoader(data, batch_size=4, sampler=SubsetRandomSampler(places))
    la = in_stages(train, model, loader, 0.3, likelihood="regression", sigma_noise=0.5)
    (rest, first_share), everything = calls
    assert (len(rest), first_share) == (7, 0.7)
    assert set(rest) < set(places)
    assert everything == (places, 0.25)
    assert (la.likelihood, la.n_data, la.sigma_noise.item()) == ("regression", 10, 0.5)


@pytest.mark.parametrize(
    ("sigma_noise", "says"), [(0.5, "first.*too small"), (1.3, None), (5.0, "last.*too large")]
)
def test_a_choice_at_the_end_of_the_grid_is_said_once(sigma_noise, says):
    X = torch.randn(12, 5, generator=generator()).double()
    loader = DataLoader([(x, x[:2] - x[2:4]) for x in X], batch_size=4)
    settings = {"likelihood": "regression", "sigma_noise": sigma_noise}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        in_stages(lambda *_: None, plain_model(2), loader, 0.3, **settings)
    found = [str(one.message) for one in said if "of the grid" in str(one.message)]
    assert len(found) == (says is not None)
    assert all(re.search(says or "", message) for message in found)


def in_ranks(rank, folder):
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29517"}
    PartialState._reset_state()
    AcceleratorState._reset_state()
    trainer = trainer_of(folder, max_steps=2, ddp_backend="gloo", eval_data=Texts(9))
    la = train_in_stages(trainer, members=2)
    return la(BATCH), (la.n_data, trainer.state.log_history[-1])


def without_training(rank=0):
    """A text of the rare class is on each rank, and one of them is held out."""
    texts = of_two_classes(3, 8)
    sampler = DistributedSampler(texts, shuffle=False) if dist.is_initialized() else None
    loader = DataLoader(texts, batch_size=2, sampler=sampler)
    options = {"generator": generator(42), "backend_kwargs": {"rank": 24}}  # exact in any order
    la = in_stages(lambda *_: None, lora_model("bert"), loader, **options)
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

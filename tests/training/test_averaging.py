"""Averages of weights, by a loop of one's own and by a trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Trainer, TrainerCallback

from laplace_lora_ext import AveragingCallback, WeightAverage
from laplace_lora_ext.training.averaging import steps_to_average
from tests.support.models import lora_model
from tests.support.ranks import Texts, on_ranks
from tests.support.trainers import (
    Record,
    Stop,
    Watch,
    assert_equal,
    mean_of,
    trained,
    trainer_of,
    values,
)

STEPS = 10
AVERAGED = 6  # the last of them


# --- a loop of one's own --------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_mean_of_all_updates(dtype):
    model = lora_model("bert", dtype, modules_to_save=["classifier"])
    frozen = values(model)
    average = WeightAverage(model)
    seen = []
    for _ in range(3):
        for weight in model.parameters():
            if weight.requires_grad:
                weight.data += torch.randn(weight.shape).to(dtype)
        average.update()
        seen.append(trained(model))
    average.finish()
    assert any("classifier" in name for name in seen[0])
    assert_equal(trained(model), mean_of(seen))
    for name, value in values(model).items():
        if name not in seen[0]:
            assert torch.equal(value, frozen[name]), name


# --- a trainer ------------------------------------------------------------------------


def averaging(folder: Path, *callbacks: TrainerCallback, **settings: Any) -> Trainer:
    """Make a trainer that averages its weights, with a head of its own."""
    defaults = {"max_steps": STEPS, "lr_scheduler_type": "constant_with_warmup"}
    model = lora_model("bert", torch.float32, modules_to_save=["classifier"])
    callbacks = (AveragingCallback(), *callbacks)
    return trainer_of(folder, *callbacks, model=model, **defaults | settings)


@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_training_ends_with_the_mean_of_its_last_steps(tmp_path, accumulated):
    record = Record()
    trainer = averaging(tmp_path, record, gradient_accumulation_steps=accumulated)
    trainer.train()
    assert len(record.weights) == STEPS
    assert_equal(trained(trainer.model), mean_of(record.weights[-AVERAGED:]))


# Before there are sums, between two that are averaged, and at the last step.
@pytest.mark.parametrize("step", [3, 8, STEPS])
def test_a_training_that_goes_on_ends_with_the_same_mean(tmp_path, step):
    whole = averaging(tmp_path / "whole")
    whole.train()
    killed = averaging(tmp_path / "killed", Stop(step))
    with pytest.raises(RuntimeError, match="killed"):
        killed.train()
    resumed = averaging(tmp_path / "killed")
    resumed.train(resume_from_checkpoint=True)
    assert_equal(trained(resumed.model), trained(whole.model))
    # One that had only to end has the same mean.
    ended = averaging(tmp_path / "whole")
    ended.train(resume_from_checkpoint=True)
    assert_equal(trained(ended.model), trained(whole.model))


def test_the_best_checkpoint_and_the_mean_exclude_each_other(tmp_path):
    watch = Watch()
    trainer = averaging(
        tmp_path,
        watch,
        load_best_model_at_end=True,
        eval_strategy="steps",
        eval_steps=1,
        eval_data=Texts(4),
    )
    with pytest.raises(ValueError, match="load_best_model_at_end"):
        trainer.train()
    assert watch.steps == []


class EndAt(TrainerCallback):
    """Ends a training in peace."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


def test_a_training_that_ends_early_says_so(tmp_path):
    record = Record()
    trainer = averaging(tmp_path, record, EndAt(3))
    with pytest.warns(UserWarning, match="Average from step 5 on"):
        trainer.train()
    assert_equal(trained(trainer.model), record.weights[-1])


def test_a_share_is_a_share_and_rounded_to_whole_steps():
    for share in (0, 1.2, -0.5):
        with pytest.raises(ValueError, match="average must be"):
            AveragingCallback(share)
    with pytest.raises(ValueError, match="call update"):
        WeightAverage(nn.Linear(2, 2)).finish()
    # (1 - 0.8) * 300 is a little below 60.
    assert steps_to_average(300, 0.8) == 240
    assert steps_to_average(1, 0.2) == 1


# --- several processes ----------------------------------------------------------------


def of_shards(_: int) -> tuple[Tensor, Tensor]:
    """Average the shards of a weight; save and load the sums on the way."""
    torch.manual_seed(0)
    model = nn.Linear(4, 6, bias=False)
    whole = model.weight.detach().clone()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    average = WeightAverage(model)
    average.update()
    state = average.state_dict()
    average = WeightAverage(model)
    average.load_state_dict(state)
    with torch.no_grad():
        model.weight *= 4
    average.update()
    average.finish()
    return model.weight.full_tensor().detach(), whole * 2.5


def test_each_rank_averages_its_shard():
    for found, expected in on_ranks(of_shards, 2):
        assert torch.equal(found, expected)

"""The user's own trainer trains again, and is as before."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    ProgressCallback,
    Trainer,
    TrainerCallback,
)

from laplace_lora_ext import AveragingCallback, Laplace, WeightAverage, train_in_stages
from laplace_lora_ext.models.lora_layers import is_untrained
from laplace_lora_ext.training.trainers import (
    loader_of,
    restored,
    steps_to_average,
    train_with,
)
from tests.support.models import VOCABULARY, llama, lora_model
from tests.support.posteriors import fitted
from tests.support.ranks import Texts, on_ranks
from tests.support.trainers import (
    N,
    Record,
    Stop,
    Watch,
    assert_equal,
    mean_of,
    trained,
    trainer_of,
    values,
)

# --- loaders --------------------------------------------------------------------------


def rows() -> Dataset:
    """Make a data set of texts, with a column that no model takes."""
    texts = [{key: value.tolist() for key, value in each.items()} for each in Texts(N)]
    return Dataset.from_list([text | {"origin": "a book"} for text in texts])


def test_batches_are_those_of_training_once_and_in_order(tmp_path):
    trainer = trainer_of(tmp_path, data=rows())
    found = list(loader_of(trainer, trainer.train_dataset))
    assert [len(batch["labels"]) for batch in found] == [5, 5, 5, 5]
    texts = [Texts(N)[place] for place in range(N)]
    # The column that no model takes is gone, as in training.
    assert found[0].keys() == texts[0].keys()
    for name in found[0]:
        joined = torch.cat([batch[name] for batch in found])
        expected = torch.stack([text[name] for text in texts])
        assert torch.equal(joined, expected)


# --- what a training leaves -----------------------------------------------------------


class Keeping(TrainerCallback):
    """Has containers that each step adds to."""

    def __init__(self) -> None:
        self.steps = []
        self.losses = {}

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)
        self.losses[state.global_step] = "a step"


# What a training sets of a trainer.
KEPT = ("args", "state", "optimizer", "lr_scheduler", "train_dataset", "model_wrapped")


def test_afterwards_a_trainer_and_its_callbacks_are_as_before(tmp_path):
    keeping = Keeping()
    # With its bar, which keeps what it shows.
    trainer = trainer_of(tmp_path, keeping, max_steps=2, disable_tqdm=False)
    trainer.train()
    callbacks = trainer.callback_handler.callbacks
    (bar,) = [each for each in callbacks if isinstance(each, ProgressCallback)]
    bar.training_bar = "of the training that goes on"
    lists = keeping.steps, trainer.state.log_history
    before = [getattr(trainer, name) for name in KEPT]
    contents = [*map(list, lists), dict(keeping.losses)]
    with restored(trainer):
        trainer.state.log_history.clear()
        train_with(trainer, Texts(8), 2.0, Path(tmp_path, "again"))
    assert (tmp_path / "again" / "checkpoint-4").exists()
    assert [getattr(trainer, name) for name in KEPT] == before
    assert bar.training_bar == "of the training that goes on"
    assert [*lists, keeping.losses] == contents


def test_a_second_training_ends_with_the_best_of_its_own_adapter(tmp_path):
    trainer = trainer_of(
        tmp_path,
        eval_data=Texts(9),
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
    )
    trainer.train()
    la = Laplace(trainer.model)
    la.fit(loader_of(trainer, trainer.train_dataset))

    def second_posterior(la: Any) -> Any:
        history = la.optimize_prior_precision(method="second_training", trainer=trainer)
        (posterior,) = history.posteriors
        return posterior

    other = second_posterior(la)
    # It has learnt something else.
    assert not torch.equal(other.mean, la.mean)
    assert not is_untrained(other.blocks)
    with pytest.raises(ValueError, match="'second_training_0' already: remove it"):
        second_posterior(la)
    trainer.model.delete_adapter("second_training_0")
    # It is the same whatever was drawn since.
    again = second_posterior(la)
    assert torch.equal(again.mean, other.mean)
    with pytest.raises(ValueError, match="this one has another"):
        second_posterior(fitted())
    assert trainer.model.active_adapter == "default"


def test_a_second_training_averages(tmp_path):
    watch = Watch()
    trainer = trainer_of(tmp_path, watch, max_steps=10)
    la = fitted(model=trainer.model)
    # It is as the fitted one, whichever is active.
    trainer.model.add_adapter("other", LoraConfig(r=2, target_modules=["key"]))
    trainer.model.set_adapter("other")
    la.optimize_prior_precision(method="second_training", trainer=trainer, average=0.5)
    assert trainer.model.active_adapter == "other"
    ((rates, _),) = [zip(*steps, strict=True) for steps in watch.steps]
    assert rates == (1e-2,) * 8


# --- TRL's trainers -------------------------------------------------------------------


def words(number: int, n_words: int) -> str:
    """Make a text of words of the tokenizer, another one for each number."""
    places = range(7 * number, 7 * number + n_words)
    return " ".join(f"w{3 + place % 50}" for place in places)


def examples_of(kind: str, n: int) -> Dataset:
    """Make completions of three words for "SFT", or preferences for "Reward"."""
    rows = []
    for i in range(n):
        if kind == "SFT":
            row = {"prompt": words(i, 3), "completion": " " + words(i + 9, 1 + i % 3)}
        else:
            row = {"chosen": words(i, 3 + i % 2), "rejected": words(i + 9, 4)}
        rows.append(row)
    return Dataset.from_list(rows)


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer to whom each word is a token."""
    tokens = ["<pad>", "?", "</s>", *(f"w{i}" for i in range(3, VOCABULARY))]
    ids = {word: i for i, word in enumerate(tokens)}
    made = Tokenizer(models.WordLevel(ids, unk_token="?"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>"
    )


@pytest.fixture
def trl(monkeypatch):
    # It asks the hub for nothing.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    return pytest.importorskip("trl")


def trl_trainer(trl: Any, folder: Path, kind: str) -> Any:
    """Make TRL's trainer of completions, "SFT", or of preferences, "Reward"."""
    base = llama()
    task = "CAUSAL_LM"
    if kind == "Reward":
        base.config.num_labels = 1
        base = LlamaForSequenceClassification(base.config)
        task = "SEQ_CLS"
    lora = LoraConfig(task_type=task, r=2, target_modules=["q_proj", "v_proj"])
    config_class = getattr(trl, f"{kind}Config")
    trainer_class = getattr(trl, f"{kind}Trainer")
    config = config_class(
        str(folder),
        max_steps=5,
        per_device_train_batch_size=4,
        report_to=[],
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    return trainer_class(
        get_peft_model(base, lora),
        config,
        train_dataset=examples_of(kind, 12),
        eval_dataset=examples_of(kind, 4),
        processing_class=tokenizer(),
    )


@pytest.mark.parametrize("kind", ["SFT", "Reward"])
def test_trainers_of_trl_train_in_stages(tmp_path, kind, trl):
    trainer = trl_trainer(trl, tmp_path, kind)
    la = train_in_stages(trainer)
    figures = trainer.state.log_history[-1]
    batch, _ = loader_of(trainer, trainer.train_dataset)
    assert la.n_data == 12
    assert la.prior_precision.item() == figures["laplace_prior_precision"]
    assert figures["eval_laplace_nll"] > 0
    if kind == "Reward":
        # Pairs of a preferred text and another one.
        inputs, _ = la.model.split(batch)
        assert la(inputs, fitting=True).shape == (8, 2)
    else:
        # Completions alone, with their ends.
        n_tokens = la.score(batch).labelled.sum(-1)
        assert n_tokens.tolist() == [2 + i % 3 for i in range(8)]


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

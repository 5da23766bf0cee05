"""The user's own trainer trains again, and is as before."""

import random
from collections import defaultdict, deque
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    ProgressCallback,
    TrainerCallback,
)

from laplace_lora_ext import Laplace, train_in_stages
from laplace_lora_ext.training.trainers import (
    loader_of,
    restored,
    train,
)
from tests.support.models import VOCABULARY, llama
from tests.support.posteriors import fitted
from tests.support.ranks import Texts
from tests.support.trainers import N, trainer_of


def rows():
    texts = [{name: value.tolist() for name, value in text.items()} for text in Texts(N)]
    return Dataset.from_list([text | {"origin": "a book"} for text in texts])


@pytest.mark.parametrize("data", [Texts(N), rows()], ids=["torch", "datasets"])
def test_batches_are_those_of_training_once_and_in_order(tmp_path, data):
    trainer = trainer_of(tmp_path, data=data)
    before = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[2],
    )
    loader = loader_of(trainer, data)
    after = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[2],
    )
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    found = list(loader)
    assert [len(batch["labels"]) for batch in found] == [
        5,
        5,
        5,
        5,
    ]
    assert found[0].keys() == Texts(N)[0].keys()
    for name in found[0]:
        expected = torch.stack([text[name] for text in map(Texts(N).__getitem__, range(N))])
        assert torch.equal(torch.cat([batch[name] for batch in found]), expected)


@dataclass
class Meter:
    numbers: deque = field(default_factory=deque)


class Keeping(TrainerCallback):
    """Has containers within containers that each step adds to."""

    def __init__(self):
        self.losses, self.seen = (
            {"all": [], "last": {}},
            ({0}, Meter()),
        )

    def on_step_end(self, args, state, control, **kwargs):
        self.losses["all"].append(state.global_step)
        self.losses["last"][state.global_step] = "a step"
        self.seen[0].add(state.global_step)
        self.seen[1].numbers.append(state.global_step)


def test_afterwards_a_trainer_and_its_callbacks_are_as_before(
    tmp_path,
):
    trainer = trainer_of(
        tmp_path,
        keeping := Keeping(),
        max_steps=2,
        disable_tqdm=False,
    )
    trainer.train()
    (bar,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, ProgressCallback))
    bar.training_bar = "of the training that goes on"
    trainer.own_figures = {"train": defaultdict(list, loss=[1.0])}
    names = (
        "args",
        "state",
        "optimizer",
        "lr_scheduler",
        "train_dataset",
        "model_wrapped",
    )
    before, stops = (
        [getattr(trainer, name) for name in names],
        trainer.control.should_training_stop,
    )
    contents = deepcopy(
        [
            trainer.state.log_history,
            trainer.own_figures,
            vars(keeping),
        ]
    )
    prepared = list(trainer.accelerator._optimizers)
    with restored(trainer):
        trainer.control.should_training_stop = not stops
        trainer.own_figures["train"]["loss"].append(2.0)
        trainer.state.log_history[0]["loss"] = 3.0
        train(trainer, Texts(8), 2.0, Path(tmp_path, "again"))
    assert (tmp_path / "again" / "checkpoint-4").exists()
    assert [getattr(trainer, name) for name in names] == before
    assert trainer.control.should_training_stop == stops
    assert bar.training_bar == "of the training that goes on"
    assert [
        trainer.state.log_history,
        trainer.own_figures,
        vars(keeping),
    ] == contents
    assert trainer.accelerator._optimizers == prepared


def test_a_second_training_ends_with_the_best_of_its_own_adapter(
    tmp_path,
):
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
    }
    trainer = trainer_of(tmp_path, eval_data=Texts(9), **settings)
    trainer.train()
    la = Laplace(
        trainer.model,
        subset_of_weights="lora",
        hessian_structure="lowrank_kron",
    )
    la.fit(loader_of(trainer, trainer.train_dataset))
    (other,) = la.optimize_prior_precision(method="second_training", trainer=trainer).posteriors
    assert not torch.equal(other.mean, la.mean)
    with pytest.raises(
        ValueError,
        match=r"'second_training_0' already: remove it",
    ):
        la.optimize_prior_precision(method="second_training", trainer=trainer)
    trainer.model.delete_adapter("second_training_0")
    (again,) = la.optimize_prior_precision(method="second_training", trainer=trainer).posteriors
    assert torch.equal(again.mean, other.mean)  # whatever was drawn since
    with pytest.raises(ValueError, match="this one has another"):
        fitted().optimize_prior_precision(method="second_training", trainer=trainer)
    assert trainer.model.active_adapter == "default"


def text(start, n):
    return " ".join(f"w{3 + (7 * start + i) % 50}" for i in range(n))


SENTENCES = {
    "SFT": lambda i: {
        "prompt": text(i, 3),
        "completion": " " + text(i + 9, 1 + i % 3),
    },
    "Reward": lambda i: {
        "chosen": text(i, 3 + i % 2),
        "rejected": text(i + 9, 4),
    },
}


@pytest.mark.parametrize("kind", SENTENCES)
def test_trainers_of_trl_train_in_stages(tmp_path, kind, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    trl = pytest.importorskip("trl")
    names = [
        "<pad>",
        "?",
        "</s>",
        *(f"w{i}" for i in range(3, VOCABULARY)),
    ]
    made = Tokenizer(
        models.WordLevel(
            {name: i for i, name in enumerate(names)},
            unk_token="?",
        )
    )
    made.pre_tokenizer = WhitespaceSplit()
    words = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")
    settings = {
        "max_steps": 5,
        "per_device_train_batch_size": 4,
        "report_to": [],
        "bf16": False,
    }
    settings |= {
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    base, task = llama(), "CAUSAL_LM"
    if kind == "Reward":
        base.config.num_labels = 1
        base, task = (
            LlamaForSequenceClassification(base.config),
            "SEQ_CLS",
        )
    lora = LoraConfig(task_type=task, r=2, target_modules=["q_proj", "v_proj"])
    trainer = getattr(trl, f"{kind}Trainer")(
        get_peft_model(base, lora),
        getattr(trl, f"{kind}Config")(str(tmp_path), **settings),
        train_dataset=Dataset.from_list([SENTENCES[kind](i) for i in range(12)]),
        eval_dataset=Dataset.from_list([SENTENCES[kind](i) for i in range(4)]),
        processing_class=words,
    )
    la, figures = (
        train_in_stages(trainer),
        trainer.state.log_history[-1],
    )
    batch, _ = loader_of(trainer, trainer.train_dataset)
    assert la.n_data == 12
    assert la.prior_precision.item() == figures["laplace_prior_precision"]
    assert figures["eval_laplace_nll"] > 0
    if kind == "Reward":
        assert la(la.model.split(batch)[0], fitting=True).shape == (8, 2)
    else:  # completions alone, with their ends
        assert la.score(batch).labelled.sum(-1).tolist() == [2 + i % 3 for i in range(8)]

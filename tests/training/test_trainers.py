"""The user's own trainer trains again, and is as before."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    ProgressCallback,
    default_data_collator,
)

from laplace_lora_ext import Laplace, train_in_stages
from laplace_lora_ext.training.trainers import loader_of, restored, train
from tests.support.models import VOCABULARY, llama
from tests.support.ranks import Texts
from tests.support.trainers import N, Watch, trainer_of


def rows(n=N):
    texts = [{name: value.tolist() for name, value in text.items()} for text in Texts(n)]
    return Dataset.from_list([text | {"origin": "a book"} for text in texts])


@pytest.mark.parametrize("data", [Texts(N), rows()], ids=["torch", "datasets"])
def test_batches_are_those_of_training_once_and_in_order(tmp_path, data):
    trainer = trainer_of(tmp_path, data=data)
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
    loader = loader_of(trainer, data)
    assert (random.getstate(), np.random.get_state()[2]) == state[1:]
    assert torch.equal(torch.get_rng_state(), state[0])
    found = list(loader)
    assert [len(batch["labels"]) for batch in found] == [5, 5, 5, 5]
    expected = default_data_collator([Texts(N)[place] for place in range(N)])
    assert found[0].keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.cat([batch[name] for batch in found]), value)


def test_afterwards_a_trainer_and_its_callbacks_are_as_before(tmp_path):
    trainer = trainer_of(tmp_path, callbacks := Watch(), max_steps=2, disable_tqdm=False)
    trainer.train()
    (bar,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, ProgressCallback))
    bar.training_bar = "of the training that goes on"
    names = "args", "state", "optimizer", "lr_scheduler", "train_dataset", "model_wrapped"
    before, step = [getattr(trainer, name) for name in names], trainer.state.global_step
    stops, random_state = trainer.control.should_training_stop, torch.get_rng_state()
    with restored(trainer):
        trainer.control.should_training_stop = not stops
        train(trainer, Texts(8), 2.0, Path(tmp_path, "again"))
    assert len(callbacks.steps[-1]) == 4
    assert (tmp_path / "again" / "checkpoint-4").exists()
    assert [getattr(trainer, name) for name in names] == before
    assert trainer.state.global_step == step == 2
    assert trainer.control.should_training_stop == stops
    assert bar.training_bar == "of the training that goes on"
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_second_training_ends_with_the_best_of_its_own_adapter(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    trainer = trainer_of(tmp_path, eval_data=Texts(9), **settings)
    trainer.train()
    la = Laplace(trainer.model, subset_of_weights="lora", hessian_structure="lowrank_kron")
    la.fit(loader_of(trainer, trainer.train_dataset))
    (other,) = la.optimize_prior_precision(method="second_training", trainer=trainer).posteriors
    assert not torch.equal(other.mean, la.mean)
    log = trainer.evaluate()["eval_loss"]
    trainer.model.set_adapter("second_training_0")
    assert trainer.evaluate()["eval_loss"] != log
    with pytest.raises(ValueError, match=r"'second_training_0' already: remove it"):
        la.optimize_prior_precision(method="second_training", trainer=trainer)
    assert trainer.model.active_adapter == "second_training_0"


# --- TRL -----------------------------------------------------------------------------------------


def tokenizer():
    words = {"<pad>": 0, "</s>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


def text(start, n):
    return " ".join(f"w{3 + (7 * start + i) % 50}" for i in range(n))


def with_adapter(model, task):
    config = LoraConfig(task_type=task, r=2, target_modules=["q_proj", "v_proj"])
    return get_peft_model(model, config)


@pytest.fixture
def trl(monkeypatch):
    for name in ("HF_HUB_DISABLE_TELEMETRY", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    return pytest.importorskip("trl")


COMMON = {"max_steps": 5, "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True}
COMMON |= {"disable_tqdm": True, "bf16": False, "learning_rate": 1e-2, "save_strategy": "no"}


def test_supervised_fine_tuning_in_stages_learns_completions_alone(tmp_path, trl):
    data = [{"prompt": text(i, 3), "completion": " " + text(i + 9, 1 + i % 3)} for i in range(12)]
    data = Dataset.from_list(data)
    trainer = trl.SFTTrainer(
        with_adapter(llama(), "CAUSAL_LM"),
        trl.SFTConfig(str(tmp_path), **COMMON),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        processing_class=tokenizer(),
    )
    la = train_in_stages(trainer)
    assert (la.likelihood, la.n_data) == ("language_modeling", 12)
    scored = la.score(next(iter(loader_of(trainer, trainer.train_dataset))))
    assert scored.labelled.sum(-1).tolist() == [2 + i % 3 for i in range(8)]  # and the end
    figures = trainer.state.log_history[-1]
    assert la.prior_precision.item() == figures["laplace_prior_precision"]
    assert figures["eval_laplace_nll"] > 0


def test_a_reward_model_in_stages_learns_preferences(tmp_path, trl):
    data = [{"chosen": text(i, 3 + i % 2), "rejected": text(i + 9, 4)} for i in range(12)]
    config = llama().config
    config.num_labels = 1
    trainer = trl.RewardTrainer(
        with_adapter(LlamaForSequenceClassification(config), "SEQ_CLS"),
        trl.RewardConfig(str(tmp_path), **COMMON),
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(),
    )
    la = train_in_stages(trainer)
    assert (la.likelihood, la.n_data) == ("reward_modeling", 12)
    (batch, _) = loader_of(trainer, trainer.train_dataset)
    pairs, _ = la.model.split(batch)
    assert la(pairs, fitting=True).shape == (8, 2)

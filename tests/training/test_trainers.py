"""The user's own trainer trains again, and is as before."""

import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import LlamaForSequenceClassification, ProgressCallback, set_seed

from laplace_lora_ext import Laplace, train_in_stages
from laplace_lora_ext.models.lora_layers import is_untrained
from laplace_lora_ext.training.trainers import (
    Examples,
    loader_of,
    train_with,
    without_trace,
)
from tests.support.models import VOCABULARY, built, llama
from tests.support.posteriors import fitted
from tests.support.ranks import Texts
from tests.support.saved_adapters import tokenizer
from tests.support.trainers import N, Watch, trainer_of

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


# What a training sets of a trainer.
KEPT = ("args", "state", "optimizer", "lr_scheduler", "train_dataset", "model_wrapped")


def test_afterwards_a_trainer_and_its_callbacks_are_as_before(tmp_path):
    # With its bar, which keeps what it shows.
    trainer = trainer_of(tmp_path, max_steps=2, disable_tqdm=False)
    trainer.train()
    callbacks = trainer.callback_handler.callbacks
    (bar,) = [each for each in callbacks if isinstance(each, ProgressCallback)]
    bar.training_bar = "of the training that goes on"
    trainer.model_wrapped = "around weights that were trained before"
    trainer.args.push_to_hub = True  # which would fail here
    before = [getattr(trainer, name) for name in KEPT]
    log = list(trainer.state.log_history)
    random.seed(0)
    np.random.seed(0)
    with without_trace(trainer):
        train_with(trainer, Texts(8), 2.0, Path(tmp_path, "again"))
        # As a collator may.
        drawn = random.random(), np.random.rand()
    assert (random.random(), np.random.rand()) == drawn
    assert (tmp_path / "again" / "checkpoint-4").exists()
    assert [getattr(trainer, name) for name in KEPT] == before
    assert trainer.state.log_history == log
    assert bar.training_bar == "of the training that goes on"


def test_an_optimizer_that_was_given_cannot_be_made_again(tmp_path):
    trainer = trainer_of(tmp_path)
    weights = [each for each in trainer.model.parameters() if each.requires_grad]
    trainer.optimizer = torch.optim.AdamW(weights, lr=0.1)
    trainer.train()
    with pytest.raises(ValueError, match="given an optimizer"):
        Examples.of_trainer(trainer)


def test_a_second_training_has_an_adapter_of_its_own(tmp_path, monkeypatch):
    seeding = Mock(wraps=set_seed)
    monkeypatch.setattr("laplace_lora_ext.tuning.second_training.set_seed", seeding)
    watch = Watch()
    trainer = trainer_of(tmp_path, watch, max_steps=10)
    trainer.train()
    la = Laplace(trainer.model)
    la.fit(loader_of(trainer, trainer.train_dataset))
    # It trains as the fitted one, whichever is active.
    trainer.model.add_adapter("other", LoraConfig(r=2, target_modules=["key"]))
    trainer.model.set_adapter("other")

    def second_posterior(la: Any) -> Any:
        history = la.optimize_prior_precision(method="second_training", trainer=trainer)
        (posterior,) = history.posteriors
        return posterior

    other = second_posterior(la)
    assert len(watch.steps[1]) == 8
    # It has learnt something else, from other first weights.
    seeding.assert_called_once_with(trainer.args.seed + 1)
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
    assert trainer.model.active_adapter == "other"


# --- TRL's trainers -------------------------------------------------------------------


TOKENS = ["[PAD]", "[UNK]", "</s>", *(f"w{i}" for i in range(3, VOCABULARY))]


def words(number: int, n_words: int) -> str:
    """Make a text of words of the tokenizer, another one for each number."""
    places = range(7 * number, 7 * number + n_words)
    return " ".join(f"w{3 + place % 50}" for place in places)


def example(kind: str, i: int) -> dict[str, str]:
    """Make a completion of up to three words for "SFT", or a preference."""
    if kind == "SFT":
        return {"prompt": words(i, 3), "completion": " " + words(i + 9, 1 + i % 3)}
    return {"chosen": words(i, 3 + i % 2), "rejected": words(i + 9, 4)}


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
    config = getattr(trl, f"{kind}Config")(
        str(folder),
        max_steps=5,
        per_device_train_batch_size=4,
        report_to=[],
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    examples = Dataset.from_list([example(kind, i) for i in range(12)])
    return getattr(trl, f"{kind}Trainer")(
        get_peft_model(base, lora),
        config,
        train_dataset=examples,
        eval_dataset=examples,
        processing_class=tokenizer(TOKENS, eos_token="</s>"),
    )


def test_a_decoder_that_classifies_pads_as_its_tokenizer(tmp_path):
    base = built("LlamaForSequenceClassification", pad_token_id=None)
    lora = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"])
    trainer = trainer_of(tmp_path, model=get_peft_model(base, lora))
    trainer.processing_class = tokenizer(TOKENS)
    assert train_in_stages(trainer).n_data == N


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

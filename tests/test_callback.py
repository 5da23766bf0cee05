"""A posterior while a trainer trains, which goes on as without it."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import laplace_lora_ext
from laplace_lora_ext import LaplaceCallback
from laplace_lora_ext.language_model import LanguageModelLaplace
from laplace_lora_ext.metrics import quality
from laplace_lora_ext.saving import FILE
from tests.support.models import lora_model, ragged_batches
from tests.support.texts import text_batches


class Texts(Dataset):
    """Sixteen texts, whose order and batches draw random numbers of every kind."""

    def __init__(self, seed: int = 1) -> None:
        (self.batch,) = ragged_batches(lengths=(7, 4, 5, 6) * 4, batch_size=16, seed=seed)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: value[index] for key, value in self.batch.items()}


def collate(examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    random.random(), np.random.rand(), torch.rand(1)
    return {key: torch.stack([example[key] for example in examples]) for key in examples[0]}


def train(
    folder,
    *callbacks,
    resume=None,
    max_steps=6,
    model=None,
    data=None,
    **settings,
):
    """A trained model, and its trainer."""
    model = model or lora_model("bert", torch.float32)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=5,
        max_steps=max_steps,
        save_steps=3,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        **settings,
    )
    trainer = Trainer(
        model, arguments, collate, data or Texts(), Texts(2), callbacks=list(callbacks)
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The posterior is over")
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


class Watch(TrainerCallback):
    """Remembers gradients and modes at each step after a checkpoint."""

    def __init__(self) -> None:
        self.seen: list = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        states = random.getstate(), np.random.get_state()[2], torch.get_rng_state().sum()
        self.seen.append((model.training, *states))


def test_training_is_the_same_to_the_bit(tmp_path):
    with_it, without_it = Watch(), Watch()
    callback = LaplaceCallback(every_checkpoint=True)
    fitted = weights(train(tmp_path / "with", callback, with_it))
    expected = weights(train(tmp_path / "without", without_it))
    assert callback.la is not None
    assert with_it.seen == without_it.seen
    assert all(torch.equal(fitted[name], expected[name]) for name in expected)


def test_posteriors_are_saved_beside_the_adapter_and_figures_are_logged(tmp_path):
    callback = LaplaceCallback(every_checkpoint=True, backend_kwargs={"rank": 3})
    trainer = train(tmp_path, callback, eval_strategy="steps", eval_steps=2)
    model, texts = trainer.model, Texts(2).batch
    read = laplace_lora_ext.from_pretrained(model, tmp_path)
    found = read(texts, link_approx="mean_field")
    torch.testing.assert_close(found, callback.la(texts, link_approx="mean_field"))
    (first, _, last) = [e for e in trainer.state.log_history if "laplace_evidence" in e]
    assert (first["step"], last["step"]) == (3, 6)
    assert last["laplace_evidence"] == callback.la.log_marginal_likelihood().item()
    assert last["laplace_prior_precision"] == callback.la.prior_precision.item()
    measured = quality(found, texts["labels"])
    assert last["eval_laplace_nll"] == pytest.approx(measured["nll"], abs=1e-5)
    assert last["eval_laplace_ece"] == pytest.approx(measured["ece"], abs=1e-5)
    for step in (3, 6):
        folder = tmp_path / f"checkpoint-{step}"
        assert (folder / "adapter_config.json").exists()
        with safetensors.safe_open(folder / FILE, "pt") as file:
            assert file.metadata()["n_data"] == "16"


def test_training_resumes_from_a_checkpoint_with_a_posterior(tmp_path):
    whole = train(tmp_path / "whole", LaplaceCallback(every_checkpoint=True))
    resume = str(tmp_path / "whole" / "checkpoint-3")
    resumed = train(tmp_path / "resumed", LaplaceCallback(), resume=resume)
    assert all(torch.equal(weights(resumed)[name], value) for name, value in weights(whole).items())
    laplace_lora_ext.from_pretrained(resumed.model, tmp_path / "resumed")


def test_a_method_that_it_can_not_feed_is_refused():
    again = {"method": "second_training"}
    for options in ({"method": "best"}, again, again | {"trainer": 1, "every_checkpoint": True}):
        with pytest.raises(ValueError, match=r"none of|pass trainer=trainer and no"):
            LaplaceCallback(**options)


def test_a_second_training_leaves_the_trainer_and_its_weights_as_they_were(tmp_path):
    def trainer_with(folder, add) -> Trainer:
        arguments = TrainingArguments(
            str(folder), max_steps=4, report_to=[], use_cpu=True, disable_tqdm=True
        )
        trainer = Trainer(lora_model("bert", torch.float32), arguments, collate, Texts())
        add(trainer)
        trainer.train()
        return trainer

    def add(trainer) -> None:
        trainer.add_callback(LaplaceCallback(method="second_training", trainer=trainer))

    alone = trainer_with(tmp_path / "alone", lambda _: None)
    trainer = trainer_with(tmp_path / "again", add)
    assert trainer.state.global_step == alone.state.global_step
    found = weights(trainer)
    assert all(torch.equal(found[name], value) for name, value in weights(alone).items())
    (callback,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, LaplaceCallback))
    (other,) = callback.history.posteriors
    assert other.n_data == 13
    assert trainer.model.active_adapter == "default"
    mixture = laplace_lora_ext.LaplaceMixture([callback.la, other])
    texts = Texts(2).batch
    torch.testing.assert_close(mixture(texts), (callback.la(texts) + other(texts)) / 2)


class Steps(TrainerCallback):
    """Counts the steps that were begun."""

    n = 0

    def on_step_begin(self, args, state, control, **kwargs):
        self.n += 1


def multi_label():
    model = lora_model("bert", torch.float32)
    model.config.problem_type = "multi_label_classification"
    return model


@pytest.mark.parametrize(
    ("callback", "model", "message"),
    [
        ({"method": "gridsearch"}, None, "gridsearch.* needs validation data: give the trainer"),
        ({}, multi_label, "No likelihood fits problem_type 'multi_label_classification'"),
        ({"backend_kwargs": {"rank": -1}}, None, "rank must not be negative"),
    ],
    ids=["no validation data", "several labels", "rank"],
)
def test_what_cannot_be_fitted_is_refused_before_training(tmp_path, callback, model, message):
    steps = Steps()
    with pytest.raises(ValueError, match=message):
        train(tmp_path, LaplaceCallback(**callback), steps, model=model and model())
    assert not steps.n


def test_a_regression_has_the_evidence_by_default(tmp_path):
    """Where "agreement" would compare classes."""
    data: Any = [text | {"labels": text["labels"].float()} for text in Texts()]
    callbacks = LaplaceCallback(), LaplaceCallback(method="marglik")
    for callback in callbacks:
        model = lora_model("bert", torch.float32, n_labels=1)
        train(tmp_path, callback, model=model, data=data, max_steps=1)
    la, expected = (callback.la for callback in callbacks)
    assert la.likelihood == "regression"
    assert torch.equal(la.prior_precision, expected.prior_precision)


def test_a_language_model_is_evaluated_by_its_tokens(tmp_path):
    model = lora_model("gpt2", torch.float32)
    (train_texts,), (test_texts,) = (text_batches(batch_size=6, seed=seed) for seed in (1, 2))
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        eval_strategy="epoch",
    )
    callback = LaplaceCallback("language_modeling", method="marglik")
    data = ([{k: v[i] for k, v in b.items()} for i in range(6)] for b in (train_texts, test_texts))
    trainer = Trainer(model, arguments, collate, *data, callbacks=[callback])
    trainer.train()
    assert type(callback.la) is LanguageModelLaplace
    (entry,) = (one for one in trainer.state.log_history if "eval_laplace_nll" in one)
    assert 0 < entry["eval_laplace_nll"] < 100
    again = laplace_lora_ext.from_pretrained(trainer.model, tmp_path)
    assert torch.equal(again.prior_precision, callback.la.prior_precision)

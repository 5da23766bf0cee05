"""A posterior at the end of a trainer's run, which is as without it."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback

import laplace_lora_ext
from laplace_lora_ext import LaplaceCallback
from laplace_lora_ext.lowrank_kron import LowRankKronLoRALaplace
from laplace_lora_ext.metrics import quality
from tests.support.models import lora_model
from tests.support.ranks import Texts
from tests.support.texts import text_batches
from tests.support.trainers import N, Watch, trainer_of, values

(BATCH,) = DataLoader(Texts(9), batch_size=9)


def drawing(
    examples: list[dict[str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """A collator that draws random numbers of every kind."""
    random.random(), np.random.rand(), torch.rand(1)
    return {key: torch.stack([example[key] for example in examples]) for key in examples[0]}


class States(TrainerCallback):
    """Remembers the model's mode and random states at each step and after the last."""

    def __init__(self) -> None:
        self.seen: list = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        states = (
            random.getstate(),
            np.random.get_state()[2],
            torch.get_rng_state().sum(),
        )
        self.seen.append((model.training, *states))

    on_train_end = on_step_begin


def test_training_is_the_same_to_the_bit(tmp_path):
    found = []
    for callbacks in ([LaplaceCallback(method="agreement")], []):
        trainer = trainer_of(
            tmp_path,
            *callbacks,
            states := States(),
            eval_data=Texts(9),
        )
        trainer.data_collator = drawing
        trainer.train()
        found.append((states.seen, values(trainer.model)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], value) for name, value in found[1][1].items())


def test_the_posterior_is_saved_beside_the_adapter_and_figures_are_logged(
    tmp_path,
):
    callback = LaplaceCallback(backend_kwargs={"rank": 3})
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_data": Texts(9),
    }
    trainer = trainer_of(tmp_path, callback, **settings)
    trainer.train()
    read = laplace_lora_ext.from_pretrained(trainer.model, tmp_path)
    found = read(BATCH, link_approx="mean_field")
    torch.testing.assert_close(found, callback.la(BATCH, link_approx="mean_field"))
    (entry,) = [e for e in trainer.state.log_history if "laplace_evidence" in e]
    assert entry["step"] == 5
    assert entry["laplace_evidence"] == callback.la.log_marginal_likelihood().item()
    assert entry["laplace_prior_precision"] == callback.la.prior_precision.item()
    measured = quality(found, BATCH["labels"])
    assert entry["eval_laplace_nll"] == pytest.approx(measured["nll"], abs=1e-5)
    assert entry["eval_laplace_ece"] == pytest.approx(measured["ece"], abs=1e-5)


def test_a_second_training_leaves_the_trainer_and_its_weights_as_they_were(
    tmp_path,
):
    alone = trainer_of(tmp_path / "alone")
    alone.train()
    trainer = trainer_of(tmp_path / "again")
    callback = LaplaceCallback(method="second_training", trainer=trainer)
    trainer.add_callback(callback)
    trainer.train()
    assert trainer.state.global_step == alone.state.global_step
    found = values(trainer.model)
    assert all(torch.equal(found[name], value) for name, value in values(alone.model).items())
    (other,) = callback.history.posteriors
    assert other.n_data == 0.8 * N
    assert trainer.model.active_adapter == "default"
    mixture = laplace_lora_ext.LaplaceMixture([callback.la, other])
    torch.testing.assert_close(mixture(BATCH), (callback.la(BATCH) + other(BATCH)) / 2)


def multi_label():
    model = lora_model("bert", torch.float32)
    model.config.problem_type = "multi_label_classification"
    return model


@pytest.mark.parametrize(
    ("callback", "model", "message"),
    [
        ({"method": "best"}, None, "none of"),
        (
            {"method": "second_training"},
            None,
            "pass trainer=trainer",
        ),
        (
            {"method": "gridsearch"},
            None,
            "gridsearch.* needs validation data: give the trainer",
        ),
        (
            {},
            multi_label,
            "No likelihood fits problem_type 'multi_label_classification'",
        ),
        (
            {"backend_kwargs": {"rank": -1}},
            None,
            "rank must not be negative",
        ),
    ],
)
def test_what_cannot_be_fitted_is_refused_before_training(tmp_path, callback, model, message):
    watch = Watch()
    with pytest.raises(ValueError, match=message):
        trainer_of(
            tmp_path,
            LaplaceCallback(**callback),
            watch,
            model=model and model(),
        ).train()
    assert not any(watch.steps)


def test_a_regression_has_the_evidence_by_default(tmp_path):
    """Where "agreement" would compare classes."""
    data: Any = [text | {"labels": text["labels"].float()} for text in Texts(N)]
    callbacks = (
        LaplaceCallback(),
        LaplaceCallback(method="marglik"),
    )
    for callback in callbacks:
        model = lora_model("bert", torch.float32, n_labels=1)
        trainer_of(
            tmp_path,
            callback,
            model=model,
            data=data,
            max_steps=1,
        ).train()
    la, expected = (callback.la for callback in callbacks)
    assert la.likelihood == "regression"
    assert torch.equal(la.prior_precision, expected.prior_precision)


def test_a_language_model_is_evaluated_by_its_tokens(tmp_path):
    data, eval_data = (
        [{k: v[i] for k, v in batch.items()} for i in range(6)]
        for seed in (1, 2)
        for batch in text_batches(batch_size=6, seed=seed)
    )
    callback = LaplaceCallback("language_modeling", method="marglik")
    settings = {
        "max_steps": 2,
        "eval_strategy": "epoch",
        "eval_data": eval_data,
    }
    model = lora_model("gpt2", torch.float32)
    trainer = trainer_of(tmp_path, callback, model=model, data=data, **settings)
    trainer.train()
    assert type(callback.la) is LowRankKronLoRALaplace
    (entry,) = (one for one in trainer.state.log_history if "eval_laplace_nll" in one)
    assert 0 < entry["eval_laplace_nll"] < 100
    again = laplace_lora_ext.from_pretrained(trainer.model, tmp_path)
    assert torch.equal(again.prior_precision, callback.la.prior_precision)

"""A posterior at the end of a trainer's run, which is as without it."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, default_collate
from transformers import Trainer, TrainerCallback

import laplace_lora_ext
from laplace_lora_ext import LaplaceCallback
from laplace_lora_ext.metrics import quality
from laplace_lora_ext.structures import LowRankKronLoRALaplace
from tests.support.models import (
    Batch,
    lora_model,
    one_by_one,
)
from tests.support.ranks import Texts
from tests.support.texts import text_batches
from tests.support.trainers import (
    N,
    Watch,
    trainer_of,
    values,
)
from tests.training.support import entry_with

# Of these an evaluation makes two batches, and here they are one.
N_EVALUATED = 9
(BATCH,) = DataLoader(Texts(N_EVALUATED), batch_size=N_EVALUATED)


def assert_same_weights(found: nn.Module, expected: nn.Module) -> None:
    weights = values(found)
    for name, value in values(expected).items():
        assert torch.equal(weights[name], value), name


def drawing(examples: list[Batch]) -> Batch:
    """Collate, and draw random numbers of every kind."""
    random.random()
    np.random.rand()
    torch.rand(1)
    return default_collate(examples)


class States(TrainerCallback):
    """Remembers the model's mode and random states at each step and after the last."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_step_begin(
        self,
        args,
        state,
        control,
        model=None,
        **kwargs,
    ):
        self._remember(model)

    def on_train_end(
        self,
        args,
        state,
        control,
        model=None,
        **kwargs,
    ):
        # Where a callback might have changed something.
        self._remember(model)

    def _remember(self, model: nn.Module) -> None:
        # How far its stream has been read.
        _, _, position, *_ = np.random.get_state()
        of_torch = torch.get_rng_state()
        now = {
            "training": model.training,
            "random": random.getstate(),
            "numpy": position,
            "torch": of_torch.sum(),
        }
        self.seen.append(now)


def test_training_is_the_same_to_the_bit(tmp_path):
    def train(*callbacks: TrainerCallback):
        states = States()
        trainer = trainer_of(
            tmp_path,
            *callbacks,
            states,
            eval_data=Texts(N_EVALUATED),
        )
        trainer.data_collator = drawing
        trainer.train()
        return states.seen, trainer.model

    callback = LaplaceCallback(method="agreement")
    states, model = train(callback)
    states_without, model_without = train()
    assert states == states_without
    assert_same_weights(model, model_without)


def test_the_posterior_is_saved_beside_the_adapter_and_figures_are_logged(tmp_path):
    callback = LaplaceCallback(backend_kwargs={"rank": 3})
    trainer = trainer_of(
        tmp_path,
        callback,
        eval_strategy="steps",
        eval_steps=2,
        eval_data=Texts(N_EVALUATED),
    )
    trainer.train()
    la = callback.la
    read = laplace_lora_ext.from_pretrained(trainer.model, tmp_path)
    found = read(BATCH, link_approx="mean_field")
    expected = la(BATCH, link_approx="mean_field")
    assert_close(found, expected)

    entry = entry_with("laplace_evidence", trainer)
    # After the last step.
    assert entry["step"] == 5
    evidence = la.log_marginal_likelihood()
    assert entry["laplace_evidence"] == evidence.item()
    assert entry["laplace_prior_precision"] == la.prior_precision.item()
    measured = quality(found, BATCH["labels"])
    for figure in ("nll", "ece"):
        logged = entry[f"eval_laplace_{figure}"]
        expected = measured[figure]
        # The evaluation has batches of five texts, whose padding rounds in another way.
        assert logged == pytest.approx(expected, abs=1e-5)


def test_a_second_training_leaves_the_trainer_and_its_weights_as_they_were(tmp_path):
    alone = trainer_of(tmp_path / "alone")
    alone.train()
    trainer = trainer_of(tmp_path / "again")
    train_twice(trainer)
    assert trainer.state.global_step == alone.state.global_step
    assert_same_weights(trainer.model, alone.model)
    assert trainer.model.active_adapter == "default"


def train_twice(trainer: Trainer) -> LaplaceCallback:
    """Train with a callback that makes a second training, too."""
    callback = LaplaceCallback(method="second_training", trainer=trainer)
    trainer.add_callback(callback)
    trainer.train()
    return callback


def test_the_posterior_of_a_second_training_can_be_mixed_with_the_first(tmp_path):
    trainer = trainer_of(tmp_path)
    callback = train_twice(trainer)
    la = callback.la
    (other,) = callback.history.posteriors
    # A fifth is held out.
    assert other.n_data == 0.8 * N
    mixture = laplace_lora_ext.LaplaceMixture([la, other])
    found = mixture(BATCH)
    total = la(BATCH) + other(BATCH)
    assert_close(found, total / 2)


def of_another_kind():
    model = lora_model("bert", torch.float32)
    model.config.problem_type = "ranking"
    return model


def single_label():
    return lora_model("bert", torch.float32)


@dataclass(frozen=True)
class Refused:
    """A callback of which training begins no step, and what is said."""

    message: str
    options: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = single_label


REFUSED = [
    Refused(
        "none of",
        options={"method": "best"},
    ),
    Refused(
        "pass trainer=trainer",
        options={"method": "second_training"},
    ),
    Refused(
        "gridsearch.* needs validation data: give the trainer",
        options={"method": "gridsearch"},
    ),
    Refused(
        "No likelihood fits problem_type 'ranking'",
        model=of_another_kind,
    ),
    Refused(
        "rank must not be negative",
        options={"backend_kwargs": {"rank": -1}},
    ),
]
MESSAGES = [case.message for case in REFUSED]


@pytest.mark.parametrize("case", REFUSED, ids=MESSAGES)
def test_what_cannot_be_fitted_is_refused_before_training(tmp_path, case):
    watch = Watch()

    # Some are refused as the callback is made, and others as training begins.
    def train() -> None:
        callback = LaplaceCallback(**case.options)
        model = case.model()
        trainer = trainer_of(tmp_path, callback, watch, model=model)
        trainer.train()

    with pytest.raises(ValueError, match=case.message):
        train()
    assert not any(watch.steps)


def test_a_regression_has_the_noise_of_its_residuals_by_default(tmp_path):
    data = []
    for text in Texts(N):
        number = text["labels"].float()
        data.append(text | {"labels": number})

    def posterior_of(callback: LaplaceCallback):
        model = lora_model(
            "bert",
            torch.float32,
            n_labels=1,
        )
        trainer = trainer_of(
            tmp_path,
            callback,
            model=model,
            data=data,
            max_steps=1,
        )
        trainer.train()
        return callback.la

    by_default = LaplaceCallback()
    la = posterior_of(by_default)
    assert la.likelihood == "regression"
    by_agreement = LaplaceCallback(method="agreement")
    expected = posterior_of(by_agreement)
    assert torch.equal(la.prior_precision, expected.prior_precision)
    assert torch.equal(la.sigma_noise, expected.sigma_noise)
    # It is 1 where nothing chooses it.
    assert la.sigma_noise != 1


def six_texts(seed: int) -> list[Batch]:
    """Make texts with labels on their tokens."""
    return one_by_one(text_batches(seed=seed))


def test_a_language_model_is_evaluated_by_its_tokens(tmp_path):
    callback = LaplaceCallback("language_modeling", method="marglik")
    trainer = trainer_of(
        tmp_path,
        callback,
        model=lora_model("gpt2", torch.float32),
        data=six_texts(seed=1),
        eval_data=six_texts(seed=2),
        max_steps=2,
        eval_strategy="epoch",
    )
    trainer.train()
    assert type(callback.la) is LowRankKronLoRALaplace
    entry = entry_with("eval_laplace_nll", trainer)
    nll = entry["eval_laplace_nll"]
    assert 0 < nll < 100
    again = laplace_lora_ext.from_pretrained(trainer.model, tmp_path)
    found = again.prior_precision
    expected = callback.la.prior_precision
    assert torch.equal(found, expected)

"""A student: an ordinary adapter that has learnt a posterior's probabilities."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.nn.functional import kl_div
from torch.testing import assert_close
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.training.students import _collate, _head, _taught, _text
from tests.support.choices import prompts_of
from tests.support.models import (
    CLASS_TOKEN_IDS,
    Batch,
    base_model,
    built,
    first_batch,
    head_of,
    lora_model,
    one_by_one,
    ragged_batches,
    without_labels,
)
from tests.support.posteriors import (
    another_training,
    generator,
    make,
    normal,
    plain_regression,
)
from tests.support.snapshots import Snapshot
from tests.support.tasks import TASKS
from tests.support.trainers import Stop, Watch, trainer_of

N_TEXTS = 16

# --- texts ----------------------------------------------------------------------------


def texts(seed: int = 1) -> Batch:
    """Make a batch of sixteen padded texts."""
    (batch,) = ragged_batches(lengths=(7, 4, 5, 6) * 4, batch_size=N_TEXTS, seed=seed)
    return batch


# --- teachers and students ------------------------------------------------------------


def trainer_around(
    model: PeftModel, folder: Path, *callbacks: TrainerCallback
) -> Trainer:
    """Make a trainer of the sixteen texts."""
    return trainer_of(
        folder,
        *callbacks,
        model=model,
        data=one_by_one([texts()]),
        max_steps=400,  # of the training; a student's are 30 % of them
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        per_device_train_batch_size=8,
        save_strategy="no",
        logging_strategy="no",
    )


def taught(
    folder: Path, *callbacks: TrainerCallback, **keywords: Any
) -> tuple[Any, Trainer]:
    """Fit a broad posterior around a model that is sure of itself; make its trainer.

    So the posterior's probabilities are far from the model's.
    """
    model = lora_model("bert", torch.float32)
    head_of(model).weight.data *= 8
    la = make(model, **keywords)
    la.fit([texts()])
    la.prior_precision = 1e-4
    return la, trainer_around(model, folder, *callbacks)


def weights_of(model: PeftModel, adapter: str) -> dict[str, Tensor]:
    """Copy an adapter's weights, by their names without the adapter's."""
    part = f".{adapter}."
    return {
        name.replace(part, "."): weight.detach().clone()
        for name, weight in model.named_parameters()
        if part in name
    }


def assert_same(model: PeftModel, before: Snapshot) -> None:
    """Compare all but the attributes that any training leaves on modules."""
    now = Snapshot(model)
    before.settings["attributes"] = now.settings["attributes"]
    before.assert_equal(model)


def log_probs(model: PeftModel, batch: Batch) -> Tensor:
    """Compute the logarithms of a model's own probabilities."""
    model.eval()
    with torch.no_grad():
        output = model(**without_labels(batch))
    return output.logits.log_softmax(-1)


def divergence(targets: Tensor, log_p: Tensor) -> float:
    """Average the Kullback-Leibler divergence from the targets."""
    return kl_div(log_p, targets, reduction="batchmean").item()


# --- what is learnt -------------------------------------------------------------------


def test_its_own_probabilities_are_the_posteriors(tmp_path):
    la, trainer = taught(tmp_path, modules_to_save=True)
    model = trainer.model
    batch = texts()
    targets = la(batch, link_approx="mean_field")
    of_map = divergence(targets, log_probs(model, batch))
    # So far apart that there is something to learn.
    assert of_map > 0.1
    before = Snapshot(model)
    # What the user's trainings ask for has no place in a student's.
    trainer.add_callback(EarlyStoppingCallback())
    trainer.eval_dataset = trainer.train_dataset
    trainer.args.eval_strategy = "steps"
    trainer.args.eval_on_start = True
    trainer.args.load_best_model_at_end = True
    trainer.args.metric_for_best_model = "loss"
    assert la.distill(trainer) == "calibrated"
    # It is one more adapter of a model that stays.
    assert model.active_adapter == "default"
    model.delete_adapter("calibrated")
    assert_same(model, before)
    torch.manual_seed(0)
    base = base_model("bert", n_labels=3, hidden_size=12)
    student = PeftModel.from_pretrained(base, tmp_path / "calibrated")
    assert divergence(targets, log_probs(student, batch)) < 0.2 * of_map


def test_members_tell_together_what_other_tokens_have():
    models = [
        LogitsModel(model.eval(), CLASS_TOKEN_IDS)
        for model in (lora_model("gpt2"), another_training("gpt2"))
    ]
    batch = without_labels(first_batch())
    probabilities = normal(3, 3).softmax(-1)
    records = _taught(models, probabilities, batch)
    found = torch.stack([record["teacher_probabilities"] for record in records])
    one, other = (model.log_probs(batch)[:, -1:].exp() for model in models)
    assert_close(found[:, -1:], (one + other) / 2)
    # The answers share the rest.
    assert_close(found[:, :-1], (1 - found[:, -1:]) * probabilities)


# --- what it learns from --------------------------------------------------------------


@pytest.mark.parametrize("is_swapped", [False, True])
def test_it_learns_from_training_texts_and_more(tmp_path, is_swapped):
    watch = Watch()
    la, trainer = taught(tmp_path, watch)
    trainer.args.max_steps = 20
    others = [without_labels(text) for text in one_by_one([texts(seed=2)])]
    draws = generator()
    la.distill(trainer, "swapped" if is_swapped else others, generator=draws)
    (steps,) = watch.steps
    assert len(steps) == 0.3 * 20
    (records,) = watch.data
    found = [record["input_ids"] for record in records]
    own, more = found[:N_TEXTS], found[N_TEXTS:]
    assert [text.tolist() for text in own] == prompts_of(texts())
    if is_swapped:
        # Of each text some tokens are others, if any.
        pairs = zip(more, own, strict=True)
        changed = [(copy != text).double().mean() for copy, text in pairs]
        assert 0 < max(changed) < 0.5
        assert not torch.equal(draws.get_state(), generator().get_state())
    else:
        assert [text.tolist() for text in more] == prompts_of(texts(seed=2))


# --- what it begins with --------------------------------------------------------------


def test_a_head_of_its_own_has_the_best_temperature(tmp_path):
    la, trainer = taught(tmp_path)
    batch = texts()
    targets = la(batch, link_approx="mean_field")
    logits = log_probs(trainer.model, batch)
    best = min(
        torch.logspace(-2, 1, 3001).tolist(),
        key=lambda scale: divergence(targets, (scale * logits).log_softmax(-1)),
    )
    # Far enough from 1 that a head left as it was would show.
    assert best < 0.8
    teacher = weights_of(trainer.model, "default")
    before: dict[str, Tensor] = {}

    class Watching(TrainerCallback):
        # It writes into a dictionary outside, for distill restores its own attributes.
        def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
            before.update(weights_of(model, "student"))

    trainer.add_callback(Watching())
    trainer.args.max_steps = 4
    la.distill(trainer, None, "student")
    after = weights_of(trainer.model, "student")
    for name, weight in before.items():
        # From there on LoRA weights are trained, and the head stays: its weight and its
        # bias; the grid has steps of 0.23 %.
        is_lora = "lora_" in name
        assert torch.equal(weight, after[name]) != is_lora
        expected = teacher[name] * (1 if is_lora else best)
        assert_close(weight, expected, rtol=0 if is_lora else 2e-3, atol=0)


def test_of_a_head_the_last_layer_is_scaled():
    base = built("RobertaForSequenceClassification")
    model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS"))
    assert [len(weight) for weight in _head(model, "default", 3)] == [3, 3]


# --- how it trains --------------------------------------------------------------------


def test_it_learns_without_dropout_of_any_kind(tmp_path):
    # It calls dropout as a function, and has no module for it.
    base = built(
        "OPTForSequenceClassification",
        word_embed_proj_dim=16,
        ffn_dim=24,
        dropout=0.5,
        attention_dropout=0.5,
    )
    lora = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"])
    model = get_peft_model(base, lora)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    la = make(model)
    la.fit([texts()])
    losses = []

    class Losses(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_: Any) -> None:
            if "loss" in logs:
                losses.append(logs["loss"])

    trainer = trainer_around(model, tmp_path, Losses())
    trainer.args.learning_rate = 0.0
    trainer.args.max_steps = 20
    trainer.args.per_device_train_batch_size = N_TEXTS
    trainer.args.logging_strategy = "steps"
    trainer.args.logging_steps = 1
    before = Snapshot(model)
    la.distill(trainer, unlabelled=None)
    assert len(losses) == 0.3 * 20
    # The weights never change.
    assert max(losses) - min(losses) < 1e-5
    model.delete_adapter("calibrated")
    assert Snapshot(model).settings["training"] == before.settings["training"]


def learnt_in_parts(folder: Path, n_parts: int) -> dict[str, Tensor]:
    """Distill in steps that accumulate so many backward passes; take the weights."""
    la, trainer = taught(folder)
    batch_size = N_TEXTS // n_parts
    trainer.args.max_steps = 30
    trainer.args.gradient_accumulation_steps = n_parts
    trainer.args.per_device_train_batch_size = batch_size
    trainer._train_batch_size = batch_size
    # It must play no part in a student's training.
    trainer.compute_loss_func = lambda *args, **kwargs: None
    # Adam and a limit of the norm would divide a wrong factor out.
    trainer.args.optim = "sgd"
    trainer.args.max_grad_norm = 0.0
    trainer.create_accelerator_and_postprocess()
    la.distill(trainer, None)
    return weights_of(trainer.model, "calibrated")


def test_accumulated_steps_are_divided_whatever_loss_the_user_has(tmp_path):
    whole = learnt_in_parts(tmp_path / "1", n_parts=1)
    divided = learnt_in_parts(tmp_path / "2", n_parts=2)
    assert_close(divided, whole)


def test_texts_are_padded_by_the_models_token():
    mask = torch.tensor([[1, 0], [1, 1]])
    # Where each token stands on a page, say, is padded with it.
    columns = {"input_ids": mask, "attention_mask": mask, "bbox": mask[..., None]}
    one, other = (_text(columns, row) for row in range(2))
    assert len(one["bbox"]) == 1
    batch = _collate(5, [one, other])
    assert batch["input_ids"].tolist() == [[1, 5], [1, 1]]
    assert torch.equal(batch["attention_mask"], mask)


# --- what fails -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"adapter_name": "default"}, "an adapter 'default' already"),
        ({"unlabelled": "more"}, "unlabelled .more. is none"),
        ({}, "killed"),
        ({"trainer": None}, "this one has another"),
    ],
)
def test_what_fails_leaves_nothing_behind(tmp_path, keywords, message):
    la, trainer = taught(tmp_path, Stop(2))
    if "trainer" in keywords:
        keywords = {"trainer": taught(tmp_path)[1]}
    model = Snapshot(trainer.model)
    attributes = dict(vars(trainer))
    with pytest.raises((ValueError, KeyboardInterrupt), match=message):
        la.distill(**{"trainer": trainer, **keywords})
    assert_same(trainer.model, model)
    assert list(trainer.model.peft_config) == ["default"]
    assert vars(trainer) == attributes


def test_numbers_and_tokens_have_no_probabilities_to_learn():
    la, _ = plain_regression()
    with pytest.raises(ValueError, match="regression predicts numbers"):
        la.distill(None)
    with pytest.raises(NotImplementedError, match="amortize"):
        TASKS["tokens"].fitted().distill(None)

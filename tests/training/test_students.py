"""A student: an ordinary adapter that has learnt a posterior's probabilities."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close
from transformers import (
    OPTConfig,
    OPTForSequenceClassification,
    Trainer,
    TrainerCallback,
)

from laplace_lora_ext import LaplaceMixture
from tests.support.models import (
    VOCABULARY,
    base_model,
    lora_model,
    ragged_batches,
    without_labels,
)
from tests.support.posteriors import make
from tests.support.snapshots import Snapshot
from tests.support.trainers import Stop, Watch, trainer_of

N_TEXTS = 16
N_STEPS = 400
N_STEPS_OF_A_STUDENT = 120
"""30 % of the training's steps."""

Batch = dict[str, Tensor]
Weights = dict[str, Tensor]


# --- texts ----------------------------------------------------------------------------


def texts(seed: int = 1) -> Batch:
    """Make a batch of sixteen padded texts."""
    (batch,) = ragged_batches(lengths=(7, 4, 5, 6) * 4, batch_size=N_TEXTS, seed=seed)
    return batch


def rows(batch: Batch) -> list[Batch]:
    """Take each text of a batch by itself."""
    of_texts = []
    for row in range(N_TEXTS):
        of_text = {}
        for key, value in batch.items():
            of_text[key] = value[row]
        of_texts.append(of_text)
    return of_texts


def without_padding(batch: Batch) -> list[Tensor]:
    """Take the token ids of each text."""
    tokens = []
    for row in rows(batch):
        is_real = row["attention_mask"].bool()
        tokens.append(row["input_ids"][is_real])
    return tokens


# --- teachers and students ------------------------------------------------------------


def output_layer(model: PeftModel) -> Any:
    """Find the layer that gives a classifier's logits, or a language model's."""
    base = model.base_model.model
    if hasattr(base, "classifier"):
        return base.classifier.modules_to_save["default"]
    return base.lm_head


def trainer_around(
    model: PeftModel, folder: Path, *callbacks: TrainerCallback
) -> Trainer:
    """Make a trainer of the sixteen texts."""
    return trainer_of(
        folder,
        *callbacks,
        model=model,
        data=rows(texts()),
        max_steps=N_STEPS,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        per_device_train_batch_size=8,
        save_strategy="no",
        logging_strategy="no",
    )


def taught(
    folder: Path, *callbacks: TrainerCallback, kind: str = "bert", **keywords: Any
) -> tuple[Any, Trainer]:
    """Fit a broad posterior around a model that is sure of itself; make its trainer.

    So the posterior's probabilities are far from the model's.
    """
    model = lora_model(kind, torch.float32)
    output_layer(model).weight.data *= 8
    if kind == "gpt2":
        keywords["class_token_ids"] = [3, 11, 25]
    la = make(model, **keywords)
    la.fit([texts()])
    # How broad that must be depends on the model.
    la.prior_precision = 1e-4 if kind == "bert" else 1e-7
    return la, trainer_around(model, folder, *callbacks)


def loaded(folder: Path) -> PeftModel:
    """Read the adapter of a folder, into the base model of `taught`."""
    torch.manual_seed(0)
    base = base_model("bert", n_labels=3, hidden_size=12)
    return PeftModel.from_pretrained(base, folder)


def weights_of(model: PeftModel, adapter: str) -> Weights:
    """Copy an adapter's weights, by their names without the adapter's."""
    weights = {}
    part = f".{adapter}."
    for name, weight in model.named_parameters():
        if part in name:
            of_any = name.replace(part, ".")
            weights[of_any] = weight.detach().clone()
    return weights


def lora_of(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what belongs to a head."""
    of_lora = {}
    for name, value in weights.items():
        if "lora_" in name:
            of_lora[name] = value
    return of_lora


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
    of_classes = targets * (targets.log() - log_p)
    of_texts = of_classes.sum(-1)
    return of_texts.mean().item()


# --- what is learnt -------------------------------------------------------------------


@pytest.mark.parametrize("modules_to_save", [False, True])
def test_its_own_probabilities_are_the_posteriors(tmp_path, modules_to_save):
    la, trainer = taught(tmp_path, modules_to_save=modules_to_save)
    batch = texts()
    targets = la(batch, link_approx="mean_field")
    of_map = divergence(targets, log_probs(trainer.model, batch))
    # So far apart that there is something to learn.
    assert of_map > 0.1
    assert la.distill(trainer) == "calibrated"
    student = loaded(tmp_path / "calibrated")
    of_student = divergence(targets, log_probs(student, batch))
    assert of_student < 0.2 * of_map


@pytest.mark.parametrize("modules_to_save", [False, True])
def test_it_is_one_more_adapter_of_a_model_that_stays(tmp_path, modules_to_save):
    la, trainer = taught(tmp_path, modules_to_save=modules_to_save)
    trainer.args.max_steps = 20
    model = trainer.model
    before = Snapshot(model)
    la.distill(trainer)
    assert model.active_adapter == "default"
    of_student = weights_of(model, "calibrated")
    of_teacher = weights_of(model, "default")
    assert of_student.keys() == of_teacher.keys()
    model.delete_adapter("calibrated")
    assert_same(model, before)


def student_named(folder: Path, name: str) -> tuple[Any, Weights]:
    """Distill in a few steps; return the teacher, and what PEFT reads of the student.

    The head that PEFT reads beside its LoRA weights is left out.
    """
    la, trainer = taught(folder)
    trainer.args.max_steps = 20
    la.distill(trainer, adapter_name=name)
    student = loaded(folder / name)
    return la, lora_of(student.state_dict())


@pytest.mark.parametrize("name", ["s", "lora", "layer", "default_"])
def test_its_name_may_begin_others(tmp_path, name):
    la, found = student_named(tmp_path / "one", name)
    same, expected = student_named(tmp_path / "other", "calibrated")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value)
    assert torch.equal(la.mean, same.mean)
    la.check_model()


@dataclass(frozen=True)
class Answers:
    """Probabilities `(N, answers)` that a language model gives to answers."""

    p: Tensor

    @staticmethod
    def of(model: PeftModel, batch: Batch, tokens: Sequence[int]) -> "Answers":
        """Read the answers' probabilities behind each text's last token."""
        of_tokens = log_probs(model, batch)
        last = batch["attention_mask"].sum(1) - 1
        every_text = torch.arange(N_TEXTS)
        at_last = of_tokens[every_text, last]
        log_p = at_last[:, tokens]
        return Answers(log_p.exp())

    @property
    def together(self) -> Tensor:
        """What the answers have together, `(N, 1)`."""
        return self.p.sum(1, keepdim=True)

    @property
    def log_shares(self) -> Tensor:
        """How the answers share it, as logarithms."""
        shares = self.p / self.together
        return shares.log()


def test_answers_share_the_probability_that_the_model_gives_them(tmp_path):
    la, trainer = taught(tmp_path, kind="gpt2")
    batch = texts()
    tokens = la.model.class_token_ids
    targets = la(batch, link_approx="mean_field")
    before = Answers.of(trainer.model, batch, tokens)
    student = la.distill(trainer, unlabelled=None)
    trainer.model.set_adapter(student)
    after = Answers.of(trainer.model, batch, tokens)

    # What the answers have together stays, and how they share it is learnt.
    change = (after.together - before.together).abs()
    assert change.mean() < 0.1 * before.together.mean()
    of_map = divergence(targets, before.log_shares)
    assert of_map > 0.03
    of_student = divergence(targets, after.log_shares)
    assert of_student < 0.3 * of_map


# --- what it learns from --------------------------------------------------------------


def data_of_student(folder: Path, unlabelled: Any) -> Sequence[Any]:
    """Distill, and return the texts that the student learnt from."""
    watch = Watch()
    la, trainer = taught(folder, watch)
    la.distill(trainer, unlabelled)
    (steps,) = watch.steps
    assert len(steps) == N_STEPS_OF_A_STUDENT
    (records,) = watch.data
    return records


def assert_begins_with_training_texts(records: Sequence[Any]) -> None:
    own = without_padding(texts())
    first = records[:N_TEXTS]
    for record, text in zip(first, own, strict=True):
        assert torch.equal(record["input_ids"], text)


def test_it_learns_from_more_texts(tmp_path):
    others = rows(texts(seed=2))
    more = [without_labels(text) for text in others]
    records = data_of_student(tmp_path, more)
    assert len(records) == 2 * N_TEXTS
    assert_begins_with_training_texts(records)


def test_it_learns_from_copies_with_swapped_tokens(tmp_path):
    records = data_of_student(tmp_path, "swapped")
    assert len(records) == 2 * N_TEXTS
    assert_begins_with_training_texts(records)

    own = without_padding(texts())
    tokens_of_texts = torch.cat(own)
    copies = records[N_TEXTS:]
    n_changed = []
    for record, text in zip(copies, own, strict=True):
        copy = record["input_ids"]
        assert torch.isin(copy, tokens_of_texts).all()
        n_swapped = int((copy != text).sum())
        assert n_swapped <= round(0.3 * len(text))
        n_changed.append(n_swapped)
    # In some texts, at least.
    assert any(n_changed)


# --- what it begins with --------------------------------------------------------------


@dataclass(frozen=True)
class Begun:
    """A student's weights before its first step and after its last, and its teacher's.

    Attributes
    ----------
    scales : dict of float
        how much larger each of the first weights is than the teacher's
    """

    before: Weights
    after: Weights
    scales: dict[str, float]


def begun(la: Any, trainer: Trainer) -> Begun:
    """Distill in four steps."""
    before: Weights = {}

    class Watching(TrainerCallback):
        # It writes into a dictionary outside, for distill restores its own attributes.
        def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
            before.update(weights_of(model, "student"))

    teacher = weights_of(trainer.model, "default")
    trainer.add_callback(Watching())
    trainer.args.max_steps = 4
    la.distill(trainer, None, "student")
    scales = {}
    for name, weight in before.items():
        scale = weight.norm() / teacher[name].norm()
        scales[name] = scale.item()
    return Begun(
        before=before, after=weights_of(trainer.model, "student"), scales=scales
    )


def best_scale(targets: Tensor, logits: Tensor) -> float:
    """Find the factor of the logits that brings them nearest to the targets."""
    grid = torch.logspace(-2, 1, 3001).tolist()

    def loss(scale: float) -> float:
        scaled = scale * logits
        return divergence(targets, scaled.log_softmax(-1))

    return min(grid, key=loss)


def test_a_head_of_its_own_has_the_best_temperature(tmp_path):
    la, trainer = taught(tmp_path)
    batch = texts()
    targets = la(batch, link_approx="mean_field")
    logits = log_probs(trainer.model, batch)
    best = best_scale(targets, logits)
    # Far enough from 1 that a head left as it was would show.
    assert best < 0.8
    student = begun(la, trainer)
    of_head = []
    for name, scale in student.scales.items():
        # From there on LoRA weights are trained, and the head stays.
        has_changed = not torch.equal(student.before[name], student.after[name])
        assert has_changed == ("lora_" in name)
        if "lora_" in name:
            assert scale == 1
        else:
            of_head.append(scale)
    # Its weight and its bias; the grid has steps of 0.23 %.
    assert of_head == pytest.approx([best, best], rel=2e-3)


def test_a_head_of_the_base_model_is_not_scaled(tmp_path):
    la, trainer = taught(tmp_path, kind="gpt2")
    scales = begun(la, trainer).scales
    assert set(scales.values()) == {1.0}


# --- mixtures -------------------------------------------------------------------------


def add_opponent(model: PeftModel):
    """Fit a posterior around another adapter, whose head prefers other classes."""
    model.add_adapter("other", model.peft_config["default"])
    model.set_adapter("other")
    heads = model.base_model.model.classifier.modules_to_save
    heads["other"].weight.data *= -6
    with warnings.catch_warnings():
        # The other adapter is untrained.
        warnings.simplefilter("ignore")
        la = make(model)
        la.fit([texts()])
    model.set_adapter("default")
    return la


def test_a_mixture_teaches_its_mean(tmp_path):
    la, trainer = taught(tmp_path)
    other = add_opponent(trainer.model)
    mixture = LaplaceMixture([la, other])
    batch = texts()
    targets = mixture(batch, link_approx="mean_field")
    student = mixture.distill(trainer)
    trainer.model.set_adapter(student)
    found = log_probs(trainer.model, batch)
    of_student = divergence(targets, found)
    assert of_student < 0.1


# --- how it trains --------------------------------------------------------------------


class Losses(TrainerCallback):
    """Remembers the loss of each step."""

    # Of the class, for distill restores the attributes of callbacks.
    found: ClassVar[list[float]] = []

    def on_log(self, args, state, control, logs=None, **_: Any) -> None:
        if "loss" in logs:
            self.found.append(logs["loss"])


@pytest.mark.parametrize("checkpoints", [False, True])
def test_it_learns_without_dropout_of_any_kind(tmp_path, checkpoints):
    torch.manual_seed(0)
    # It calls dropout as a function, and has no module for it.
    config = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        word_embed_proj_dim=16,
        ffn_dim=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        dropout=0.5,
        attention_dropout=0.5,
        num_labels=3,
        pad_token_id=0,
    )
    lora = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"])
    model = get_peft_model(OPTForSequenceClassification(config), lora)
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    la = make(model)
    la.fit([texts()])
    trainer = trainer_around(model, tmp_path, Losses())
    trainer.args.learning_rate = 0.0
    trainer.args.per_device_train_batch_size = N_TEXTS
    trainer.args.logging_strategy = "steps"
    trainer.args.logging_steps = 1
    before = Snapshot(model)
    Losses.found.clear()
    la.distill(trainer, unlabelled=None)
    assert len(Losses.found) == N_STEPS_OF_A_STUDENT
    # The weights never change.
    assert max(Losses.found) - min(Losses.found) < 1e-5
    model.delete_adapter("calibrated")
    assert Snapshot(model).settings["training"] == before.settings["training"]


def listed(batch: Batch) -> list[dict[str, Any]]:
    """Make rows of lists, with a column that only the user knows of."""
    tokens = without_padding(batch)
    of_texts = []
    for text, label in zip(tokens, batch["labels"], strict=True):
        of_text = {"input_ids": text.tolist(), "labels": label.item(), "book": "a"}
        of_texts.append(of_text)
    return of_texts


def collate(examples: Sequence[Mapping[str, Any]]) -> Batch:
    """Pad rows of lists."""
    ids = []
    labels = []
    masks = []
    for example in examples:
        text = torch.tensor(example["input_ids"])
        ids.append(text)
        masks.append(torch.ones_like(text))
        labels.append(example["labels"])
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence(masks, batch_first=True),
        "labels": torch.tensor(labels),
    }


def smoothed(
    outputs: Mapping[str, Tensor], labels: Tensor, num_items_in_batch: Any = None
) -> Tensor:
    """Compute a loss of the user's own."""
    return cross_entropy(outputs["logits"], labels, label_smoothing=0.3)


@pytest.mark.parametrize("as_data", [list, Dataset.from_list])
def test_evaluations_between_its_steps_are_the_users(tmp_path, as_data):
    losses = []

    class Evaluated(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            losses.append(metrics["eval_loss"])

    la, trainer = taught(tmp_path, Evaluated())
    batch = texts()
    data = as_data(listed(batch))
    trainer.train_dataset = data
    trainer.eval_dataset = data
    trainer.data_collator = collate
    trainer.compute_loss_func = smoothed
    trainer.args.max_steps = 40
    trainer.args.per_device_eval_batch_size = N_TEXTS
    trainer.args.eval_strategy = "steps"
    trainer.args.eval_steps = 4
    before = dict(vars(trainer))
    student = la.distill(trainer)
    assert vars(trainer) == before

    trainer.model.set_adapter(student)
    collated = collate(listed(batch))
    log_p = log_probs(trainer.model, collated)
    expected = smoothed({"logits": log_p}, batch["labels"])
    # After 4, 8 and 12 steps, 30 % of the training's.
    first, _, last = losses
    assert last == pytest.approx(expected.item(), rel=1e-5)
    # They are of the student at that step.
    assert first != last


def no_loss(*args: Any, **kwargs: Any) -> None:
    """Fail to be a loss; it must play no part in a student's training."""


def learnt_in_parts(folder: Path, n_parts: int) -> Weights:
    """Distill in steps that accumulate so many backward passes; take the weights."""
    la, trainer = taught(folder)
    batch_size = N_TEXTS // n_parts
    trainer.args.max_steps = 30
    trainer.args.gradient_accumulation_steps = n_parts
    trainer.args.per_device_train_batch_size = batch_size
    trainer._train_batch_size = batch_size
    trainer.compute_loss_func = no_loss
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


# --- what fails -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"adapter_name": "default"}, "an adapter 'default' already"),
        ({"unlabelled": "more"}, "unlabelled must be"),
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
    with pytest.raises((ValueError, RuntimeError), match=message):
        la.distill(**{"trainer": trainer, **keywords})
    assert_same(trainer.model, model)
    assert list(trainer.model.peft_config) == ["default"]
    assert vars(trainer) == attributes


def test_regression_has_no_probabilities_to_learn(tmp_path):
    model = lora_model("bert", torch.float32, n_labels=1)
    la = make(model, likelihood="regression")
    batch = texts()
    batch["labels"] = batch["labels"].float()
    la.fit([batch])
    trainer = trainer_around(model, tmp_path)
    with pytest.raises(ValueError, match="regression predicts numbers"):
        la.distill(trainer)

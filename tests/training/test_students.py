"""A student: an ordinary adapter that has learnt a posterior's probabilities."""

import warnings
from typing import ClassVar

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close
from transformers import TrainerCallback

from laplace_lora_ext import LaplaceMixture
from tests.support.models import (
    base_model,
    lora_model,
    ragged_batches,
    without_labels,
)
from tests.support.posteriors import make
from tests.support.snapshots import Snapshot
from tests.support.trainers import Stop, Watch, trainer_of

N_TEXTS = 16


def texts(seed=1):
    """Sixteen padded texts, as a batch."""
    (batch,) = ragged_batches(
        lengths=(7, 4, 5, 6) * 4,
        batch_size=N_TEXTS,
        seed=seed,
    )
    return batch


def rows(batch):
    return [{key: value[row] for key, value in batch.items()} for row in range(N_TEXTS)]


def without_padding(batch):
    """Token ids of each text."""
    return [row["input_ids"][row["attention_mask"].bool()] for row in rows(batch)]


def output_layer(model):
    """The layer that gives a classifier's logits, or a language model's."""
    base = model.base_model.model
    if hasattr(base, "classifier"):
        return base.classifier.modules_to_save["default"]
    return base.lm_head


def case(
    tmp_path,
    kind="bert",
    *callbacks,
    likelihood="classification",
    modules_to_save=False,
):
    """A broad posterior around a model that is sure of itself, and its trainer."""
    is_regression = likelihood == "regression"
    model = lora_model(
        kind,
        torch.float32,
        n_labels=1 if is_regression else 3,
    )
    output_layer(model).weight.data *= 8
    trainer = trainer_of(
        tmp_path,
        *callbacks,
        model=model,
        data=rows(texts()),
        max_steps=400,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        per_device_train_batch_size=8,
        save_strategy="no",
        logging_strategy="no",
    )
    if kind == "bert":
        la = make(model, likelihood=likelihood, modules_to_save=modules_to_save)
    else:
        la = make(
            model,
            likelihood=likelihood,
            class_token_ids=[3, 11, 25],
        )
    batch = texts()
    if is_regression:
        batch["labels"] = batch["labels"].float()
    la.fit([batch])
    la.prior_precision = 1e-4 if kind == "bert" else 1e-7
    return la, trainer


def loaded(folder):
    """The adapter of a folder, in the base model of `case`."""
    torch.manual_seed(0)
    base = base_model("bert", n_labels=3, hidden_size=12)
    return PeftModel.from_pretrained(base, folder)


def weights_of(model, adapter):
    """Copies of an adapter's weights, in their order."""
    return [
        weight.detach().clone()
        for name, weight in model.named_parameters()
        if f".{adapter}." in name
    ]


def assert_same(model, before):
    """But for what an earlier training would have left on modules."""
    now = Snapshot(model)
    before.attributes = now.attributes
    before.assert_equal(model)


def log_probs(model, batch):
    model.eval()
    with torch.no_grad():
        logits = model(**without_labels(batch)).logits
    return logits.log_softmax(-1)


def divergence(targets, log_p):
    of_classes = targets * (targets.log() - log_p)
    return of_classes.sum(-1).mean().item()


# --- what is learnt -------------------------------------------------------------------


@pytest.mark.parametrize("modules_to_save", [False, True])
def test_its_own_probabilities_are_the_posteriors(tmp_path, modules_to_save):
    la, trainer = case(tmp_path, modules_to_save=modules_to_save)
    batch = texts()
    targets = la(batch, link_approx="mean_field")
    of_map = divergence(targets, log_probs(trainer.model, batch))
    assert of_map > 0.1
    before = Snapshot(trainer.model)
    assert la.distill(trainer) == "calibrated"
    assert trainer.model.active_adapter == "default"
    names = [name for name, _ in trainer.model.named_parameters()]
    of_student = [name for name in names if ".calibrated" in name]
    of_teacher = [name for name in names if ".default" in name]
    renamed = [name.replace(".calibrated", ".default") for name in of_student]
    assert set(renamed) == set(of_teacher)
    trainer.model.delete_adapter("calibrated")
    assert_same(trainer.model, before)
    student = loaded(tmp_path / "calibrated")
    assert divergence(targets, log_probs(student, batch)) < 0.2 * of_map


@pytest.mark.filterwarnings("ignore:The model has modules that are named 'layer'")
@pytest.mark.parametrize("name", ["s", "lora", "layer", "default_"])
def test_its_name_may_begin_others(tmp_path, name):
    la, trainer = case(tmp_path / "one")
    same, other = case(tmp_path / "other")
    trainer.args.max_steps = 20
    other.args.max_steps = 20
    la.distill(trainer, adapter_name=name)
    same.distill(other)
    found = loaded(tmp_path / "one" / name).state_dict()
    expected = loaded(tmp_path / "other" / "calibrated").state_dict()
    for key, value in expected.items():
        if "lora_" in key:
            assert torch.equal(found[key], value)
    assert torch.equal(la.mean, same.mean)
    la.check_model()


def test_answers_share_the_probability_that_the_model_gives_them(
    tmp_path,
):
    la, trainer = case(tmp_path, "gpt2")
    batch = texts()
    ids = la.model.class_token_ids
    last = batch["attention_mask"].sum(1) - 1

    def of_answers():
        log_p = log_probs(trainer.model, batch)
        return log_p[torch.arange(N_TEXTS), last][:, ids].exp()

    targets = la(batch, link_approx="mean_field")
    before = of_answers()
    share_before = before.sum(1)
    of_map = divergence(targets, (before / share_before[:, None]).log())
    assert of_map > 0.03
    student = la.distill(trainer, unlabelled=None)
    trainer.model.set_adapter(student)
    after = of_answers()
    share = after.sum(1)
    assert (share - share_before).abs().mean() < 0.1 * share_before.mean()
    found = (after / share[:, None]).log()
    assert divergence(targets, found) < 0.3 * of_map


def test_it_learns_from_training_texts_and_copies_with_swapped_tokens(
    tmp_path,
):
    seen = Watch()
    la, trainer = case(tmp_path, "bert", seen)
    own = without_padding(texts())
    more = [without_labels(text) for text in rows(texts(2))]
    la.distill(trainer, None, "student_0")
    la.distill(trainer, "swapped", "student_1")
    la.distill(trainer, more, "student_2")
    assert len(seen.steps[0]) == 120  # 30 % of the training's
    assert [len(records) for records in seen.data] == [16, 32, 32]
    for records in seen.data:
        for record, text in zip(records, own, strict=False):
            assert torch.equal(record["input_ids"], text)
    _, swapped, _ = seen.data
    copies = [record["input_ids"] for record in swapped[N_TEXTS:]]
    pool = set(torch.cat(own).tolist())
    n_changed = []
    for copy, text in zip(copies, own, strict=True):
        n_changed.append(int((copy != text).sum()))
        assert n_changed[-1] <= round(0.3 * len(text))
        assert set(copy.tolist()) <= pool
    assert any(n_changed)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_head_of_its_own_has_the_best_temperature(tmp_path, kind):
    begun = {}

    class Watching(TrainerCallback):
        # It writes into a dictionary outside, for distill restores its own attributes.
        def on_train_begin(self, *_, model, **__):
            begun["student"] = weights_of(model, "student")

    la, trainer = case(tmp_path, kind, Watching())
    teacher = weights_of(trainer.model, "default")
    trainer.args.max_steps = 4
    la.distill(trainer, None, "student")
    scales = []
    for of_student, of_teacher in zip(begun["student"], teacher, strict=True):
        scales.append((of_student.norm() / of_teacher.norm()).item())
    scales.sort()
    if kind == "gpt2":
        # Its head is the base model's, which no adapter may scale.
        assert set(scales) == {1.0}
        return
    targets = la(texts(), link_approx="mean_field")
    logits = log_probs(trainer.model, texts())
    grid = torch.logspace(-2, 1, 3001).tolist()
    losses = [divergence(targets, (scale * logits).log_softmax(-1)) for scale in grid]
    best = grid[losses.index(min(losses))]
    assert best < 0.8
    of_head, of_lora = (
        scales[:2],
        scales[2:],
    )  # weight and bias of the head are the smallest
    assert of_head == pytest.approx([best, best], rel=2e-3)
    assert set(of_lora) == {1.0}
    after = weights_of(trainer.model, "student")
    stay = [
        torch.equal(first, last)
        for first, last in zip(begun["student"], after, strict=True)
    ]
    assert sum(stay) == 2  # the head; a step has changed all LoRA weights


def test_a_mixture_teaches_its_mean(tmp_path):
    la, trainer = case(tmp_path)
    trainer.model.add_adapter("other", trainer.model.peft_config["default"])
    trainer.model.set_adapter("other")
    heads = trainer.model.base_model.model.classifier.modules_to_save
    with torch.no_grad():
        heads["other"].weight.mul_(-6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the other adapter is untrained
        other = make(trainer.model)
        other.fit([texts()])
    trainer.model.set_adapter("default")
    mixture = LaplaceMixture([la, other])
    batch = texts()
    targets = mixture(batch, link_approx="mean_field")
    trainer.model.set_adapter(mixture.distill(trainer))
    assert divergence(targets, log_probs(trainer.model, batch)) < 0.1


# --- how it trains --------------------------------------------------------------------


def dropouts(model):
    return [
        module for module in model.modules() if isinstance(module, torch.nn.Dropout)
    ]


def test_it_learns_without_dropout(tmp_path):
    class Rates(TrainerCallback):
        # Of the class, for distill restores the attributes of callbacks.
        found: ClassVar[set[float]] = set()

        def on_step_begin(self, *_, model, **__):
            self.found.update(module.p for module in dropouts(model))

    la, trainer = case(tmp_path, "bert", Rates())
    of_training = dropouts(trainer.model)
    before = [module.p for module in of_training]
    la.distill(trainer)
    assert max(before) > 0
    assert Rates.found == {0.0}
    assert [module.p for module in of_training] == before


def collate(examples):
    """A collator that knows rows of lists alone, and a column of its own."""
    ids = [torch.tensor(example["input_ids"]) for example in examples]
    labels = [torch.tensor(example["labels"]) for example in examples]
    mask = [torch.ones(len(text), dtype=torch.long) for text in ids]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence(mask, batch_first=True),
        "labels": torch.stack(labels),
    }


def smoothed(outputs, labels, num_items_in_batch=None):
    """A loss of the user's own."""
    return cross_entropy(outputs["logits"], labels, label_smoothing=0.3)


@pytest.mark.parametrize("of_sets", [False, True])
def test_evaluations_between_its_steps_are_the_users(tmp_path, of_sets):
    evaluated = []

    class Evaluated(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            evaluated.append(metrics["eval_loss"])

    la, trainer = case(tmp_path, "bert", Evaluated())
    labels = texts()["labels"]
    listed = [
        {"input_ids": text.tolist(), "labels": label, "book": "a"}
        for text, label in zip(without_padding(texts()), labels.tolist(), strict=True)
    ]
    data = Dataset.from_list(listed) if of_sets else listed
    trainer.train_dataset = data
    trainer.eval_dataset = data
    trainer.data_collator = collate
    trainer.compute_loss_func = smoothed
    trainer.args.max_steps = 40
    trainer.args.per_device_eval_batch_size = N_TEXTS
    trainer.args.eval_strategy = "steps"
    trainer.args.eval_steps = 4
    before = dict(vars(trainer))
    trainer.model.set_adapter(la.distill(trainer))
    assert vars(trainer) == before
    log_p = log_probs(trainer.model, collate(listed))
    expected = smoothed({"logits": log_p}, labels)
    assert len(evaluated) == 3
    assert evaluated[-1] == pytest.approx(expected.item(), rel=1e-5)
    assert evaluated[0] != evaluated[-1]


def no_loss(*args, **kwargs):
    """A loss of the user's own, which plays no part in a student's training."""


def learnt_in_parts(folder, n_parts):
    """A student's weights, each of whose steps accumulates so many backward passes."""
    la, trainer = case(folder)
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


def test_accumulated_steps_are_divided_whatever_loss_the_user_has(
    tmp_path,
):
    whole = learnt_in_parts(tmp_path / "1", n_parts=1)
    divided = learnt_in_parts(tmp_path / "2", n_parts=2)
    for one, other in zip(whole, divided, strict=True):
        assert_close(one, other)


# --- what fails -----------------------------------------------------------------------


def test_what_fails_leaves_nothing_behind(tmp_path):
    la, trainer = case(tmp_path, "bert", Stop(2))
    before = Snapshot(trainer.model)
    of_trainer = dict(vars(trainer))
    with pytest.raises(RuntimeError, match="killed"):
        la.distill(trainer)
    with pytest.raises(ValueError, match="an adapter 'default' already"):
        la.distill(trainer, adapter_name="default")
    with pytest.raises(ValueError, match="unlabelled must be"):
        la.distill(trainer, unlabelled="more")
    _, of_another = case(tmp_path)
    with pytest.raises(ValueError, match="this one has another"):
        la.distill(of_another)
    assert_same(trainer.model, before)
    assert list(trainer.model.peft_config) == ["default"]
    assert vars(trainer) == of_trainer


def test_regression_has_no_probabilities_to_learn(tmp_path):
    la, trainer = case(tmp_path, likelihood="regression")
    with pytest.raises(ValueError, match="regression has none"):
        la.distill(trainer)

"""A student: an ordinary adapter that has learnt a posterior's probabilities."""

import warnings
from typing import ClassVar

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from torch import nn
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
    """Make a batch of sixteen padded texts."""
    (batch,) = ragged_batches(
        lengths=(7, 4, 5, 6) * 4,
        batch_size=N_TEXTS,
        seed=seed,
    )
    return batch


def rows(batch):
    """Take each text of a batch by itself."""
    return [{key: value[row] for key, value in batch.items()} for row in range(N_TEXTS)]


def without_padding(batch):
    """Take the token ids of each text."""
    tokens = []
    for row in rows(batch):
        is_real = row["attention_mask"].bool()
        tokens.append(row["input_ids"][is_real])
    return tokens


def output_layer(model):
    """Find the layer that gives a classifier's logits, or a language model's."""
    base = model.base_model.model
    if hasattr(base, "classifier"):
        return base.classifier.modules_to_save["default"]
    return base.lm_head


def trainer_around(model, folder, *callbacks):
    """Make a trainer of the sixteen texts."""
    return trainer_of(
        folder,
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


def taught(folder, *callbacks, kind="bert", **keywords):
    """Fit a broad posterior around a model that is sure of itself; make its trainer.

    So the posterior's probabilities are far from the model's.
    """
    model = lora_model(kind, torch.float32)
    output_layer(model).weight.data *= 8
    if kind == "gpt2":
        keywords["class_token_ids"] = [3, 11, 25]
    la = make(model, **keywords)
    la.fit([texts()])
    la.prior_precision = 1e-4 if kind == "bert" else 1e-7
    return la, trainer_around(model, folder, *callbacks)


def loaded(folder):
    """Read the adapter of a folder, into the base model of `taught`."""
    torch.manual_seed(0)
    base = base_model("bert", n_labels=3, hidden_size=12)
    return PeftModel.from_pretrained(base, folder)


def weights_of(model, adapter):
    """Copy an adapter's weights, by their names without the adapter's."""
    return {
        name.replace(f".{adapter}.", "."): weight.detach().clone()
        for name, weight in model.named_parameters()
        if f".{adapter}." in name
    }


def assert_same(model, before):
    """Compare all but the attributes that any training leaves on modules."""
    now = Snapshot(model)
    before.attributes = now.attributes
    before.assert_equal(model)


def log_probs(model, batch):
    """Compute the logarithms of a model's own probabilities."""
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
    la, trainer = taught(tmp_path, modules_to_save=modules_to_save)
    batch = texts()
    targets = la(batch, link_approx="mean_field")
    of_map = divergence(targets, log_probs(trainer.model, batch))
    assert of_map > 0.1
    before = Snapshot(trainer.model)
    assert la.distill(trainer) == "calibrated"
    assert trainer.model.active_adapter == "default"
    of_student = weights_of(trainer.model, "calibrated")
    of_teacher = weights_of(trainer.model, "default")
    assert of_student.keys() == of_teacher.keys()
    trainer.model.delete_adapter("calibrated")
    assert_same(trainer.model, before)
    student = loaded(tmp_path / "calibrated")
    assert divergence(targets, log_probs(student, batch)) < 0.2 * of_map


@pytest.mark.filterwarnings("ignore:The model has modules that are named 'layer'")
@pytest.mark.parametrize("name", ["s", "lora", "layer", "default_"])
def test_its_name_may_begin_others(tmp_path, name):
    la, trainer = taught(tmp_path / "one")
    same, other = taught(tmp_path / "other")
    trainer.args.max_steps = 20
    other.args.max_steps = 20
    la.distill(trainer, adapter_name=name)
    same.distill(other)
    found = loaded(tmp_path / "one" / name).state_dict()
    expected = loaded(tmp_path / "other" / "calibrated").state_dict()
    for key, value in expected.items():
        # The head that PEFT reads beside them is not compared.
        if "lora_" in key:
            assert torch.equal(found[key], value)
    assert torch.equal(la.mean, same.mean)
    la.check_model()


def test_answers_share_the_probability_that_the_model_gives_them(tmp_path):
    la, trainer = taught(tmp_path, kind="gpt2")
    batch = texts()
    answers = la.model.class_token_ids
    last = batch["attention_mask"].sum(1) - 1

    def probabilities_of_answers():
        of_tokens = log_probs(trainer.model, batch)
        at_last = of_tokens[torch.arange(N_TEXTS), last]
        return at_last[:, answers].exp()

    targets = la(batch, link_approx="mean_field")
    before = probabilities_of_answers()
    student = la.distill(trainer, unlabelled=None)
    trainer.model.set_adapter(student)
    after = probabilities_of_answers()

    # What the answers have together stays, and how they share it is learnt.
    together_before = before.sum(1, keepdim=True)
    together = after.sum(1, keepdim=True)
    change = (together - together_before).abs()
    assert change.mean() < 0.1 * together_before.mean()
    of_map = divergence(targets, (before / together_before).log())
    assert of_map > 0.03
    of_student = divergence(targets, (after / together).log())
    assert of_student < 0.3 * of_map


def test_it_learns_from_training_texts_and_copies_with_swapped_tokens(tmp_path):
    seen = Watch()
    la, trainer = taught(tmp_path, seen)
    own = without_padding(texts())
    more = [without_labels(text) for text in rows(texts(2))]
    la.distill(trainer, None, "student_0")
    la.distill(trainer, "swapped", "student_1")
    la.distill(trainer, more, "student_2")
    assert len(seen.steps[0]) == 120  # 30 % of the training's
    assert [len(records) for records in seen.data] == [16, 32, 32]
    for records in seen.data:
        first = records[:N_TEXTS]
        for record, text in zip(first, own, strict=True):
            assert torch.equal(record["input_ids"], text)

    _, swapped, _ = seen.data
    pool = set(torch.cat(own).tolist())
    n_changed = []
    for record, text in zip(swapped[N_TEXTS:], own, strict=True):
        copy = record["input_ids"]
        n_changed.append(int((copy != text).sum()))
        assert n_changed[-1] <= round(0.3 * len(text))
        assert set(copy.tolist()) <= pool
    assert any(n_changed)


def first_weights(la, trainer):
    """Distill in four steps, and return the weights that the student begins with."""
    begun = {}

    class Watching(TrainerCallback):
        # It writes into a dictionary outside, for distill restores its own attributes.
        def on_train_begin(self, *_, model, **__):
            begun.update(weights_of(model, "student"))

    trainer.add_callback(Watching())
    trainer.args.max_steps = 4
    la.distill(trainer, None, "student")
    return begun


def scales_beside(weights, others):
    """Compute how much larger each weight is than its counterpart."""
    scales = {}
    for name, weight in weights.items():
        scale = weight.norm() / others[name].norm()
        scales[name] = scale.item()
    return scales


def test_a_head_of_its_own_has_the_best_temperature(tmp_path):
    la, trainer = taught(tmp_path)
    teacher = weights_of(trainer.model, "default")
    begun = first_weights(la, trainer)
    scales = scales_beside(begun, teacher)
    of_head = {name: scale for name, scale in scales.items() if "lora_" not in name}
    of_lora = {name: scale for name, scale in scales.items() if "lora_" in name}

    targets = la(texts(), link_approx="mean_field")
    logits = log_probs(trainer.model, texts())
    grid = torch.logspace(-2, 1, 3001).tolist()
    losses = [divergence(targets, (scale * logits).log_softmax(-1)) for scale in grid]
    best = grid[losses.index(min(losses))]
    assert best < 0.8
    # Its weight and its bias; the grid has steps of 0.23 %.
    assert list(of_head.values()) == pytest.approx([best, best], rel=2e-3)
    assert set(of_lora.values()) == {1.0}

    after = weights_of(trainer.model, "student")
    stay = {name for name in after if torch.equal(begun[name], after[name])}
    # Steps have changed all LoRA weights.
    assert stay == of_head.keys()


def test_a_head_of_the_base_model_is_not_scaled(tmp_path):
    la, trainer = taught(tmp_path, kind="gpt2")
    teacher = weights_of(trainer.model, "default")
    begun = first_weights(la, trainer)
    scales = scales_beside(begun, teacher)
    assert set(scales.values()) == {1.0}


def add_opponent(model):
    """Fit a posterior around another adapter, whose head prefers other classes."""
    model.add_adapter("other", model.peft_config["default"])
    model.set_adapter("other")
    heads = model.base_model.model.classifier.modules_to_save
    with torch.no_grad():
        heads["other"].weight.mul_(-6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the other adapter is untrained
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
    assert divergence(targets, log_probs(trainer.model, batch)) < 0.1


# --- how it trains --------------------------------------------------------------------


def dropout_rates(model):
    modules = model.modules()
    return [module.p for module in modules if isinstance(module, nn.Dropout)]


def test_it_learns_without_dropout(tmp_path):
    class Rates(TrainerCallback):
        # Of the class, for distill restores the attributes of callbacks.
        found: ClassVar[set[float]] = set()

        def on_step_begin(self, *_, model, **__):
            self.found.update(dropout_rates(model))

    la, trainer = taught(tmp_path, Rates())
    before = dropout_rates(trainer.model)
    la.distill(trainer)
    assert max(before) > 0
    assert Rates.found == {0.0}
    trainer.model.delete_adapter("calibrated")
    assert dropout_rates(trainer.model) == before


def collate(examples):
    """Pad rows of lists, which may have a column of their own."""
    ids = [torch.tensor(example["input_ids"]) for example in examples]
    labels = [torch.tensor(example["labels"]) for example in examples]
    mask = [torch.ones(len(text), dtype=torch.long) for text in ids]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence(mask, batch_first=True),
        "labels": torch.stack(labels),
    }


def smoothed(outputs, labels, num_items_in_batch=None):
    """Compute a loss of the user's own."""
    return cross_entropy(outputs["logits"], labels, label_smoothing=0.3)


@pytest.mark.parametrize("of_sets", [False, True])
def test_evaluations_between_its_steps_are_the_users(tmp_path, of_sets):
    evaluated = []

    class Evaluated(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            evaluated.append(metrics["eval_loss"])

    la, trainer = taught(tmp_path, Evaluated())
    batch = texts()
    labels = batch["labels"]
    listed = []
    for text, label in zip(without_padding(batch), labels.tolist(), strict=True):
        listed.append({"input_ids": text.tolist(), "labels": label, "book": "a"})
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
    student = la.distill(trainer)
    assert vars(trainer) == before
    trainer.model.set_adapter(student)
    log_p = log_probs(trainer.model, collate(listed))
    expected = smoothed({"logits": log_p}, labels)
    # After 4, 8 and 12 steps, 30 % of the training's.
    first, _, last = evaluated
    assert last == pytest.approx(expected.item(), rel=1e-5)
    assert first != last


def no_loss(*args, **kwargs):
    """Fail to be a loss; it must play no part in a student's training."""


def learnt_in_parts(folder, n_parts):
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


def test_what_fails_leaves_nothing_behind(tmp_path):
    la, trainer = taught(tmp_path, Stop(2))
    before = Snapshot(trainer.model)
    of_trainer = dict(vars(trainer))
    with pytest.raises(RuntimeError, match="killed"):
        la.distill(trainer)
    with pytest.raises(ValueError, match="an adapter 'default' already"):
        la.distill(trainer, adapter_name="default")
    with pytest.raises(ValueError, match="unlabelled must be"):
        la.distill(trainer, unlabelled="more")
    _, of_another = taught(tmp_path)
    with pytest.raises(ValueError, match="this one has another"):
        la.distill(of_another)
    assert_same(trainer.model, before)
    assert list(trainer.model.peft_config) == ["default"]
    assert vars(trainer) == of_trainer


def test_regression_has_no_probabilities_to_learn(tmp_path):
    model = lora_model("bert", torch.float32, n_labels=1)
    la = make(model, likelihood="regression")
    batch = texts()
    la.fit([batch | {"labels": batch["labels"].float()}])
    trainer = trainer_around(model, tmp_path)
    with pytest.raises(ValueError, match="regression has none"):
        la.distill(trainer)

"""A student: an ordinary adapter that has learnt a posterior's probabilities."""

import warnings
from typing import ClassVar

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerCallback

from laplace_lora_ext import LaplaceMixture
from tests.support.models import base_model, lora_model, ragged_batches
from tests.support.posteriors import make
from tests.support.snapshots import Snapshot
from tests.support.trainers import Stop, Watch, trainer_of


def texts(seed=1):
    """Sixteen padded texts, as a batch."""
    (batch,) = ragged_batches(lengths=(7, 4, 5, 6) * 4, batch_size=16, seed=seed)
    return batch


def rows(batch):
    return [{key: value[row] for key, value in batch.items()} for row in range(16)]


def case(tmp_path, kind="bert", *callbacks, likelihood="classification"):
    """A broad posterior around a model that is sure of itself, and its trainer."""
    n_labels = 1 if likelihood == "regression" else 3
    model = lora_model(kind, torch.float32, n_labels=n_labels)
    head = model.base_model.model
    head = head.classifier.modules_to_save["default"] if kind == "bert" else head.lm_head
    head.weight.data *= 8
    settings = {"max_steps": 400, "learning_rate": 5e-3, "lr_scheduler_type": "constant"}
    settings |= {"per_device_train_batch_size": 8, "save_strategy": "no", "logging_strategy": "no"}
    trainer = trainer_of(tmp_path, *callbacks, model=model, data=rows(texts()), **settings)
    answers = {} if kind == "bert" else {"class_token_ids": [3, 11, 25]}
    la = make(model, likelihood=likelihood, **answers)
    batch = texts()
    la.fit([batch | {"labels": batch["labels"].float()} if likelihood == "regression" else batch])
    la.prior_precision = 1e-4 if kind == "bert" else 1e-7
    return la, trainer


def assert_same(model, before):
    """But for what an earlier training would have left on modules."""
    now = Snapshot(model)
    before.attributes = now.attributes
    before.assert_equal(model)


def log_probs(model, batch):
    with torch.no_grad():
        return model.eval()(**{k: v for k, v in batch.items() if k != "labels"}).logits.log_softmax(
            -1
        )


def divergence(targets, log_p):
    return (targets * (targets.log() - log_p)).sum(-1).mean().item()


def test_its_own_probabilities_are_the_posteriors(tmp_path):
    la, trainer = case(tmp_path)
    batch = texts()
    targets = la(batch, link_approx="mean_field")
    of_map = divergence(targets, log_probs(trainer.model, batch))
    assert of_map > 0.1
    before = Snapshot(trainer.model)
    assert la.distill(trainer) == "calibrated"
    assert trainer.model.active_adapter == "default"
    student, teacher = (
        {
            n.replace(".calibrated", ".default")
            for n, _ in trainer.model.named_parameters()
            if key in n
        }
        for key in (".calibrated", ".default")
    )
    assert student == teacher
    trainer.model.delete_adapter("calibrated")
    assert_same(trainer.model, before)
    torch.manual_seed(0)
    loaded = PeftModel.from_pretrained(base_model("bert", 3, 12), tmp_path / "calibrated")
    assert divergence(targets, log_probs(loaded, batch)) < 0.2 * of_map


@pytest.mark.filterwarnings("ignore:The model has modules that are named 'layer'")
@pytest.mark.parametrize("name", ["s", "lora", "layer", "default_"])
def test_its_name_may_begin_others(tmp_path, name):
    (la, trainer), (same, other) = case(tmp_path / "one"), case(tmp_path / "other")
    trainer.args.max_steps = other.args.max_steps = 20
    la.distill(trainer, adapter_name=name)
    same.distill(other)
    found, expected = (
        PeftModel.from_pretrained(base_model("bert", 3, 12), folder).state_dict()
        for folder in (tmp_path / "one" / name, tmp_path / "other" / "calibrated")
    )
    assert all(torch.equal(found[key], value) for key, value in expected.items() if "lora_" in key)
    assert torch.equal(la.mean, same.mean)
    la.check_model()


def test_answers_share_the_probability_that_the_model_gives_them(tmp_path):
    la, trainer = case(tmp_path, "gpt2")
    batch, ids = texts(), la.model.class_token_ids
    last = batch["attention_mask"].sum(1) - 1
    rows = torch.arange(len(last))
    before = log_probs(trainer.model, batch)[rows, last].exp()
    targets = la(batch, link_approx="mean_field")
    of_map = divergence(targets, (before[:, ids] / before[:, ids].sum(1, keepdim=True)).log())
    assert of_map > 0.03
    trainer.model.set_adapter(la.distill(trainer, unlabelled=None))
    after = log_probs(trainer.model, batch)[rows, last].exp()
    share, own = after[:, ids].sum(1), before[:, ids].sum(1)
    assert (share - own).abs().mean() < 0.1 * own.mean()
    found = (after[:, ids] / share[:, None]).log()
    assert divergence(targets, found) < 0.3 * of_map


def test_it_learns_from_training_texts_and_copies_with_swapped_tokens(tmp_path):
    seen = Watch()
    la, trainer = case(tmp_path, "bert", seen)
    own = [row["input_ids"][row["attention_mask"].bool()] for row in rows(texts())]
    more = [{k: v for k, v in text.items() if k != "labels"} for text in rows(texts(2))]
    for number, unlabelled in enumerate((None, "swapped", more)):
        la.distill(trainer, unlabelled, f"student_{number}")
    alone, swapped, with_more = seen.data
    assert len(seen.steps[0]) == 120  # 30 % of the training's
    assert [len(alone), len(swapped), len(with_more)] == [16, 32, 32]
    for records in (alone, swapped, with_more):
        assert all(torch.equal(r["input_ids"], text) for r, text in zip(records, own, strict=False))
    pool = set(torch.cat(own).tolist())
    for record, text in zip(swapped[16:], own, strict=True):
        changed = record["input_ids"] != text
        assert 0 <= changed.sum() <= round(0.3 * len(text))
        assert set(record["input_ids"].tolist()) <= pool
    assert any(not torch.equal(r["input_ids"], t) for r, t in zip(swapped[16:], own, strict=True))


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_head_of_its_own_has_the_best_temperature(tmp_path, kind):
    begun = {}

    class Watching(TrainerCallback):  # whose own attributes distill restores
        def on_train_begin(self, *_, model, **__):
            begun["student"] = [w.clone() for n, w in model.named_parameters() if ".student." in n]

    la, trainer = case(tmp_path, kind, Watching())
    default = [w.clone() for n, w in trainer.model.named_parameters() if ".default." in n]
    trainer.args.max_steps = 4
    la.distill(trainer, None, "student")
    pairs = zip(begun["student"], default, strict=True)
    scales = sorted((own.norm() / of_teacher.norm()).item() for own, of_teacher in pairs)
    if kind == "gpt2":
        assert set(scales) == {1.0}
        return
    targets, logits = la(texts(), link_approx="mean_field"), log_probs(trainer.model, texts())
    grid = torch.logspace(-2, 1, 3001)
    losses = [divergence(targets, (s * logits).log_softmax(-1)) for s in grid.tolist()]
    best = grid[int(torch.tensor(losses).argmin())].item()
    assert best < 0.8
    assert scales[:2] == pytest.approx([best] * 2, rel=2e-3)  # weight and bias of the head
    assert set(scales[2:]) == {1.0}
    after = [w for n, w in trainer.model.named_parameters() if ".student." in n]
    stay = [torch.equal(*pair) for pair in zip(begun["student"], after, strict=True)]
    assert sum(stay) == 2  # the head; a step has changed all LoRA weights


def test_it_learns_without_dropout(tmp_path):
    class Rates(TrainerCallback):
        found: ClassVar[set[float]] = set()

        def on_step_begin(self, *_, model, **__):
            self.found.update(m.p for m in model.modules() if isinstance(m, torch.nn.Dropout))

    la, trainer = case(tmp_path, "bert", Rates())
    own = [m for m in trainer.model.modules() if isinstance(m, torch.nn.Dropout)]
    before = [m.p for m in own]
    la.distill(trainer)
    assert max(before) > 0
    assert Rates.found == {0.0}
    assert [m.p for m in own] == before


def collate(examples):
    """A collator that knows rows of lists alone, and a column of its own."""
    columns = {key: [torch.tensor(e[key]) for e in examples] for key in ("input_ids", "labels")}
    mask = [torch.ones(len(ids), dtype=torch.long) for ids in columns["input_ids"]]
    ids, mask = (pad_sequence(rows, batch_first=True) for rows in (columns["input_ids"], mask))
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.stack(columns["labels"])}


@pytest.mark.parametrize("of_sets", [False, True])
def test_evaluations_between_its_steps_are_the_users(tmp_path, of_sets):
    evaluated = []

    class Evaluated(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            evaluated.append(metrics["eval_loss"])

    def smoothed(outputs, labels, num_items_in_batch=None):
        return cross_entropy(outputs["logits"], labels, label_smoothing=0.3)

    la, trainer = case(tmp_path, "bert", Evaluated())
    length = [int(row["attention_mask"].sum()) for row in rows(texts())]
    listed = [
        {"input_ids": row["input_ids"][:n].tolist(), "labels": int(row["labels"]), "book": "a"}
        for row, n in zip(rows(texts()), length, strict=True)
    ]
    trainer.train_dataset = trainer.eval_dataset = Dataset.from_list(listed) if of_sets else listed
    trainer.data_collator, trainer.compute_loss_func = collate, smoothed
    trainer.args.max_steps, trainer.args.per_device_eval_batch_size = 40, 16
    trainer.args.eval_strategy, trainer.args.eval_steps = "steps", 4
    before = dict(vars(trainer))
    trainer.model.set_adapter(la.distill(trainer))
    assert vars(trainer) == before
    with torch.no_grad():
        log_p = log_probs(trainer.model, collate(listed))
    expected = smoothed({"logits": log_p}, torch.tensor([text["labels"] for text in listed]))
    assert len(evaluated) == 3
    assert evaluated[-1] == pytest.approx(expected.item(), rel=1e-5)
    assert evaluated[0] != evaluated[-1]


def test_accumulated_steps_are_divided_whatever_loss_the_user_has(tmp_path):
    found = []
    for accumulated in (1, 2):
        la, trainer = case(tmp_path / str(accumulated))
        trainer.args.max_steps, trainer.args.gradient_accumulation_steps = 30, accumulated
        trainer.args.per_device_train_batch_size = trainer._train_batch_size = 16 // accumulated
        trainer.compute_loss_func = lambda *args, **kwargs: None
        trainer.args.optim, trainer.args.max_grad_norm = "sgd", 0.0  # Adam would divide it out
        trainer.create_accelerator_and_postprocess()
        la.distill(trainer, None)
        found.append(
            [w.detach().clone() for n, w in trainer.model.named_parameters() if ".calibrated." in n]
        )
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_mixture_teaches_its_mean(tmp_path):
    la, trainer = case(tmp_path)
    trainer.model.add_adapter("other", trainer.model.peft_config["default"])
    trainer.model.set_adapter("other")
    with torch.no_grad():
        trainer.model.base_model.model.classifier.modules_to_save["other"].weight.mul_(-6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the other adapter is untrained
        other = make(trainer.model)
        other.fit([texts()])
    trainer.model.set_adapter("default")
    mixture, batch = LaplaceMixture([la, other]), texts()
    targets = mixture(batch, link_approx="mean_field")
    trainer.model.set_adapter(mixture.distill(trainer))
    assert divergence(targets, log_probs(trainer.model, batch)) < 0.1


REFUSED = {
    "an adapter 'default' already": {"adapter_name": "default"},
    "unlabelled must be": {"unlabelled": "more"},
}


def test_what_fails_leaves_nothing_behind(tmp_path):
    la, trainer = case(tmp_path, "bert", Stop(2))
    before, of_trainer = Snapshot(trainer.model), dict(vars(trainer))
    with pytest.raises(RuntimeError, match="killed"):
        la.distill(trainer)
    for message, options in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            la.distill(trainer, **options)
    with pytest.raises(ValueError, match="this one has another"):
        la.distill(case(tmp_path)[1])
    assert_same(trainer.model, before)
    assert list(trainer.model.peft_config) == ["default"]
    assert vars(trainer) == of_trainer
    la, trainer = case(tmp_path, likelihood="regression")
    with pytest.raises(ValueError, match="regression has none"):
        la.distill(trainer)

"""Trainings in stages and students, whatever the weights and the task."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import kl_div, pad
from torch.testing import assert_close
from transformers import Trainer

import laplace_lora_ext
from tests.support.cases import Case
from tests.support.matrices import of_experts, of_tokens
from tests.support.models import (
    N_CLASSES,
    built,
    head_of,
    one_by_one,
    untrained,
    without_labels,
)
from tests.support.posteriors import make, normal
from tests.support.tasks import OF_TARGETS
from tests.support.trainers import trainer_of, values

# Much is said of so few texts.
pytestmark = pytest.mark.filterwarnings("ignore")


def of_images() -> Case:
    """Adapt all convolutions of a classifier of images, and its head."""
    base = built(
        "ResNetForImageClassification",
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
    )
    targets = {"target_modules": ["convolution"], "modules_to_save": ["classifier"]}
    batch = {
        "pixel_values": normal(8, 3, 16, 16).float(),
        "labels": torch.arange(8) % N_CLASSES,
    }
    return Case(get_peft_model(base, LoraConfig(r=2, **targets)), [batch])


BUILD = {"experts": of_experts, "trainable tokens": of_tokens, "images": of_images} | {
    name: task.case for name, task in OF_TARGETS.items()
}


class OfCase(Trainer):
    """Learns by the logits that a posterior reads, as many users' trainers do."""

    logits: Any
    case: Case

    def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Tensor:
        logits = self.logits.for_module(model)(inputs)
        y = inputs["labels"]
        if y.is_floating_point():
            y = y.to(logits)
        return self.case.target.loss(logits, y) / len(logits)


def trainer_for(case: Case, folder: Path, **settings: Any) -> OfCase:
    """Make a trainer of a case's model in float32, with each example three times."""
    rows = one_by_one(case.batches)
    for row in rows:
        # All texts are as long as the longest.
        for key in without_labels(row).keys() - {"pixel_values"}:
            longest = max(batch[key].shape[-1] for batch in case.batches)
            row[key] = pad(row[key], (0, longest - row[key].shape[-1]))
    trainer: Any = trainer_of(
        folder,
        # In the trainer's precision: rounding alone must not look like learning.
        model=case.model.float(),
        data=rows * 3,
        # The model's own signature knows nothing of `score_mask`.
        remove_unused_columns=False,
        save_strategy="no",
        logging_strategy="no",
        **settings,
    )
    # Its class is changed here, since `trainer_of` makes a plain one.
    trainer.__class__ = OfCase
    trainer.case = case
    trainer.logits = make(case.model, **case.keywords).model
    return trainer


@pytest.mark.parametrize(
    "name", ["experts", "trainable tokens", "rewards", "means of choices"]
)
def test_stages_train_and_keep_every_matrix(name, tmp_path):
    case = BUILD[name]()
    untrained(case.model)
    trainer = trainer_for(case, tmp_path)
    before = values(case.model)
    options = {"likelihood": "classification"} | dict(case.keywords)
    la = laplace_lora_ext.train_in_stages(trainer, held_out=0.3, **options)
    assert la.n_data == len(trainer.train_dataset)
    trained = case.weights()
    assert len(trained) == len({block.weight for block in la.blocks})
    for name, weight in trained.items():
        assert not torch.equal(weight, before[name]), name
    X = case.inputs(case.batches[0])
    read = laplace_lora_ext.from_pretrained(case.model, tmp_path)
    assert_close(read(X), la(X), rtol=0, atol=0)


@pytest.mark.parametrize(
    "name",
    ["images", "several labels", "answers of several tokens", "means of choices"],
)
def test_a_student_has_the_posteriors_probabilities(name, tmp_path):
    case = BUILD[name]()
    trainer = trainer_for(
        case, tmp_path, max_steps=300, learning_rate=1e-2, lr_scheduler_type="constant"
    )
    model: Any = case.model
    writes = "class_token_ids" in case.keywords or "normalised" in case.keywords
    # Sure of itself, where the posterior is not.
    head = model.base_model.model.lm_head if writes else head_of(model)
    *_, output_layer = head.modules()
    output_layer.weight.data *= 20
    la = make(model, **case.keywords)
    la.fit(case.batches)
    # So broad a posterior that its predictions are far from the model's.
    la.prior_precision = 1e-7 if writes else 1e-3
    link = {"link_approx": "mean_field", "fitting": True}
    targets = torch.cat([la(X, **link) for X in case.all_inputs()])

    def divergence() -> float:
        model.eval()
        logits = torch.cat([la.model.for_module(model)(X) for X in case.all_inputs()])
        nothing = logits.new_zeros(*logits.shape, logits.shape[-1])
        (p,) = case.target.predictive(logits.detach(), nothing, "probit")
        return kl_div(p.log(), targets, reduction="batchmean").item()

    before = divergence()
    # Otherwise there would be nothing to learn.
    assert before > 0.05
    model.set_adapter(la.distill(trainer, unlabelled=None))
    assert divergence() < 0.3 * before

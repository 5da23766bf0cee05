"""Trainings in stages and students, whatever the weights and the task."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.testing import assert_close
from transformers import Trainer

import laplace_lora_ext
from tests.support.cases import Case
from tests.support.matrices import CASES
from tests.support.models import head_of, one_by_one, untrained, without_labels
from tests.support.posteriors import make
from tests.support.tasks import OF_TARGETS
from tests.support.trainers import trainer_of, values

# Much is said of so few texts.
pytestmark = pytest.mark.filterwarnings("ignore")
BUILD = CASES | {name: task.case for name, task in OF_TARGETS.items()}


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


def rows_of_one_length(batches: list[Any]) -> list[Any]:
    """Take texts out of batches, all as long as the longest."""
    longest = max(batch["input_ids"].shape[-1] for batch in batches)
    rows = one_by_one(batches)
    for row in rows:
        n_missing = longest - row["input_ids"].shape[-1]
        for key, tokens in without_labels(row).items():
            row[key] = pad(tokens, (0, n_missing))
    return rows


def trainer_for(case: Case, folder: Path, **settings: Any) -> OfCase:
    """Make a trainer of a case's model in float32, with each text three times."""
    rows = rows_of_one_length(case.batches)
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
    "name",
    [
        "LoRA of experts (Mixtral)",
        "trainable tokens",
        "rewards",
        "means of choices, padded left",
    ],
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


def divergence(p: Tensor, q: Tensor) -> float:
    """Compute the mean Kullback-Leibler divergence of q from `(..., classes)` p."""
    return (p * (p / q).log()).sum(-1).mean().item()


@pytest.mark.parametrize(
    "name",
    ["several labels", "answers of several tokens", "means of choices, padded left"],
)
def test_a_student_has_the_posteriors_probabilities(name, tmp_path):
    case = BUILD[name]()
    trainer = trainer_for(
        case, tmp_path, max_steps=300, learning_rate=1e-2, lr_scheduler_type="constant"
    )
    model: Any = case.model
    is_classifier = name == "several labels"
    # Sure of itself, where the posterior is not.
    output_layer = head_of(model) if is_classifier else model.base_model.model.lm_head
    output_layer.weight.data *= 20
    la = make(model, **case.keywords)
    la.fit(case.batches)
    # So broad a posterior that its predictions are far from the model's.
    la.prior_precision = 1e-3 if is_classifier else 1e-7
    link = {"link_approx": "mean_field", "fitting": True}
    targets = torch.cat([la(X, **link) for X in case.all_inputs()])

    def divergence_now() -> float:
        model.eval()
        logits = torch.cat([la.model.for_module(model)(X) for X in case.all_inputs()])
        nothing = logits.new_zeros(*logits.shape, logits.shape[-1])
        (p,) = case.target.predictive(logits.detach(), nothing, "probit")
        return divergence(targets, p)

    before = divergence_now()
    # Otherwise there would be nothing to learn.
    assert before > 0.05
    model.set_adapter(la.distill(trainer, unlabelled=None))
    assert divergence_now() < 0.3 * before

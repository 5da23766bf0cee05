"""Trainers of several labels: losses, stages, trainings."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from torch.nn import BCEWithLogitsLoss
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.testing import assert_close
from transformers import Trainer

from laplace_lora_ext import Laplace, train_in_stages
from tests.support.models import lora_model, without_labels
from tests.support.ranks import Texts
from tests.support.trainers import N, trainer_of

# Much is said of so few texts.
pytestmark = pytest.mark.filterwarnings("ignore")

N_LABELS = 3

Batch = dict[str, Tensor]


class Labelled(Texts):
    """Texts with three labels each, all but one of them 1."""

    def __getitem__(self, number: int) -> Batch:
        text = dict(super().__getitem__(number))
        labels = torch.ones(N_LABELS)
        labels[text["labels"]] = 0.0
        return text | {"labels": labels}


def classifier() -> PeftModel:
    """Make a model with three labels, whose adapter is untrained."""
    model = lora_model("bert", torch.float32, n_labels=N_LABELS)
    model.config.problem_type = "multi_label_classification"
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.zeros_(weight)
    return model


def trainer_of_labels(
    folder: Path, model: PeftModel | None = None, **settings: Any
) -> Trainer:
    """Make a trainer of the texts with three labels each."""
    if model is None:
        model = classifier()
    return trainer_of(folder, model=model, data=Labelled(N), **settings)


def batch_of(trainer: Trainer) -> Batch:
    """Collate all training texts."""
    texts = list(trainer.train_dataset)
    return trainer.data_collator(texts)


def logits_of(model: PeftModel, batch: Batch) -> Tensor:
    inputs = without_labels(batch)
    with torch.no_grad():
        output = model.eval()(**inputs)
    return output.logits


def assert_fitted_to_training_texts(la: Any, trainer: Trainer) -> None:
    """Compare a posterior's loss with that of all labels, none of them weighted."""
    assert la.likelihood == "multi_label_classification"
    assert la.n_data == N
    batch = batch_of(trainer)
    loss = binary_cross_entropy_with_logits(
        logits_of(trainer.model, batch), batch["labels"], reduction="sum"
    )
    # Sums in float32, over other batches.
    assert_close(la.loss.float(), loss, rtol=1e-4, atol=1e-4)


class PositivesCount(BCEWithLogitsLoss):
    """A trainer's loss for rare labels, which counts the texts it sees."""

    def __init__(self) -> None:
        weights = torch.tensor([1.0, 4.0, 20.0])
        super().__init__(pos_weight=weights)
        self.n_seen = 0

    def forward(
        self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None
    ) -> Tensor:
        self.n_seen += len(labels)
        return super().forward(outputs["logits"], labels)


def by_second_training(trainer: Trainer) -> Any:
    """Train twice, and fit a posterior of the first training."""
    trainer.train()
    la = Laplace(trainer.model)
    la.fit([batch_of(trainer)])
    la.optimize_prior_precision(method="second_training", trainer=trainer)
    return la


# Steps of four texts: 4 and 1 in stages, 5 and 4 where a second training holds out a
# fifth.
@pytest.mark.parametrize(
    ("posterior_of", "n_texts"), [(train_in_stages, 20), (by_second_training, 36)]
)
def test_weights_of_positives_move_the_weights_and_not_the_likelihood(
    posterior_of, n_texts, tmp_path
):
    model = classifier()
    plain = copy.deepcopy(model)
    trainer = trainer_of_labels(tmp_path / "weighted", model=model)
    loss = PositivesCount()
    trainer.compute_loss_func = loss
    la = posterior_of(trainer)
    assert trainer.compute_loss_func is loss
    assert loss.n_seen == n_texts
    assert_fitted_to_training_texts(la, trainer)

    # Without weights, the label of the heaviest is given less.
    of_plain = trainer_of_labels(tmp_path / "plain", model=plain)
    posterior_of(of_plain)
    batch = batch_of(trainer)
    difference = logits_of(model, batch) - logits_of(plain, batch)
    of_heaviest_label = difference[:, 2]
    assert of_heaviest_label.mean() > 1e-4

    # A student's loss is not the user's.
    la.distill(trainer, None)
    assert loss.n_seen == n_texts

"""Trainers of several labels: losses, stages, trainings, callback."""

import copy
import warnings

import pytest
import torch
from torch.nn import BCEWithLogitsLoss
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.testing import assert_close

from laplace_lora_ext import (
    Laplace,
    LaplaceCallback,
    LaplaceMixture,
    from_pretrained,
    train_in_stages,
)
from laplace_lora_ext.likelihoods import MULTI_LABEL
from laplace_lora_ext.metrics import compare
from tests.support.models import lora_model, without_labels
from tests.support.ranks import Texts
from tests.support.trainers import N, trainer_of, values

N_LABELS = 3


class Labelled(Texts):
    """Texts with three labels each, all but one of them 1."""

    def __getitem__(self, number):
        text = dict(super().__getitem__(number))
        labels = torch.ones(N_LABELS)
        labels[text["labels"]] = 0.0
        return text | {"labels": labels}


@pytest.fixture(autouse=True)
def _few_texts():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def classifier():
    """Make a model with three labels, whose adapter is untrained."""
    model = lora_model("bert", torch.float32, n_labels=N_LABELS)
    model.config.problem_type = MULTI_LABEL
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.zeros_(weight)
    return model


def trainer_of_labels(folder, *callbacks, model=None, **settings):
    return trainer_of(
        folder, *callbacks, model=model or classifier(), data=Labelled(N), **settings
    )


def batch_of(trainer):
    """Collate all training texts."""
    return trainer.data_collator(list(trainer.train_dataset))


def logits_of(model, batch):
    with torch.no_grad():
        return model.eval()(**without_labels(batch)).logits


class PositivesCount(BCEWithLogitsLoss):
    """A trainer's loss for rare labels, which counts the texts it sees."""

    def __init__(self):
        super().__init__(pos_weight=torch.tensor([1.0, 4.0, 20.0]))
        self.n_seen = 0

    def forward(self, outputs, labels, num_items_in_batch=None):
        self.n_seen += len(labels)
        return super().forward(outputs["logits"], labels)


def by_second_training(trainer):
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
    assert la.likelihood == MULTI_LABEL
    assert trainer.compute_loss_func is loss
    n_trained = loss.n_seen
    assert n_trained == n_texts

    batch = batch_of(trainer)
    logits = logits_of(model, batch)
    expected = binary_cross_entropy_with_logits(
        logits, batch["labels"], reduction="sum"
    )
    assert_close(la.loss.float(), expected, rtol=1e-4, atol=1e-4)
    posterior_of(trainer_of_labels(tmp_path / "plain", model=plain))
    of_plain = logits_of(plain, batch)
    assert (logits - of_plain)[:, 2].mean() > 1e-4  # the heaviest label's

    # A student's loss is not the user's.
    la.distill(trainer, None)
    assert loss.n_seen == n_trained


def test_a_second_training_of_several_labels_leaves_a_second_member(tmp_path):
    trainer = trainer_of_labels(tmp_path)
    trainer.train()
    la = Laplace(trainer.model)
    la.fit([batch_of(trainer)])
    before = values(trainer.model)
    history = la.optimize_prior_precision(method="second_training", trainer=trainer)
    for name, value in before.items():
        assert torch.equal(trainer.model.state_dict()[name], value), name
    (other,) = history.posteriors
    assert other.likelihood == MULTI_LABEL
    assert other.n_data == 0.8 * N
    batch = batch_of(trainer)
    mean = (la(batch) + other(batch)) / 2
    assert mean.shape == (N, N_LABELS)
    assert_close(LaplaceMixture([la, other])(batch), mean)


@pytest.mark.parametrize("method", ["agreement", "gridsearch", "second_training"])
def test_the_callback_fits_saves_and_measures_several_labels(method, tmp_path):
    trainer = trainer_of_labels(
        tmp_path, eval_strategy="steps", eval_steps=2, eval_data=Labelled(9)
    )
    callback = LaplaceCallback(method=method, trainer=trainer)
    trainer.add_callback(callback)
    trainer.train()
    la = callback.la
    assert la.likelihood == MULTI_LABEL
    assert la.n_data == N
    batch = batch_of(trainer)
    expected = binary_cross_entropy_with_logits(
        logits_of(trainer.model, batch), batch["labels"], reduction="sum"
    )
    assert_close(la.loss.float(), expected, rtol=1e-4, atol=1e-4)
    read = from_pretrained(trainer.model, tmp_path)
    assert_close(
        read(batch, link_approx="mean_field"), la(batch, link_approx="mean_field")
    )
    (entry,) = [
        each for each in trainer.state.log_history if "laplace_evidence" in each
    ]
    assert entry["laplace_evidence"] == la.log_marginal_likelihood().item()
    held_out = trainer.data_collator(list(trainer.eval_dataset))
    p = la(held_out, link_approx="mean_field")
    labels = held_out["labels"]
    nll = -torch.where(labels > 0, p, 1 - p).log().mean().item()
    assert entry["eval_laplace_nll"] == pytest.approx(nll, rel=1e-4)
    assert entry["eval_laplace_ece"] == pytest.approx(
        compare(la, [held_out]).posterior["ece"]
    )

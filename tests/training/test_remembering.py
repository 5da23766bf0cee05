"""Training that remembers: a penalty in steps, and a fit after a fit."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset
from transformers import TrainerCallback

from laplace_lora_ext import Remember
from tests.support.models import plain_model, ragged_batches
from tests.support.posteriors import (
    STRUCTURES,
    another_training,
    fitted,
    generator,
    make,
    plain_regression,
)
from tests.support.trainers import N, trainer_of


def moved(la, distance=0.1):
    """Move the model's weights away from the posterior's mean; return them, flat."""
    for block in la.blocks:
        noise = torch.randn(block.weight.shape, generator=generator(4)).to(block.weight)
        block.weight.data += distance * noise
    return torch.cat([block.weight.detach().flatten() for block in la.blocks])


def dense_precision(la):
    """The posterior precision as a matrix, whatever the structure is."""
    matrix = la.H
    if hasattr(matrix, "to_matrix"):
        matrix = matrix.to_matrix()
    elif matrix.ndim == 1:
        matrix = torch.diag(matrix)
    return la._H_factor * matrix + torch.diag(la.prior_precision_diag)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_penalty_is_a_quadratic_form_with_its_gradient(structure):
    la, _ = plain_regression(structure=structure)
    la.prior_precision = 3.0
    assert la.penalty() == 0
    distance = moved(la) - la.mean
    for block in la.blocks:
        block.weight.requires_grad_()
    P = dense_precision(la)
    penalty = la.penalty(0.5)
    assert_close(penalty, distance @ P @ distance / 4)
    gradients = torch.autograd.grad(penalty, [block.weight for block in la.blocks])
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    assert_close(flat, P @ distance / 2)


def test_a_posterior_of_the_past_is_the_prior_of_the_next_fit():
    """With the same weights, two fits in turn are one of all data."""
    first, second = ragged_batches()[:1], ragged_batches()[1:]
    past = fitted(batches=first)
    la = fitted(batches=second)
    la.fit(second, prior=past)
    whole = fitted()
    assert la.n_data == whole.n_data
    assert_close(la.loss, whole.loss)
    assert_close(
        la.log_marginal_likelihood(),
        whole.log_marginal_likelihood(),
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_past_loss_follows_its_parabola(structure):
    past, X = plain_regression(structure=structure)
    y = torch.randn(12, 2, generator=generator(1)).double()
    loader = DataLoader(TensorDataset(X, y), batch_size=5)
    loss_before, mean_before = past.loss, past.mean
    curvature = dense_precision(past) - torch.diag(past.prior_precision_diag)
    la = make(past.model.model, structure, "regression", sigma_noise=0.5)
    distance = moved(past) - mean_before
    la.fit(loader)
    alone = la.loss
    la.fit(loader, prior=past)
    parabola = distance @ curvature @ distance / 2 * 0.5**2  # in the loss's own scale
    assert_close(la.loss, alone + loss_before + parabola)
    assert la.n_data == 24


def test_priors_of_other_models_are_refused():
    la, past = fitted(), fitted(structure="diag")
    with pytest.raises(ValueError, match="structure, the likelihood and the layers"):
        la.fit(ragged_batches(), prior=past)
    with pytest.raises(ValueError, match="the same settings"):
        la.fit(ragged_batches(), prior=fitted(rank=2))
    with pytest.raises(ValueError, match="override=True"):
        la.fit(ragged_batches(), override=False, prior=fitted())
    other = another_training()
    other.base_model.model.bert.embeddings.word_embeddings.weight.data.add_(1)
    with pytest.raises(ValueError, match="another base model"):
        la.fit(ragged_batches(), prior=fitted(model=other))


class Gradients(TrainerCallback):
    """Notes the gradients that the optimizer gets."""

    def __init__(self, blocks):
        self.blocks = blocks
        self.noted = []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.noted.append([block.weight.grad.clone() for block in self.blocks])


def gradients_of_training(folder, callbacks, **arguments):
    """Train two steps away from the posterior; return their gradients."""
    la = fitted()
    for block in la.blocks:
        block.weight.requires_grad_()
    moved(la)
    notes = Gradients(la.blocks)
    trainer = trainer_of(
        folder,
        *callbacks(la),
        notes,
        model=la.model.model,
        max_steps=1,
        **arguments,
    )
    trainer.train()
    return la, notes.noted[0]


@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_trainer_adds_the_gradient_of_the_penalty_once_a_step(tmp_path, accumulated):
    arguments = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": accumulated,
        "max_grad_norm": 0.0,
    }
    _, plain = gradients_of_training(tmp_path, lambda la: [], **arguments)
    _, penalised = gradients_of_training(
        tmp_path, lambda la: [Remember(la, la, weight=0.5)], **arguments
    )
    again = fitted()
    for block in again.blocks:
        block.weight.requires_grad_()
    moved(again)
    weights = [block.weight for block in again.blocks]
    expected = torch.autograd.grad(again.penalty(2 * 0.5 / N), weights)
    for without, with_penalty, gradient in zip(plain, penalised, expected, strict=True):
        assert_close(with_penalty - without, gradient)


def test_what_can_not_be_remembered_is_refused(tmp_path):
    with pytest.raises(ValueError, match="pass a fitted posterior"):
        Remember()
    la = fitted()
    with pytest.raises(ValueError, match="weight"):
        Remember(la, weight=-1.0)
    unfitted = make(plain_model())
    with pytest.raises(AttributeError):
        unfitted.penalty()

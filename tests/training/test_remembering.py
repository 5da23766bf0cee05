"""Training that remembers: a penalty in steps, and a fit after a fit."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
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


def move(la: Any) -> Tensor:
    """Move the model's weights away from the posterior's mean; return how far."""
    for block in la.blocks:
        noise = torch.randn(block.weight.shape, generator=generator(4))
        block.weight.data += 0.1 * noise.to(block.weight)
    weights = [block.weight.detach() for block in la.blocks]
    moved = nn.utils.parameters_to_vector(weights)
    return moved - la.mean


def trainable_weights(la: Any) -> list[nn.Parameter]:
    """Let all weights that the posterior is over have gradients."""
    return [block.weight.requires_grad_() for block in la.blocks]


def dense_curvature(la: Any) -> Tensor:
    """Make a matrix of the log-likelihood's curvature, whatever the structure."""
    H = la.H
    if hasattr(H, "to_matrix"):
        H = H.to_matrix()
    elif H.ndim == 1:
        H = H.diag()
    return la._H_factor * H


# --- the penalty ----------------------------------------------------------------------


@pytest.fixture(params=STRUCTURES)
def la(request: pytest.FixtureRequest):
    """A regression of each structure."""
    la, _ = plain_regression(structure=request.param)
    la.prior_precision = 3.0
    return la


def dense_precision(la: Any) -> Tensor:
    return dense_curvature(la) + la.prior_precision_diag.diag()


def test_at_the_posteriors_mean_there_is_no_penalty(la):
    assert la.penalty() == 0


def test_the_penalty_is_a_quadratic_form(la):
    P = dense_precision(la)
    distance = move(la)
    found = la.penalty(weight=0.5)
    whole = distance @ P @ distance / 2
    assert_close(found, 0.5 * whole)


def test_the_penalty_has_the_gradient_of_a_quadratic_form(la):
    P = dense_precision(la)
    distance = move(la)
    weights = trainable_weights(la)
    penalty = la.penalty(weight=0.5)
    gradients = torch.autograd.grad(penalty, weights)
    found = nn.utils.parameters_to_vector(gradients)
    expected = 0.5 * P @ distance
    assert_close(found, expected)


# --- a fit after a fit ----------------------------------------------------------------


def test_a_posterior_of_the_past_is_the_prior_of_the_next_fit():
    # With the same weights, two fits in turn are one of all data.
    first, *others = ragged_batches()
    past = fitted(batches=[first])
    la = fitted(batches=others)
    la.fit(others, prior=past)
    whole = fitted()
    assert la.n_data == whole.n_data
    assert_close(la.loss, whole.loss)
    found = la.log_marginal_likelihood()
    expected = whole.log_marginal_likelihood()
    # At rank 3, what a fit leaves out depends on where the other has ended.
    assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_past_loss_follows_its_parabola(structure):
    past, X = plain_regression(structure=structure)
    y = torch.randn(12, 2, generator=generator(1)).double()
    loader = DataLoader(TensorDataset(X, y), batch_size=5)
    la = make(
        past.model.model,
        structure,
        "regression",
        sigma_noise=0.5,
    )
    past_loss = past.loss
    # The loss is half the sum of squares, which the log-likelihood has divided by the
    # variance of the noise.
    curvature = dense_curvature(past) * 0.5**2
    distance = move(past)
    la.fit(loader)
    alone = la.loss
    la.fit(loader, prior=past)
    parabola = distance @ curvature @ distance / 2
    assert_close(la.loss, alone + past_loss + parabola)
    assert la.n_data == 24


def of_another_structure():
    return fitted(structure="diag")


def of_another_rank():
    return fitted(rank=2)


def of_another_base_model():
    model = another_training()
    embeddings = model.base_model.model.bert.embeddings.word_embeddings
    embeddings.weight.data.add_(1)
    return fitted(model=model)


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (of_another_structure, "structure, the likelihood and the layers"),
        (of_another_rank, "the same settings"),
        (of_another_base_model, "another base model"),
    ],
)
def test_priors_of_other_models_are_refused(prior, message):
    la = fitted()
    past = prior()
    with pytest.raises(ValueError, match=message):
        la.fit(ragged_batches(), prior=past)


def test_a_fit_that_goes_on_has_its_prior_already():
    la = fitted()
    past = fitted()
    with pytest.raises(ValueError, match="override=True"):
        la.fit(ragged_batches(), override=False, prior=past)


# --- a trainer's steps ----------------------------------------------------------------


class Gradients(TrainerCallback):
    """Notes the gradients that the optimizer gets."""

    def __init__(self, blocks: Sequence[Any]) -> None:
        self.blocks = blocks
        self.noted: list[list[Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        of_step = [block.weight.grad.clone() for block in self.blocks]
        self.noted.append(of_step)


@pytest.fixture
def away() -> Callable[[], Any]:
    """Makes posteriors whose model has moved away from them, always alike."""

    def make_one() -> Any:
        la = fitted()
        trainable_weights(la)
        move(la)
        return la

    return make_one


@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_trainer_adds_the_gradient_of_the_penalty_once_a_step(
    accumulated,
    away,
    tmp_path,
):
    def gradients_of_a_step(
        la: Any,
        *callbacks: TrainerCallback,
    ) -> list[Tensor]:
        notes = Gradients(la.blocks)
        trainer = trainer_of(
            tmp_path,
            *callbacks,
            notes,
            model=la.model.model,
            max_steps=1,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=accumulated,
            # A limit would hide a wrong factor.
            max_grad_norm=0.0,
        )
        trainer.train()
        (gradients,) = notes.noted
        return gradients

    plain = gradients_of_a_step(away())
    la = away()
    # Of the same posterior twice.
    remember = Remember(la, la, weight=0.5)
    penalised = gradients_of_a_step(la, remember)
    added = []
    for without, with_penalty in zip(plain, penalised, strict=True):
        added.append(with_penalty - without)

    again = away()
    # A step has the mean loss of an example.
    penalty = 2 * again.penalty(0.5 / N)
    expected = torch.autograd.grad(penalty, trainable_weights(again))
    assert_close(added, list(expected))


def test_there_is_something_to_remember():
    with pytest.raises(ValueError, match="pass a fitted posterior"):
        Remember()


def test_a_negative_weight_is_refused():
    with pytest.raises(ValueError, match="weight"):
        Remember(fitted(), weight=-1.0)


def test_a_posterior_that_is_not_fitted_has_no_penalty():
    unfitted = make(plain_model())
    with pytest.raises(AttributeError):
        unfitted.penalty()

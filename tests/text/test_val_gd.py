"""Gradient descent on validation texts, against scores and differences of them."""

import pytest
import torch

from laplace_lora_ext import TokenValGD
from laplace_lora_ext.tuning.loss_search import draw_seed
from tests.support.posteriors import generator
from tests.support.ranks import on_ranks
from tests.support.texts import encoder_decoder, fitted_text, pairs_of_texts, text_batches

STRUCTURES = ["scalar", "layerwise"]
N_DRAWS = 3


def validation(batch_size=2):
    return text_batches(lengths=(6, 5, 7, 4), seed=7, batch_size=batch_size)


def loss_by_scores(la, prior_precision, data):
    """Mean negative log-likelihood of a token."""
    la.prior_precision = prior_precision
    scores = [la.score(batch, N_DRAWS, generator(3)) for batch in data]
    total = sum(of_batch.sums.log_prob.sum() for of_batch in scores)
    return -total / sum(of_batch.labelled.sum() for of_batch in scores)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", ["gpt2", "bart"])  # T5 normalises in float32
def test_the_gradient_is_that_of_scores(kind, structure):
    model = None if kind == "gpt2" else encoder_decoder(kind)
    data = validation() if kind == "gpt2" else [pairs_of_texts()]
    la = fitted_text(model, None if model is None else data)
    n_priors = 1 if structure == "scalar" else len(la.blocks)
    logarithm = torch.linspace(0.3, 1.2, n_priors).double()
    method = TokenValGD(val_loader=data, n_samples=N_DRAWS)
    leaf, seed = logarithm.clone().requires_grad_(), draw_seed(generator(3))
    loss, gradient = method._loss_and_gradient(la, leaf, seed)
    assert loss == pytest.approx(loss_by_scores(la, logarithm.exp(), data).item(), rel=1e-10)
    for index, step in enumerate(1e-5 * torch.eye(n_priors).double()):
        high, low = (loss_by_scores(la, (logarithm + s).exp(), data) for s in (step, -step))
        assert gradient[index].item() == pytest.approx(
            ((high - low) / 2e-5).item(), rel=1e-4, abs=1e-9
        )


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_least_loss_on_the_way_is_chosen(structure):
    la = fitted_text()
    history = la.optimize_prior_precision(
        method="val_gd",
        val_loader=validation(),
        prior_structure=structure,
        init_prior_prec=0.1,
        n_samples=N_DRAWS,
        generator=generator(3),
    )
    n_priors = 1 if structure == "scalar" else len(la.blocks)
    assert history.prior_precision.shape == (21, n_priors)
    assert history.objective.min() < history.objective[0] - 1e-3
    torch.testing.assert_close(history.prior_precision[0], torch.full((n_priors,), 0.1).double())
    chosen = la.prior_precision.clone()
    assert torch.equal(chosen, history.prior_precision[history.objective.argmin()].to(chosen))
    assert all(parameter.grad is None for parameter in la.model.parameters())


def test_ranks_choose_by_the_texts_of_all_of_them():
    la = fitted_text()

    def choose(texts, draws):
        history = TokenValGD(val_loader=texts, generator=draws, n_samples=2, n_steps=2)(la)
        return history.objective, la.prior_precision

    expected = choose(validation(), generator(draw_seed(generator())))
    for result in on_ranks(lambda rank: choose(validation()[rank::2], generator(rank)), 2):
        assert not isinstance(result, Exception), result
        torch.testing.assert_close(result, expected)


def test_what_does_not_fit_is_refused_and_the_prior_stays():
    la = fitted_text()
    with pytest.raises(ValueError, match="at least 1"):
        TokenValGD(val_loader=[], n_steps=0)
    (batch,) = text_batches(batch_size=6)
    empty = batch | {"labels": torch.full_like(batch["labels"], -100)}
    with pytest.raises(ValueError, match="no token is labelled"):
        la.optimize_prior_precision(method="val_gd", val_loader=[empty], init_prior_prec=3.0)
    assert la.prior_precision.item() == 1

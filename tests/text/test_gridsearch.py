"""The grid of prior precisions on validation texts, against scores at each of them."""

import pytest
import torch

from laplace_lora_ext import TokenGridSearch
from laplace_lora_ext.text.perturbations import ForwardMode
from tests.support.posteriors import generator
from tests.support.texts import fitted_text, text_batches

GRID = {"log_prior_prec_min": -1, "log_prior_prec_max": 3, "grid_size": 17, "n_samples": 2}


def validation():
    return text_batches(lengths=(6, 5, 7, 4), seed=7)


def direct(la, prior_precision):
    """Mean negative log-likelihood of a token, by one score of each batch."""
    la.prior_precision = prior_precision
    scores = [la.score(batch, 2, generator(3)) for batch in validation()]
    total = sum(of_batch.sums.log_prob.sum() for of_batch in scores)
    return -total / sum(of_batch.labelled.sum() for of_batch in scores)


@pytest.mark.parametrize("layerwise", [False, True])
def test_interpolated_losses_are_those_of_direct_scores(layerwise):
    la = fitted_text(products=ForwardMode())
    base = torch.linspace(0.5, 2, len(la.blocks)).double() if layerwise else torch.ones(1).double()
    start = {"init_prior_prec": base} if layerwise else {}
    history = la.optimize_prior_precision(
        method="gridsearch", val_loader=validation(), generator=generator(3), **GRID, **start
    )
    chosen = la.prior_precision.clone()
    grid = torch.logspace(-1, 3, 17).double()
    torch.testing.assert_close(history.prior_precision, grid[:, None] * base)
    for index in (0, 5, 9, 16):
        expected = direct(la, history.prior_precision[index])
        assert history.objective[index].item() == pytest.approx(expected.item(), rel=2e-3)
    torch.testing.assert_close(
        chosen, history.prior_precision[history.objective.argmin()].to(chosen)
    )


def test_the_batches_do_not_matter():
    la = fitted_text(products=ForwardMode())
    losses = [
        TokenGridSearch(val_loader=batches, generator=generator(3), **GRID)(la).objective
        for batches in (
            text_batches(lengths=(6, 5, 7, 4), seed=7),
            text_batches(lengths=(6, 5, 7, 4), seed=7, batch_size=1),
            text_batches(lengths=(6, 5, 7, 4), seed=7, batch_size=4, padding_side="left"),
        )
    ]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-9, atol=0)
    torch.testing.assert_close(losses[0], losses[2], rtol=1e-9, atol=0)


def test_products_are_made_at_the_nodes_alone():
    la = fitted_text(products=ForwardMode())
    calls = []
    la.model.register_forward_hook(lambda *_: calls.append(1))
    la.optimize_prior_precision(
        "gridsearch", val_loader=validation(), **(GRID | {"grid_size": 200})
    )
    assert len(calls) <= 2 * (1 + 2 * 8)  # two batches, and eight nodes of two draws each


def test_what_is_wrong_with_the_data_is_said_and_the_prior_stays():
    la = fitted_text()
    before = la.prior_precision.clone()
    unlabelled = validation()[0] | {"labels": torch.full((3, 7), -100)}
    with pytest.raises(ValueError, match="batch 1: no token is labelled"):
        la.optimize_prior_precision("gridsearch", val_loader=[validation()[0], unlabelled], **GRID)
    with pytest.raises(ValueError, match="no data"):
        la.optimize_prior_precision("gridsearch", val_loader=[], **GRID)
    with pytest.raises(ValueError, match="pass val_loader"):
        la.optimize_prior_precision("gridsearch")
    assert torch.equal(la.prior_precision, before)

"""A prior precision for LoRA weights, and one for heads."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext import Agreement, GridSearch, ValGD
from laplace_lora_ext.predicting import Predictor
from tests.support.matrices import plain
from tests.support.models import pairs
from tests.support.posteriors import (
    PRIORS_ALONE,
    count_forward_passes,
    make,
    validation_loss,
)
from tests.tuning.test_agreement import change

GRID = PRIORS_ALONE | {"grid_size": 5}
# The grid's numbers.
POWERS_OF_TEN = (0.01, 0.1, 1.0, 10.0, 100.0)


def with_head(structure: str = "lowrank_kron"):
    """Fit a posterior over an adapter and a head of a plain module."""
    la = make(plain(), structure, modules_to_save=True)
    la.fit(pairs(3))
    return la


@pytest.fixture
def la():
    return with_head()


def of_kinds(la: Any, numbers: Tensor) -> Tensor:
    """Give LoRA weights the first number, and heads the second."""
    of_lora, of_head = numbers
    return torch.where(are_heads(la), of_head, of_lora)


def are_heads(la: Any) -> Tensor:
    """Tell which blocks belong to the head, `(blocks,)`."""
    of_head = [block.kind == "head" for block in la.blocks]
    return torch.tensor(of_head)


def chosen(la: Any) -> Tensor:
    """Find the two numbers that a search has chosen."""
    prior = la.prior_precision.detach().double()
    is_head = are_heads(la)
    (of_lora,) = prior[~is_head].unique()
    (of_head,) = prior[is_head].unique()
    return torch.stack([of_lora, of_head])


# --- by the evidence ------------------------------------------------------------------


def test_the_evidence_is_highest_at_the_two_numbers(la):
    la.optimize_prior_precision(method="marglik")
    best = chosen(la)
    assert best[0] != best[1]
    logarithms = best.log().requires_grad_()
    la.log_marginal_likelihood(of_kinds(la, logarithms.exp())).backward()
    # The steps end near the top, not on it.
    assert logarithms.grad.abs().max() < 0.05
    ValGD(val_loader=pairs(2, n=5), n_steps=20)(la)
    of_lora, of_head = chosen(la)
    assert of_lora != of_head
    la.optimize_prior_precision(method="marglik", prior_structure="scalar")
    assert la.prior_precision.shape == (1,)


# --- by validation data ---------------------------------------------------------------


def test_a_grid_search_tries_all_pairs_in_one_pass_and_takes_one(la):
    data = pairs(2, n=5)
    passes = count_forward_passes(la)
    history = GridSearch(val_loader=data, **GRID)(la)
    assert len(passes) == len(data)
    found = {}
    for trial in history.trials:
        la.prior_precision = trial.prior_precision
        # Rounded, so that the grid's numbers find them.
        found[tuple(chosen(la).numpy().round(6))] = trial.objective
    expected = {}
    for pair in itertools.product(POWERS_OF_TEN, repeat=2):
        prior = of_kinds(la, torch.tensor(pair).double())
        expected[pair] = validation_loss(la, prior, data, link_approx="mean_field")
    assert found == pytest.approx(expected, rel=1e-5)


# Statistics serve all pairs, which are then tried unasked.
@pytest.mark.parametrize(
    ("structure", "options", "n_points"),
    [
        ("lowrank_kron", {}, 5**2),
        ("diag", {}, 5),
        # Numbers to start from keep their structure.
        ("lowrank_kron", {"init_prior_prec": torch.ones(7)}, 5),
        ("diag", {"init_prior_prec": torch.ones(7), "prior_structure": "kind"}, 5**2),
    ],
)
def test_pairs_are_tried_where_they_cost_little_or_are_asked_for(
    structure, options, n_points
):
    la = with_head(structure)
    search = GridSearch(val_loader=pairs(1), **options, **GRID)
    assert len(search(la).trials) == n_points


@pytest.mark.parametrize(("n_kinds", "n_points"), [(1, 100), (2, 25**2), (3, 8**3)])
def test_more_kinds_have_fewer_points_each(n_kinds, n_points):
    kinds = torch.arange(4) % n_kinds
    grid = GridSearch(val_loader=[])._grid(Predictor(), kinds)
    assert grid.shape == (n_points, 4)
    assert len(grid[:, :n_kinds].unique(dim=0)) == n_points
    # From one end to the other, however few points there are.
    ones = torch.ones(4)
    assert_close(grid[0], 1e-4 * ones)
    assert_close(grid[-1], 1e4 * ones)


# --- by agreement ---------------------------------------------------------------------


def test_draws_of_each_kind_change_predictions_alike(la):
    data = pairs(3)
    statistics = la.predictive_statistics(data)
    Agreement(train_loader=statistics, n_samples=400)(la)
    lora, head = chosen(la)
    # So high that the weights stay at their MAP.
    held = torch.tensor(1e30).double()
    changes = []
    for numbers in ((lora, held), (held, head), (lora, head)):
        la.prior_precision = of_kinds(la, torch.stack(numbers))
        changes.append(change(la, data, n_samples=4000))
    by_lora, by_head, by_both = changes
    # A common factor does not change both alike.
    assert by_lora == pytest.approx(by_head, rel=0.2)
    # As much as is allowed, unless told otherwise.
    assert by_both == pytest.approx(0.1, rel=0.1)

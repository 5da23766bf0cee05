"""A prior precision for LoRA weights, and one for heads."""

import itertools
from collections.abc import Sequence
from copy import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import nll_loss
from torch.testing import assert_close

from laplace_lora_ext import GridSearch, from_pretrained, train_in_stages
from laplace_lora_ext.predictive.posterior import Members
from laplace_lora_ext.training.stages import choose_priors
from tests.support.heads import plain
from tests.support.models import pairs
from tests.support.posteriors import (
    count_forward_passes,
    make,
    normal,
    plain_regression,
)
from tests.support.trainers import trainer_of

GRID = {
    "log_prior_prec_min": -2,
    "log_prior_prec_max": 2,
    "grid_size": 5,
    "optimize_scale": False,
}


# The grid's numbers.
POWERS_OF_TEN = (0.01, 0.1, 1.0, 10.0, 100.0)

Batches = list[tuple[Tensor, Tensor]]


def with_head(structure: str = "lowrank_kron"):
    """Fit a posterior over an adapter and a head of a plain module."""
    la = make(plain(), structure, modules_to_save=True)
    la.fit(pairs(3))
    return la


@pytest.fixture
def la():
    return with_head()


@pytest.fixture
def validation() -> Batches:
    return pairs(2, n=5)


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


def slope(la: Any, prior: Tensor) -> Tensor:
    """Differentiate the evidence in the logarithms of the two prior precisions."""
    logarithms = prior.log().requires_grad_()
    by_block = of_kinds(la, logarithms.exp())
    evidence = la.log_marginal_likelihood(by_block)
    (gradient,) = torch.autograd.grad(evidence, logarithms)
    return gradient


@pytest.mark.parametrize("structure", ["lowrank_kron", "full"])
def test_the_evidence_is_highest_at_the_two_numbers(structure):
    la = with_head(structure)
    la.optimize_prior_precision(method="marglik")
    best = chosen(la)
    # The hundred steps end near the top, not on it.
    assert slope(la, best).abs().max() < 0.05
    assert best[0] != best[1]


def test_with_lora_alone_kinds_are_one():
    la = make(plain())
    la.fit(pairs(3))
    la.optimize_prior_precision(method="marglik")
    scalar = la.prior_precision
    assert scalar.shape == (1,)
    la.optimize_prior_precision(method="marglik", prior_structure="kind")
    by_kind = la.prior_precision
    expected = scalar.expand(len(la.blocks))
    # Two climbs of the same evidence end near its top, not at one point.
    assert_close(by_kind, expected, rtol=1e-3, atol=0)


def test_a_scalar_is_one_number_where_it_is_asked_for(la):
    la.optimize_prior_precision(method="marglik", prior_structure="scalar")
    assert la.prior_precision.shape == (1,)


# --- by validation data ---------------------------------------------------------------


def mean_loss(la: Any, validation: Batches) -> float:
    """Average the negative log-likelihood by predictions from inputs."""
    losses = [
        nll_loss(la(X, link_approx="mean_field").log(), labels, reduction="none")
        for X, labels in validation
    ]
    return torch.cat(losses).mean().item()


def losses_by_pair(la: Any, history: Any) -> dict[tuple[float, float], float]:
    """Sort a search's losses by the two numbers that it tried."""
    losses = {}
    for trial in history.trials:
        la.prior_precision = trial.prior_precision
        of_lora, of_head = chosen(la).tolist()
        # Rounded, so that the grid's numbers find them.
        losses[round(of_lora, 6), round(of_head, 6)] = trial.objective
    return losses


def test_a_grid_search_tries_all_pairs_in_one_pass_and_takes_one(la, validation):
    passes = count_forward_passes(la)
    history = GridSearch(val_loader=validation, **GRID)(la)
    assert len(passes) == len(validation)
    chosen_loss = history.chosen.objective
    assert mean_loss(la, validation) == pytest.approx(chosen_loss, rel=1e-5)
    found = losses_by_pair(la, history)
    expected = {}
    for pair in itertools.product(POWERS_OF_TEN, repeat=2):
        la.prior_precision = of_kinds(la, torch.tensor(pair).double())
        expected[pair] = mean_loss(la, validation)
    assert found == pytest.approx(expected, rel=1e-5)

    # Statistics that are given serve all pairs.
    statistics = la.predictive_statistics(validation, dtype=torch.float64)
    passes.clear()
    by_statistics = GridSearch(val_loader=statistics, **GRID)(la)
    assert not passes
    # Those that a search makes itself are in float32.
    losses = by_statistics.objective
    assert_close(losses, history.objective, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("structure", "n_points"), [("lowrank_kron", 5**2), ("diag", 5)]
)
def test_pairs_are_tried_unasked_where_statistics_serve_all(structure, n_points):
    la = with_head(structure)
    assert len(GridSearch(val_loader=pairs(1), **GRID)(la).trials) == n_points
    search = GridSearch(val_loader=pairs(1), prior_structure="kind", **GRID)
    assert len(search(la).trials) == 5**2


def test_gradient_descent_ends_with_two_numbers(la, validation):
    la.optimize_prior_precision(method="val_gd", val_loader=validation, n_steps=50)
    of_lora, of_head = chosen(la)
    assert of_lora != of_head


@pytest.mark.parametrize(("prior_structure", "n_points"), [(None, 5), ("kind", 5**2)])
def test_numbers_to_start_from_keep_their_structure(la, prior_structure, n_points):
    search = GridSearch(
        val_loader=pairs(2),
        init_prior_prec=torch.linspace(1, 2, len(la.blocks)),
        prior_structure=prior_structure,
        **GRID,
    )
    assert len(search(la).trials) == n_points


@pytest.mark.parametrize(("n_kinds", "n_points"), [(1, 100), (2, 25**2), (3, 8**3)])
def test_more_kinds_have_fewer_points_each(n_kinds, n_points):
    kinds = torch.arange(4) % n_kinds
    grid = GridSearch(val_loader=[])._grid(Members(), kinds)
    assert grid.shape == (n_points, 4)
    assert len(grid[:, :n_kinds].unique(dim=0)) == n_points
    # From one end to the other, however few points there are.
    ones = torch.ones(4)
    assert_close(grid[0], 1e-4 * ones)
    assert_close(grid[-1], 1e4 * ones)


# --- by agreement ---------------------------------------------------------------------


def change(la: Any, data: Batches, of_lora: Tensor, of_head: Tensor) -> float:
    """Measure draws' mean total variation distance at two numbers, by other draws."""
    la.prior_precision = of_kinds(la, torch.stack([of_lora, of_head]))
    distances = []
    for X, _ in data:
        f_mu, f_var = la.predictive_moments(X)
        values, vectors = torch.linalg.eigh(f_var)
        # Rounding leaves eigenvalues a little below 0 where all weights are held.
        root = vectors * values.clamp_min(0).sqrt()[:, None]
        noise = torch.randn(4000, *f_mu.shape).to(f_mu)
        drawn = f_mu + torch.einsum("bij,sbj->sbi", root, noise)
        of_draws = (drawn.softmax(-1) - f_mu.softmax(-1)).abs().sum(-1) / 2
        distances.append(of_draws.mean(0))
    return torch.cat(distances).mean().item()


def test_draws_of_each_kind_change_predictions_alike():
    la = with_head()
    data = pairs(3)
    la.optimize_prior_precision(method="agreement", train_loader=data, n_samples=400)
    lora, head = chosen(la)
    # So high that the weights stay at their MAP.
    held = torch.tensor(1e30).double()
    torch.manual_seed(0)
    by_lora = change(la, data, lora, held)
    by_head = change(la, data, held, head)
    by_both = change(la, data, lora, head)
    # A common factor does not change both alike.
    assert by_lora == pytest.approx(by_head, rel=0.2)
    # As much as is allowed, unless told otherwise.
    assert by_both == pytest.approx(0.1, rel=0.1)
    assert by_both > by_lora


# --- trainings ------------------------------------------------------------------------


def names_of(la: Any) -> list[str]:
    return [block.name for block in la.blocks]


def assert_two_numbers(members: Sequence[Any]) -> None:
    """Check that members have heads, and a prior precision for each kind."""
    for member in members:
        kinds = {block.kind for block in member.blocks}
        assert kinds == {"lora", "head"}
        n_blocks = len(member.blocks)
        assert member.prior_precision.shape == (n_blocks,)
        # Which fails where a kind has more than one number.
        chosen(member)


def test_stages_choose_two_numbers_and_keep_the_heads(tmp_path):
    trainer = trainer_of(tmp_path)
    la = train_in_stages(trainer, modules_to_save=True)
    assert_two_numbers([la])
    loaded = from_pretrained(la.model.model, tmp_path)
    assert names_of(loaded) == names_of(la)
    assert torch.equal(loaded.prior_precision, la.prior_precision)


def test_stages_of_two_members_choose_two_numbers_for_each(tmp_path):
    trainer = trainer_of(tmp_path)
    mixture = train_in_stages(trainer, members=2, modules_to_save=True)
    assert len(mixture.members) == 2
    assert_two_numbers(mixture.members)


def test_members_choose_how_kinds_differ_by_the_prior_alone(la, validation):
    # Too sure, so that a scale of the logits would change what is chosen.
    for block in la.blocks[-2:]:
        block.weight.data *= 4
    la.fit(pairs(3))
    alone, scaled = copy(la), copy(la)
    GridSearch(val_loader=validation, optimize_scale=False)(alone)
    GridSearch(val_loader=validation)(scaled)
    both = choose_priors([la, la], validation).hyperparameters
    for found in both:
        factor = found.prior_precision / alone.prior_precision
        assert_close(factor, factor[:1].expand_as(factor))
    factor = both[0].prior_precision / scaled.prior_precision
    assert factor.max() > 1.1 * factor.min()


def test_members_choose_their_own_noise():
    la, X = plain_regression()
    f_mu, _ = la.predictive_moments(X)
    batches = [(X, f_mu + 0.1 * normal(*f_mu.shape, seed=3))]
    alone = copy(la)
    GridSearch(val_loader=batches)(alone)
    assert alone.sigma_noise < 0.4
    for found in choose_priors([la, la], batches).hyperparameters:
        assert_close(found.sigma_noise, alone.sigma_noise)


def test_a_second_training_chooses_two_numbers(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.train()
    la = make(trainer.model, modules_to_save=True)
    loader = trainer.get_eval_dataloader(trainer.train_dataset)
    la.fit(loader)
    history = la.optimize_prior_precision(method="second_training", trainer=trainer)
    (other,) = history.posteriors
    of_other = are_heads(other)
    assert torch.equal(of_other, are_heads(la))
    assert torch.equal(la.prior_precision, other.prior_precision)
    assert_two_numbers([la])

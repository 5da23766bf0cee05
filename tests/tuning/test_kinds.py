"""A prior precision for LoRA weights, and one for heads."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import nll_loss
from torch.testing import assert_close

from laplace_lora_ext import GridSearch, from_pretrained, train_in_stages
from laplace_lora_ext.tuning.kinds import Kinds
from tests.support.heads import plain
from tests.support.models import pairs
from tests.support.posteriors import count_forward_passes, make
from tests.support.trainers import trainer_of

GRID = {
    "log_prior_prec_min": -2,
    "log_prior_prec_max": 2,
    "grid_size": 5,
    "optimize_scale": False,
}


def with_head(structure: str = "lowrank_kron"):
    """Fit a posterior over an adapter and a head of a plain module."""
    la = make(plain(), structure, modules_to_save=True)
    la.fit(pairs(3))
    return la


def of_kinds(la, numbers: torch.Tensor) -> torch.Tensor:
    """Give LoRA weights the first number, and heads the second."""
    of_lora, of_head = numbers
    return torch.where(are_heads(la), of_head, of_lora)


def are_heads(la) -> torch.Tensor:
    """Tell which blocks belong to the head, `(blocks,)`."""
    return torch.tensor([block.kind == "head" for block in la.blocks])


def slope(la, prior: torch.Tensor) -> torch.Tensor:
    """Differentiate the evidence in the logarithms of the two prior precisions."""
    logarithms = prior.log().requires_grad_()
    by_block = of_kinds(la, logarithms.exp())
    evidence = la.log_marginal_likelihood(by_block)
    (gradient,) = torch.autograd.grad(evidence, logarithms)
    return gradient


def chosen(la) -> torch.Tensor:
    """Find the two numbers that a search has chosen."""
    prior = la.prior_precision.detach().double()
    is_head = are_heads(la)
    (of_lora,) = prior[~is_head].unique()
    (of_head,) = prior[is_head].unique()
    return torch.stack([of_lora, of_head])


def test_the_evidence_is_highest_at_the_two_numbers():
    la = with_head()
    la.optimize_prior_precision(method="marglik")
    best = chosen(la)
    of_lora, of_head = best
    assert of_lora != of_head
    assert slope(la, best).abs().max() < 0.05


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_the_evidence_of_every_structure_has_two_numbers(structure):
    la = with_head(structure)
    la.optimize_prior_precision(method="marglik")
    assert slope(la, chosen(la)).abs().max() < 0.05


def mean_loss(la, validation) -> float:
    losses = []
    for X, labels in validation:
        log_p = la(X, link_approx="mean_field").log()
        losses.append(nll_loss(log_p, labels, reduction="none"))
    return torch.cat(losses).mean().item()


def test_a_grid_search_tries_all_pairs_in_one_pass_and_takes_the_best():
    la = with_head()
    validation = pairs(2, n=5)
    passes = count_forward_passes(la)
    history = la.optimize_prior_precision(
        method="gridsearch", val_loader=validation, **GRID
    )
    assert len(passes) == len(validation)
    tried = {}
    for point, loss in zip(history.prior_precision, history.objective, strict=True):
        la.prior_precision = point
        of_lora, of_head = chosen(la).tolist()
        # Rounded, so that the numbers below find them.
        pair = (round(of_lora, 6), round(of_head, 6))
        tried[pair] = loss.item()

    lowest = math.inf
    powers_of_ten = (0.01, 0.1, 1.0, 10.0, 100.0)
    for pair in itertools.product(powers_of_ten, repeat=2):
        numbers = torch.tensor(pair, dtype=torch.float64)
        la.prior_precision = of_kinds(la, numbers)
        expected = mean_loss(la, validation)
        assert tried[pair] == pytest.approx(expected, rel=1e-5)
        lowest = min(lowest, expected)
    assert history.objective.min() == pytest.approx(lowest, rel=1e-5)


def test_statistics_that_are_given_serve_all_pairs():
    la = with_head()
    validation = pairs(2, n=5)
    statistics = la.predictive_statistics(validation, dtype=torch.float64)
    passes = count_forward_passes(la)
    by_statistics = GridSearch(val_loader=statistics, **GRID)
    found = la.optimize_prior_precision(method=by_statistics)
    assert not passes
    by_data = GridSearch(val_loader=validation, **GRID)
    expected = la.optimize_prior_precision(method=by_data)
    assert_close(found.objective, expected.objective, rtol=1e-5, atol=1e-6)


def test_gradient_descent_ends_with_two_numbers():
    la = with_head()
    la.optimize_prior_precision(method="val_gd", val_loader=pairs(2, n=5), n_steps=50)
    of_lora, of_head = chosen(la)
    assert of_lora != of_head


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag"])
def test_draws_of_each_kind_change_predictions_alike(structure):
    la = with_head(structure)
    data = pairs(3)
    la.optimize_prior_precision(method="agreement", train_loader=data, n_samples=400)
    lora, head = chosen(la)
    held = torch.tensor(1e30).double()  # so high that the weights stay at their MAP
    torch.manual_seed(0)
    by_lora = change(la, data, lora, held)
    by_head = change(la, data, held, head)
    by_both = change(la, data, lora, head)
    # A common factor does not change both alike.
    assert by_lora == pytest.approx(by_head, rel=0.2)
    assert by_both == pytest.approx(0.1, rel=0.1)
    assert by_both > by_lora


def change(la, data, of_lora: torch.Tensor, of_head: torch.Tensor) -> float:
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
        differences = drawn.softmax(-1) - f_mu.softmax(-1)
        of_draws = differences.abs().sum(-1) / 2
        distances.append(of_draws.mean(0))
    return torch.cat(distances).mean().item()


def test_with_lora_alone_kinds_are_one():
    la = make(plain())
    la.fit(pairs(3))
    la.optimize_prior_precision(method="marglik")
    scalar = la.prior_precision
    assert scalar.shape == (1,)
    la.optimize_prior_precision(method="marglik", prior_structure="kind")
    expected = scalar.expand(len(la.blocks))
    assert_close(la.prior_precision, expected, rtol=1e-3, atol=0)


def test_a_scalar_is_one_number_where_it_is_asked_for():
    la = with_head()
    la.optimize_prior_precision(method="marglik", prior_structure="scalar")
    assert la.prior_precision.shape == (1,)


def test_numbers_to_start_from_keep_their_structure():
    la = with_head()
    options = {"init_prior_prec": torch.linspace(1, 2, len(la.blocks)), **GRID}
    size = GRID["grid_size"]
    search = GridSearch(val_loader=pairs(2), **options)
    history = la.optimize_prior_precision(method=search)
    assert len(history.objective) == size
    of_kinds = GridSearch(val_loader=pairs(2), prior_structure="kind", **options)
    history = la.optimize_prior_precision(method=of_kinds)
    assert len(history.objective) == size**2


@pytest.mark.parametrize(
    ("n_kinds", "n_points"),
    [
        (1, 100),
        (2, 25**2),
        (3, 8**3),
    ],
)
def test_more_kinds_have_fewer_points_each(n_kinds, n_points):
    kinds = Kinds(torch.arange(4) % n_kinds)
    grid = kinds.grid(low=-4, high=4, size=100, power=10.0)
    assert grid.shape == (n_points, 4)
    by_kind = grid[:, :n_kinds]
    assert len(by_kind.unique(dim=0)) == n_points
    assert_close(grid[0], torch.full((4,), 1e-4))
    assert_close(grid[-1], torch.full((4,), 1e4))


# --- trainings ------------------------------------------------------------------------


def names_of(la) -> list[str]:
    return [block.name for block in la.blocks]


@pytest.mark.parametrize("members", [1, 2])
def test_stages_choose_two_numbers_and_keep_the_heads(tmp_path, members):
    la = train_in_stages(trainer_of(tmp_path), members=members, modules_to_save=True)
    for member in la.members:
        assert {block.kind for block in member.blocks} == {"lora", "head"}
        assert member.prior_precision.shape == (len(member.blocks),)
        chosen(member)
    if members == 1:
        loaded = from_pretrained(la.model.model, tmp_path)
        assert names_of(loaded) == names_of(la)
        assert torch.equal(loaded.prior_precision, la.prior_precision)


def test_a_second_training_chooses_two_numbers(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.train()
    la = make(trainer.model, modules_to_save=True)
    la.fit(trainer.get_eval_dataloader(trainer.train_dataset))
    history = la.optimize_prior_precision(method="second_training", trainer=trainer)
    (other,) = history.posteriors
    assert torch.equal(are_heads(other), are_heads(la))
    assert torch.equal(la.prior_precision, other.prior_precision)
    chosen(la)

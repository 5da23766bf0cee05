"""Searches for the least of a loss."""

import math

import torch

from laplace_lora_ext.tuning.loss_search import search_grid
from tests.support.models import ragged_batches
from tests.support.posteriors import fitted


def test_a_grid_is_searched_point_by_point():
    grid = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    losses = iter([2.0, math.inf, 1.0])
    history = search_grid(lambda point: next(losses), grid)
    assert torch.equal(history.prior_precision, grid)
    assert history.objective.tolist() == [2.0, math.inf, 1.0]


def test_a_descent_is_measured_twenty_times_and_at_its_end():
    la = fitted()
    statistics = la.predictive_statistics(ragged_batches(seed=7))
    options = {"val_loader": statistics, "link_approx": "probit", "n_steps": 45}
    history = la.optimize_prior_precision(method="val_gd", **options)
    assert history.step.tolist() == [*range(0, 45, 2), 45]
    best = history.prior_precision[history.objective.argmin()]
    torch.testing.assert_close(la.prior_precision, best)


def test_a_descent_takes_each_example_once_a_round_and_rounds_in_another_order(monkeypatch):
    la, seen = fitted(), []
    statistics = la.predictive_statistics(ragged_batches())
    part_of = type(statistics).__getitem__

    def noting(self, index):
        if isinstance(index, torch.Tensor):  # else the loss of all examples is measured
            seen.extend(index.tolist())
        return part_of(self, index)

    monkeypatch.setattr(type(statistics), "__getitem__", noting)
    n, options = len(statistics), {"batch_size": 4, "link_approx": "probit", "n_steps": 4}
    la.optimize_prior_precision(method="val_gd", val_loader=statistics, **options)
    rounds = seen[:n], seen[n : 2 * n]
    assert [sorted(one) for one in rounds] == [list(range(n))] * 2
    assert rounds[0] != rounds[1]

"""Searches for the least of a loss."""

import math

import pytest
import torch

from laplace_lora_ext.tuning.loss_search import search_grid, search_line
from tests.support.models import ragged_batches
from tests.support.posteriors import fitted


def test_a_search_without_a_minimum_says_so():
    with pytest.warns(UserWarning, match="no minimum in reach") as warning:
        search_line(lambda point: 1 / (1 + point.item()), torch.ones(1), 100)
    assert len(warning) == 1
    with pytest.raises(ValueError, match="does not depend"):
        search_line(lambda point: 1.0, torch.ones(1), 100)
    with pytest.raises(ValueError, match="not a number"):
        search_line(lambda point: math.nan, torch.ones(1), 100)


@pytest.mark.parametrize(("start", "sign"), [(1e35, -1), (1e-35, 1)])
def test_a_line_stays_within_the_range_of_float32(start, sign):
    """From there, the farthest factor would leave it."""
    limits = torch.finfo(torch.float32)
    proportions = torch.tensor([1.0, 2.0])
    with pytest.warns(UserWarning, match="no minimum in reach"):
        history = search_line(
            lambda point: sign * math.atan(point.log().mean() / 100), start * proportions, 100
        )
    points = history.prior_precision
    assert points.max() <= limits.max * (1 + 1e-9)
    assert points.min() >= limits.tiny * (1 - 1e-9)
    end = limits.max if sign < 0 else limits.tiny
    best = points[history.objective.argmin()]
    torch.testing.assert_close(best, torch.full((2,), end).double())


def test_a_line_finds_the_least_of_a_parabola():
    start = torch.tensor([2.0, 6.0])
    history = search_line(lambda point: (point[0].log().item() - 3.0) ** 2, start, 100)
    best = history.prior_precision[history.objective.argmin()]
    torch.testing.assert_close(
        best.log(), torch.tensor([3.0, 3.0 + math.log(3)]), rtol=5e-3, atol=0, check_dtype=False
    )
    assert history.step.tolist() == list(range(len(history.step)))


def test_a_line_goes_no_farther_than_a_factor_of_1e8():
    with pytest.warns(UserWarning, match=r"from 3e\+08 to 3e\+08"):
        history = search_line(lambda point: -point.log().item(), torch.tensor([3.0]), 100)
    assert history.prior_precision.max().item() == pytest.approx(3e8)
    with pytest.warns(UserWarning, match="no minimum in reach"):
        history = search_line(lambda point: point.log().item(), torch.tensor([3.0]), 100)
    assert history.prior_precision.min().item() == pytest.approx(3e-8)


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

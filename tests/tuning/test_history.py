"""What a search has tried."""

from __future__ import annotations

import math

import pytest
import torch

from laplace_lora_ext.tuning.history import Recorder
from laplace_lora_ext.tuning.loss_search import search_grid


def test_a_history_has_a_row_for_each_step():
    recorder = Recorder()
    for step, objective in ((0, 3.0), (5, math.inf)):
        recorder.add(step, objective, torch.tensor([[1.0, step + 1.0]], requires_grad=True))
    history = recorder.history()
    assert history.step.tolist() == [0, 5]
    assert history.objective.dtype == torch.float64
    assert history.objective.tolist() == [3.0, math.inf]
    assert history.prior_precision.tolist() == [[1, 1], [1, 6]]
    assert not history.prior_precision.requires_grad


def test_an_objective_that_is_not_a_number_is_refused_and_says_where():
    with pytest.raises(ValueError, match=r"not a number at prior precisions from 0\.5 to 20"):
        Recorder().add(3, math.nan, torch.tensor([20.0, 0.5]))


@pytest.mark.parametrize(("size", "rows"), [(10_000, 3), (10_001, 1)])
def test_of_a_long_prior_precision_the_last_row_is_kept(size, rows):
    recorder = Recorder()
    for step in range(3):
        recorder.add(step, 0.0, torch.full((size,), step + 1.0))
    history = recorder.history()
    assert history.step.tolist() == [0, 1, 2]
    assert history.prior_precision.shape == (rows, size)
    assert history.prior_precision[-1, 0] == 3


def test_a_grid_is_searched_point_by_point():
    grid = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    losses = iter([2.0, math.inf, 1.0])
    history = search_grid(lambda point: next(losses), grid)
    assert torch.equal(history.prior_precision, grid)
    assert history.objective.tolist() == [2.0, math.inf, 1.0]

"""What a search has tried."""

from __future__ import annotations

import math

import pytest
import torch

from laplace_lora_ext.tuning.history import REACH, Recorder


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


def test_the_reach_is_that_of_float32():
    low, high = (torch.tensor(bound, dtype=torch.float64).exp().item() for bound in REACH)
    assert low == pytest.approx(torch.finfo(torch.float32).tiny)
    assert high == pytest.approx(torch.finfo(torch.float32).max)

"""Rows that wait for each other."""

import torch

from laplace_lora_ext.curvature import streaming
from laplace_lora_ext.curvature.factors import DenseFactor, LowRankFactor
from laplace_lora_ext.curvature.streaming import StreamingUpdates
from tests.support.rows import decaying_rows


def test_rows_wait_no_longer_than_the_limit_allows(monkeypatch):
    groups = []
    monkeypatch.setattr(streaming, "add_rows", lambda waiting: groups.append(dict(waiting)))
    updates = StreamingUpdates(limit=5 * 12 * 8)
    large = [LowRankFactor.zeros(12, 2, torch.device("cpu"), torch.float64) for _ in range(3)]
    dense = DenseFactor.zeros(12, torch.device("cpu"), torch.float64)
    rows = decaying_rows(9, 12)[:2]
    for factor in (large[0], dense, large[1], large[0], large[2]):
        energy = updates.add(factor, rows)
        torch.testing.assert_close(energy, rows.square().sum())
    torch.testing.assert_close(dense.matrix, rows.T @ rows)  # at once
    assert [list(group) for group in groups] == [large[:2]]  # at six rows
    assert [len(parts) for parts in groups[0].values()] == [2, 1]
    updates.finish()
    assert [list(group) for group in groups] == [large[:2], large[2:]]
    updates.finish()
    assert not groups[2]


def test_rows_that_are_not_finite_show_in_the_trace_and_are_not_decomposed():
    small = DenseFactor.zeros(12, torch.device("cpu"), torch.float64)
    large = LowRankFactor.zeros(12, 2, torch.device("cpu"), torch.float64)
    updates, rows = StreamingUpdates(limit=1), decaying_rows(9, 12)
    for factor in (small, large):
        updates.add(factor, rows)
        assert factor.trace.isfinite()
    columns, rows = large.columns.clone(), rows.clone()
    rows[3, 5] = torch.nan
    for factor in (small, large):
        updates.add(factor, rows)
        assert not factor.trace.isfinite()
    assert torch.equal(large.columns, columns)

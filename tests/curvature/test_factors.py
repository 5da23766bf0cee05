"""Kronecker factors: the streaming low-rank update against optimal and dense factors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laplace_lora_ext.curvature.factors import DenseFactor, LowRankFactor, add_rows
from tests.support.rows import decaying_rows


def low_rank(rows: torch.Tensor, rank: int, tail: bool = True, batch: int = 7) -> LowRankFactor:
    factor = LowRankFactor.zeros(rows.shape[1], rank, rows.device, rows.dtype, tail)
    for part in rows.split(batch):
        factor.update(part)
    return factor


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(1, 30),
    d=st.integers(1, 12),
    extra=st.integers(0, 3),
    tail=st.booleans(),
    batch=st.integers(1, 12),
)
def test_is_exact_where_the_rank_reaches_the_size(n, d, extra, tail, batch):
    rows = decaying_rows(n, d)
    factor = low_rank(rows, d + extra, tail, batch)
    torch.testing.assert_close(factor.to_matrix(), rows.T @ rows, rtol=1e-10, atol=1e-12)
    assert factor.columns.shape[1] <= d


@pytest.mark.parametrize("rank", [0, 1, 3, 10])
def test_trace_is_exact_with_a_tail(rank):
    rows = decaying_rows(50, 20)
    factor = low_rank(rows, rank)
    torch.testing.assert_close(factor.trace, rows.square().sum())
    torch.testing.assert_close(factor.to_matrix().trace(), rows.square().sum())


def test_without_a_tail_nothing_is_left_outside_the_rank():
    matrix = low_rank(decaying_rows(50, 20), rank=3, tail=False).to_matrix()
    assert torch.linalg.matrix_rank(matrix) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_streaming_keeps_the_energy_of_the_optimal_factor(dtype):
    rows = decaying_rows(2000, 60, dtype=dtype)
    vectors, values, _ = low_rank(rows, rank=10, batch=64).eigendecomposition()
    optimal = torch.linalg.eigvalsh((rows.T @ rows).double())[-10:].sum()
    assert (rows @ vectors).square().sum() >= 0.99 * optimal
    # A sketch sees less energy in its directions than there is, never more.
    assert values.sum() <= optimal * (1 + 1e-5)


def test_merging_two_runs_is_one_longer_run():
    rows = decaying_rows(60, 8)
    merged = low_rank(rows[:25], rank=8) + low_rank(rows[25:], rank=8)
    torch.testing.assert_close(merged.to_matrix(), rows.T @ rows)
    truncated = low_rank(rows[:25], rank=3) + low_rank(rows[25:], rank=3)
    assert truncated.columns.shape[1] == 6
    torch.testing.assert_close(truncated.trace, rows.square().sum())


def test_cut_keeps_the_leading_directions():
    factor = low_rank(decaying_rows(60, 20), rank=4)
    assert factor.columns.shape[1] == 8
    assert factor.cut().columns.shape[1] == 4
    torch.testing.assert_close(factor.cut().to_matrix(), factor.to_matrix())


@pytest.mark.parametrize("kind", ["dense", "low-rank"])
def test_scaling_scales_the_matrix(kind):
    rows = decaying_rows(9, 5)
    factor = DenseFactor(rows.T @ rows) if kind == "dense" else low_rank(rows, 2)
    torch.testing.assert_close((factor * 3.0).to_matrix(), 3 * factor.to_matrix())


def test_factors_of_all_shapes_take_rows_together_as_they_do_alone():
    sizes = [(30, 12), (30, 12), (30, 12), (17, 12), (30, 50), (500, 12), (0, 12)]
    waiting, alone = {}, []
    for number, (n, d) in enumerate(sizes):
        parts = [(number + 1) * decaying_rows(max(n, 9), d)[:n] for _ in range(2)]
        before = decaying_rows(9, d)[:5] if number % 2 else decaying_rows(9, d)[:0]
        together, one = low_rank(before, rank=2), low_rank(before, rank=2)
        waiting[together] = parts
        one.update(torch.cat(parts))
        alone.append(one)
    add_rows(waiting)
    for together, one in zip(waiting, alone, strict=True):
        torch.testing.assert_close(
            together.columns @ together.columns.T, one.columns @ one.columns.T
        )
    assert len({one.columns.shape for one in alone}) > 2


def test_an_eigendecomposition_that_does_not_converge_is_done_otherwise(monkeypatch):
    rows = decaying_rows(60, 20)
    expected = low_rank(rows, rank=4).to_matrix()

    def fail(matrix):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    torch.testing.assert_close(low_rank(rows, rank=4).to_matrix(), expected)
    dense = DenseFactor(rows.T @ rows)
    vectors, values, _ = dense.eigendecomposition()
    torch.testing.assert_close((vectors * values) @ vectors.T, dense.matrix)


def test_thousands_of_nearly_dependent_columns_converge_in_float32():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 40, generator=generator).repeat(3000, 1)
    rows += 1e-4 * torch.randn(rows.shape, generator=generator)
    factor = low_rank(rows, rank=3, batch=3000)
    torch.testing.assert_close(
        factor.eigendecomposition().values[0].double(),
        rows.double().square().sum(),
        rtol=1e-4,
        atol=0,
    )


@pytest.mark.parametrize("power", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("d", [60, 400])
def test_large_batches_lose_no_more_energy_than_small_ones(d, power):
    """Many rows at once go through subspace iteration, few through an eigendecomposition."""
    rows = decaying_rows(1500, d, power, torch.float32)
    optimal = torch.linalg.eigvalsh((rows.T @ rows).double())[-10:].sum()
    for batch in (30, 1500):
        vectors = low_rank(rows, rank=10, batch=batch).eigendecomposition().vectors
        assert (rows @ vectors).square().sum() >= 0.98 * optimal


def test_subspace_iteration_is_exact_up_to_its_width():
    rows = decaying_rows(300, 80)[:, :28] @ torch.randn(28, 80).double()
    factor = low_rank(rows, rank=14, batch=300)
    torch.testing.assert_close(factor.columns @ factor.columns.T, rows.T @ rows)


def test_updates_are_the_same_from_run_to_run():
    rows = decaying_rows(500, 60)
    torch.manual_seed(1)
    first = low_rank(rows, rank=4, batch=500).columns
    torch.manual_seed(2)
    assert torch.equal(first, low_rank(rows, rank=4, batch=500).columns)

"""Kronecker factors: streaming updates against optimal and dense ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from laplace_lora_ext.curvature.factors import (
    DenseFactor,
    Factor,
    LowRankFactor,
    StreamingUpdates,
)


def decaying_rows(
    n: int,
    d: int,
    power: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Draw `(n, d)` rows; direction i has standard deviation `i ** -power`.

    Rows of activations and gradients have eigenvalues that decay like this.
    """
    generator = torch.Generator().manual_seed(0)
    directions = torch.arange(1, d + 1, dtype=dtype)
    square = torch.randn(d, d, generator=generator, dtype=dtype)
    basis = torch.linalg.qr(square).Q
    rows = torch.randn(n, d, generator=generator, dtype=dtype)
    return (rows * directions**-power) @ basis


def low_rank(
    rows: torch.Tensor,
    rank: int,
    tail: bool = True,
    batch: int = 7,
) -> LowRankFactor:
    """Add rows to a factor, so many at once."""
    factor = LowRankFactor.zeros(
        rows.shape[1],
        rank,
        tail,
        rows.device,
        rows.dtype,
    )
    for part in rows.split(batch):
        StreamingUpdates().add(factor, part)
    return factor


def matrix_of(factor: Factor) -> torch.Tensor:
    """Build a factor from its eigendecomposition."""
    vectors, values, tail = factor.eigendecomposition()
    kept = (vectors * values) @ vectors.T
    complement = torch.eye(factor.size).to(vectors) - vectors @ vectors.T
    return kept + tail * complement


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
    factor = low_rank(rows, rank=d + extra, tail=tail, batch=batch)
    assert_close(matrix_of(factor), rows.T @ rows, rtol=1e-10, atol=1e-12)
    assert factor.columns.shape[1] <= d


def test_merging_two_runs_is_one_longer_run():
    rows = decaying_rows(60, 8)
    first = rows[:25]
    second = rows[25:]
    merged = low_rank(first, rank=8) + low_rank(second, rank=8)
    assert_close(matrix_of(merged), rows.T @ rows)
    truncated = low_rank(first, rank=3) + low_rank(second, rank=3)
    # Sums keep twice the rank, so that cutting them loses little.
    assert truncated.columns.shape[1] == 2 * 3
    assert_close(truncated.trace, rows.square().sum())


def test_an_eigendecomposition_that_does_not_converge_is_done_otherwise(monkeypatch):
    rows = decaying_rows(60, 20)
    expected = matrix_of(low_rank(rows, rank=4))

    def fail(matrix):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    assert_close(matrix_of(low_rank(rows, rank=4)), expected)
    dense = DenseFactor(rows.T @ rows)
    assert_close(matrix_of(dense), dense.matrix)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("power", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("d", [60, 400])
def test_streaming_keeps_the_energy_of_the_optimal_factor(d, power, dtype):
    """Many rows go through subspace iteration, few through an eigensolver."""
    rows = decaying_rows(1500, d, power, dtype)
    eigenvalues = torch.linalg.eigvalsh((rows.T @ rows).double())
    optimal = eigenvalues[-10:].sum()
    trace = rows.double().square().sum()
    for batch in (30, 1500):
        factor = low_rank(rows, rank=10, batch=batch)
        vectors, values, _ = factor.eigendecomposition()
        energy = (rows @ vectors).square().sum()
        assert energy >= 0.98 * optimal
        # A sketch sees less energy in its directions than there is, never more.
        assert values.sum() <= optimal * (1 + 1e-5)
        # What the rank leaves out is in the tail.
        assert_close(factor.trace.double(), trace, rtol=1e-5, atol=0)
        of_matrix = matrix_of(factor).double().trace()
        assert_close(of_matrix, trace, rtol=1e-5, atol=0)


def test_updates_are_the_same_from_run_to_run():
    rows = decaying_rows(500, 60)
    torch.manual_seed(1)
    first = low_rank(rows, rank=4, batch=500)
    torch.manual_seed(2)
    second = low_rank(rows, rank=4, batch=500)
    assert torch.equal(first.columns, second.columns)

"""Kronecker factors: streaming updates against optimal and dense ones."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext.curvature.kron import KroneckerBlock, StreamingUpdates
from tests.support.posteriors import normal


def decaying_rows(
    n: int, d: int, power: float = 1.0, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Draw `(n, d)` rows; direction i has standard deviation `i ** -power`.

    Rows of activations and gradients have eigenvalues that decay like this.
    """
    basis = torch.linalg.qr(normal(d, d)).Q
    # From 1, so that the first has a deviation at all.
    deviations = (torch.arange(d) + 1.0) ** -power
    return (normal(n, d, seed=1) * deviations @ basis).to(dtype)


def summed(
    rows: Tensor, rank: int, tail: bool = True, batch: int = 7
) -> KroneckerBlock:
    """Add rows to a large factor, so many at once, beside a small one of 1."""
    shape = (1, rows.shape[1])
    block = KroneckerBlock.zeros(shape, True, rank, tail, rows.device, rows.dtype)
    updates = StreamingUpdates()
    for part in rows.split(batch):
        updates.add(block, part, of_outputs=False)
    block.matrix = block.matrix + 1
    block.normalizer = torch.tensor(1.0).double()
    return block


def matrix_of(block: KroneckerBlock) -> Tensor:
    """Build a large factor from its eigendecomposition."""
    factors = block.decompose()
    kept = (factors.U * factors.large) @ factors.U.T
    identity = torch.eye(len(factors.U)).to(factors.U)
    return kept + factors.tail * (identity - factors.U @ factors.U.T)


def test_merging_two_runs_is_one_longer_run():
    rows = decaying_rows(60, 8)

    def in_two_runs(rank: int) -> KroneckerBlock:
        return summed(rows[:25], rank) + summed(rows[25:], rank)

    both = in_two_runs(8)
    assert_close(matrix_of(both), rows.T @ rows)
    # More columns than the size would bring nothing new.
    assert both.columns.shape[1] == 8
    assert (both.matrix, both.normalizer) == (2, 2)
    # Sums keep twice the rank, so that cutting them loses little.
    truncated = in_two_runs(3)
    assert truncated.columns.shape[1] == 2 * 3
    assert_close(truncated.trace, rows.square().sum())


def test_factors_are_decomposed_otherwise_where_that_fails(monkeypatch):
    rows = decaying_rows(60, 20)

    def decomposed() -> tuple[Tensor, Tensor]:
        # Updates decompose as well.
        block = summed(rows, rank=4)
        block.matrix = rows.T @ rows
        factors = block.decompose()
        return matrix_of(block), (factors.Q * factors.small) @ factors.Q.T

    expected = decomposed()
    assert_close(expected[1], rows.T @ rows)

    def not_converging(matrix: Tensor) -> None:
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", not_converging)
    assert_close(decomposed(), expected)


# Few rows at once go through an eigensolver, and many through subspace iteration.
@pytest.mark.parametrize(
    ("n_features", "power", "dtype", "batch"),
    [
        (60, 0.3, torch.float64, 30),
        (400, 0.3, torch.float32, 1500),
        (400, 2.0, torch.float32, 30),
    ],
    ids=str,
)
def test_streaming_keeps_the_energy_of_the_optimal_factor(
    n_features, power, dtype, batch
):
    rows = decaying_rows(1500, n_features, power, dtype)
    block = summed(rows, rank=10, batch=batch)
    factors = block.decompose()
    eigenvalues = torch.linalg.eigvalsh((rows.T @ rows).double())
    optimum = eigenvalues[-10:].sum()
    assert (rows @ factors.U).square().sum() >= 0.99 * optimum
    # A sketch sees less energy in its directions than there is, never more.
    rounding = 1e-5
    assert factors.large.sum() <= optimum * (1 + rounding)
    # What the rank leaves out is in the tail.
    for trace in (block.trace, matrix_of(block).double().trace()):
        # As near as a sum of 1,500 rows in float32 comes.
        expected = rows.double().square().sum()
        assert_close(trace.double(), expected, rtol=rounding, atol=0)


def test_rows_that_are_not_finite_show_in_the_trace_alone():
    rows = decaying_rows(60, 8)
    rows[3, 2] = torch.inf
    block = summed(rows, rank=2)
    assert not block.trace.isfinite()
    # An eigendecomposition would fail on them.
    assert block.columns.isfinite().all()

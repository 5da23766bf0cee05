"""Kronecker factors: streaming updates against optimal and dense ones."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext.curvature.kron import (
    DenseFactor,
    Factor,
    LowRankFactor,
    StreamingUpdates,
)
from tests.support.posteriors import fitted


def decaying_rows(
    n: int, d: int, power: float = 1.0, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Draw `(n, d)` rows; direction i has standard deviation `i ** -power`.

    Rows of activations and gradients have eigenvalues that decay like this.
    """
    normal = partial(
        torch.randn, dtype=dtype, generator=torch.Generator().manual_seed(0)
    )
    basis = torch.linalg.qr(normal(d, d)).Q
    # From 1, so that the first has a deviation at all.
    number = torch.arange(d, dtype=dtype) + 1
    deviations = number**-power
    rows = normal(n, d) * deviations
    return rows @ basis


def low_rank(
    rows: Tensor, rank: int, tail: bool = True, batch: int = 7
) -> LowRankFactor:
    """Add rows to a factor, so many at once."""
    factor = LowRankFactor.zeros(rows.shape[1], rank, tail, rows.device, rows.dtype)
    for part in rows.split(batch):
        updates = StreamingUpdates()
        updates.add(factor, part)
    return factor


def matrix_of(factor: Factor) -> Tensor:
    """Build a factor from its eigendecomposition."""
    vectors, values, tail = factor.eigendecomposition()
    kept = (vectors * values) @ vectors.T
    projection = vectors @ vectors.T
    identity = torch.eye(factor.size).to(vectors)
    complement = identity - projection
    return kept + tail * complement


def n_columns(factor: LowRankFactor) -> int:
    _, number = factor.columns.shape
    return number


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
    rank = d + extra
    factor = low_rank(rows, rank, tail, batch)
    found = matrix_of(factor)
    expected = rows.T @ rows
    assert_close(found, expected, rtol=1e-10, atol=1e-12)
    # More columns than the size would bring nothing new.
    assert n_columns(factor) <= d


# --- sums of two runs -----------------------------------------------------------------


def test_merging_two_runs_is_one_longer_run():
    rows = decaying_rows(60, 8)

    def in_two_runs(rank: int) -> LowRankFactor:
        return low_rank(rows[:25], rank) + low_rank(rows[25:], rank)

    assert_close(matrix_of(in_two_runs(8)), rows.T @ rows)
    # Sums keep twice the rank, so that cutting them loses little.
    truncated = in_two_runs(3)
    assert n_columns(truncated) == 2 * 3
    assert_close(truncated.trace, rows.square().sum())


# --- eigendecompositions that fail ----------------------------------------------------


def not_converging(matrix: Tensor) -> None:
    raise torch.linalg.LinAlgError("did not converge")


def test_factors_are_decomposed_otherwise(monkeypatch):
    rows = decaying_rows(60, 20)
    expected = matrix_of(low_rank(rows, rank=4))
    dense = DenseFactor(rows.T @ rows)
    monkeypatch.setattr(torch.linalg, "eigh", not_converging)
    # Updates decompose as well.
    assert_close(matrix_of(low_rank(rows, rank=4)), expected)
    assert_close(matrix_of(dense), dense.matrix)


# --- against the optimal factor -------------------------------------------------------


@dataclass(frozen=True)
class Streamed:
    """Rows, and a factor of rank 10 that has seen them batch by batch."""

    rows: Tensor
    factor: LowRankFactor

    @property
    def optimum(self) -> Tensor:
        """The ten largest eigenvalues' sum."""
        matrix = self.rows.T @ self.rows
        eigenvalues = torch.linalg.eigvalsh(matrix.double())
        return eigenvalues[-10:].sum()

    @property
    def trace(self) -> Tensor:
        squares = self.rows.double().square()
        return squares.sum()


# Few rows at once go through an eigensolver, and many through subspace iteration.
@pytest.fixture(
    params=[
        (60, 0.3, torch.float64, 30),
        (60, 1.0, torch.float32, 1500),
        (400, 0.3, torch.float32, 1500),
        (400, 1.0, torch.float64, 1500),
        (400, 2.0, torch.float32, 30),
    ],
    ids=str,
)
def streamed(request: pytest.FixtureRequest) -> Streamed:
    n_features, power, dtype, batch = request.param
    rows = decaying_rows(1500, n_features, power, dtype)
    return Streamed(rows, low_rank(rows, rank=10, batch=batch))


def test_streaming_keeps_the_energy_of_the_optimal_factor(streamed):
    vectors, values, _ = streamed.factor.eigendecomposition()
    coordinates = streamed.rows @ vectors
    energy = coordinates.square().sum()
    optimum = streamed.optimum
    assert energy >= 0.98 * optimum
    # A sketch sees less energy in its directions than there is, never more.
    rounding = 1e-5
    assert values.sum() <= optimum * (1 + rounding)


def test_what_the_rank_leaves_out_is_in_the_tail(streamed):
    factor = streamed.factor
    of_matrix = matrix_of(factor).double().trace()
    for trace in (factor.trace, of_matrix):
        # As near as a sum of 1,500 rows in float32 comes.
        assert_close(trace.double(), streamed.trace, rtol=1e-5, atol=0)


def test_updates_are_the_same_from_run_to_run():
    rows = decaying_rows(500, 60)
    # Whatever the state of torch's own generator.
    torch.manual_seed(1)
    first = low_rank(rows, rank=4, batch=500)
    torch.manual_seed(2)
    second = low_rank(rows, rank=4, batch=500)
    assert torch.equal(first.columns, second.columns)


def test_the_sums_that_are_kept_have_twice_as_many_columns_as_the_curvature():
    la = fitted(rank=1)
    for sums, block in zip(la.H_facs.blocks, la.H.blocks, strict=True):
        factors = sums.output_factor, sums.input_factor
        # The smaller factor of a block is dense.
        (large,) = [each for each in factors if isinstance(each, LowRankFactor)]
        assert n_columns(large) == 2
        assert block.large.vectors.shape[1] == 1

"""Kronecker factors: streaming updates against optimal and dense ones."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
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
) -> Tensor:
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
    rows: Tensor,
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


def matrix_of(factor: Factor) -> Tensor:
    """Build a factor from its eigendecomposition."""
    vectors, values, tail = factor.eigendecomposition()
    kept = (vectors * values) @ vectors.T
    identity = torch.eye(factor.size).to(vectors)
    complement = identity - vectors @ vectors.T
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


# --- sums of two runs -----------------------------------------------------------------


def in_two_runs(
    rows: Tensor,
    rank: int,
) -> LowRankFactor:
    """Add the factors of the first 25 rows and of the rest."""
    first = low_rank(rows[:25], rank)
    second = low_rank(rows[25:], rank)
    return first + second


def test_merging_two_runs_is_one_longer_run():
    rows = decaying_rows(60, 8)
    merged = in_two_runs(rows, rank=8)
    assert_close(matrix_of(merged), rows.T @ rows)


def test_sums_keep_twice_the_rank():
    # So that cutting them loses little.
    rows = decaying_rows(60, 8)
    truncated = in_two_runs(rows, rank=3)
    assert truncated.columns.shape[1] == 2 * 3
    assert_close(truncated.trace, rows.square().sum())


# --- eigendecompositions that fail ----------------------------------------------------


@pytest.fixture
def forbid_eigh(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function from whose call on `torch.linalg.eigh` converges nowhere."""

    def fail(matrix: Tensor) -> None:
        raise torch.linalg.LinAlgError("did not converge")

    def forbid() -> None:
        monkeypatch.setattr(torch.linalg, "eigh", fail)

    return forbid


def test_low_rank_factors_are_decomposed_otherwise(forbid_eigh):
    rows = decaying_rows(60, 20)
    expected = matrix_of(low_rank(rows, rank=4))
    forbid_eigh()
    found = matrix_of(low_rank(rows, rank=4))
    assert_close(found, expected)


def test_dense_factors_are_decomposed_otherwise(forbid_eigh):
    rows = decaying_rows(60, 20)
    factor = DenseFactor(rows.T @ rows)
    forbid_eigh()
    assert_close(matrix_of(factor), factor.matrix)


# --- against the optimal factor -------------------------------------------------------


@dataclass(frozen=True)
class Streamed:
    """Rows, and a factor of rank 10 that has seen them batch by batch."""

    rows: Tensor
    factor: LowRankFactor

    @property
    def optimum(self) -> Tensor:
        """The ten largest eigenvalues' sum."""
        matrix = (self.rows.T @ self.rows).double()
        eigenvalues = torch.linalg.eigvalsh(matrix)
        return eigenvalues[-10:].sum()

    @property
    def trace(self) -> Tensor:
        return self.rows.double().square().sum()


# Few rows at once go through an eigensolver, and many through subspace iteration.
@pytest.fixture(params=[30, 1500], ids="{} rows at once".format)
def batch(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=[0.3, 1.0, 2.0], ids="power {}".format)
def power(request: pytest.FixtureRequest) -> float:
    return request.param


@pytest.fixture(params=[60, 400], ids="{} features".format)
def streamed(
    request: pytest.FixtureRequest,
    power: float,
    dtype: torch.dtype,
    batch: int,
) -> Streamed:
    rows = decaying_rows(1500, request.param, power, dtype)
    factor = low_rank(rows, rank=10, batch=batch)
    return Streamed(rows, factor)


def test_streaming_keeps_the_energy_of_the_optimal_factor(streamed):
    vectors, values, _ = streamed.factor.eigendecomposition()
    energy = (streamed.rows @ vectors).square().sum()
    optimum = streamed.optimum
    assert energy >= 0.98 * optimum
    # A sketch sees less energy in its directions than there is, never more.
    assert values.sum() <= optimum * (1 + 1e-5)


def test_what_the_rank_leaves_out_is_in_the_tail(streamed):
    factor = streamed.factor
    trace = streamed.trace
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

"""Both matrix types against dense matrices, for every operation and exponent."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext.curvature.kron import (
    DenseFactor,
    Factor,
    KroneckerBlock,
    LowRankKron,
    StreamingUpdates,
)
from tests.support.dense import power
from tests.support.posteriors import PRIORS, fitted, generator, normal, some_precision

CPU = torch.device("cpu")


def assert_tight(found: Tensor, expected: Tensor) -> None:
    """Compare in float64, as near as two eigendecompositions of random rows come."""
    assert_close(found, expected, rtol=1e-8, atol=1e-9)


def random_kron(
    sizes: list[tuple[int, int]], rank: int, n_rows: int, tail: bool = True
) -> LowRankKron:
    """Sum random rows in both factors of blocks of A and B in turn.

    Sizes are of LoRA's rank and of features.
    """
    noise = generator()
    blocks = []
    for index, size in enumerate(sizes):
        # A has as many outputs as its rank, and B as many inputs.
        is_A = index % 2 == 0
        shape = size if is_A else size[::-1]
        block = KroneckerBlock.zeros(shape, is_A, rank, tail, CPU, torch.float64)
        for factor in (block.output_factor, block.input_factor):
            rows = torch.randn(n_rows, factor.size, generator=noise)
            StreamingUpdates().add(factor, rows.double())
        # Any number but 1, which would divide nothing.
        block.normalizer = torch.tensor(n_rows + 0.5).double()
        blocks.append(block)
    return LowRankKron(blocks)


def factor_matrix(factor: Factor) -> Tensor:
    """Build a factor from columns and trace, by none of its own operations."""
    if isinstance(factor, DenseFactor):
        return factor.matrix
    columns = factor.columns
    n_left_out = factor.size - min(factor.rank, columns.shape[1], factor.size)
    # `eigh` sorts eigenvalues from small to large.
    values, vectors = torch.linalg.eigh(columns @ columns.T)
    values, vectors = values[n_left_out:], vectors[:, n_left_out:]
    kept = vectors @ values.diag() @ vectors.T
    if not factor.tail or not n_left_out:
        return kept
    complement = torch.eye(factor.size).double() - vectors @ vectors.T
    return kept + (factor.trace - values.sum()) / n_left_out * complement


def matrix_of(kron: LowRankKron) -> Tensor:
    """Build a sum form as one matrix."""
    blocks = []
    for block in kron.blocks:
        factors = map(factor_matrix, (block.output_factor, block.input_factor))
        blocks.append(torch.kron(*factors) / block.normalizer)
    return torch.block_diag(*blocks)


# LoRA's rank, and features; of a rank from nothing that is kept to more than there is.
SIZES = st.tuples(st.integers(1, 4), st.integers(1, 7))


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=3),
    rank=st.integers(0, 9),
    n_rows=st.integers(1, 12),
    tail=st.booleans(),
    layerwise=st.booleans(),
    scale=st.floats(0.1, 10),
)
def test_decomposed_operations_equal_dense_ones(
    sizes, rank, n_rows, tail, layerwise, scale
):
    kron = random_kron(sizes, rank, n_rows, tail)
    n_weights = torch.tensor(sizes).prod(1)
    # Not so small that dense inverses lose what the tolerance asks for.
    deltas = torch.rand(len(sizes) if layerwise else 1).double() + 0.1
    decomposed = kron.decompose()
    P = scale * decomposed + deltas
    assert_close((decomposed * scale + deltas).logdet(), P.logdet())

    prior = deltas.expand(len(sizes)).repeat_interleave(n_weights)
    dense = scale * matrix_of(kron) + prior.diag()
    assert_tight(P.logdet(), dense.logdet())
    W = normal(2, 3, len(dense), seed=1)
    assert_tight(P.inv_square_form(W), W @ torch.linalg.inv(dense) @ W.mT)
    for exponent in (-1, -0.5, 0.5, 1):
        expected = power(dense, exponent)
        assert_tight(P.to_matrix(exponent), expected)
        assert_tight(P.diag(exponent), expected.diag())
        # With two leading dimensions, one, and none.
        for vectors in (W, W[0], W[0, 0]):
            assert_tight(P.bmm(vectors, exponent), vectors @ expected)


def test_gradient_in_the_prior_precision_is_that_of_finite_differences():
    decomposed = random_kron([(2, 5), (3, 4)], rank=2, n_rows=6).decompose()
    W = normal(1, 2, 2 * 5 + 3 * 4, seed=1)

    def determinant_and_square_form(deltas: Tensor) -> tuple[Tensor, Tensor]:
        P = decomposed + deltas
        return P.logdet(), P.inv_square_form(W)

    # In float64, since finite differences of float32 are too rough to compare.
    deltas = torch.tensor([0.3, 0.7]).double().requires_grad_()
    assert torch.autograd.gradcheck(determinant_and_square_form, deltas)


def in_float32(blocks: list[dict[str, Any]]) -> LowRankKron:
    return LowRankKron.from_state_dict(blocks, [(CPU, torch.float32)] * len(blocks))


def test_nothing_cancels_at_a_tiny_prior_precision_in_float32():
    # The weights lie within the kept directions, where the curvature is 1e8 times the
    # prior.
    ratio = 1e8
    n_kept = 3
    kept = torch.linalg.qr(normal(50, 50).float()).Q[:, :n_kept]
    input_factor = {
        "columns": ratio**0.5 * kept,
        "trace": torch.tensor(n_kept * ratio).double(),
        "rank": n_kept,
        "tail": True,
    }
    block = {
        "output_factor": {"matrix": torch.eye(2)},
        "input_factor": input_factor,
        "normalizer": torch.tensor(1.0).double(),
    }
    P = in_float32([block]).decompose() + torch.tensor(1.0)
    # The same direction in both rows of the weight.
    w = kept.sum(1).repeat(2)
    variances = P.inv_square_form(w[None, None])
    # Twice, the squared length of three directions.
    expected = torch.tensor(2 * n_kept / (ratio + 1))
    assert_close(variances.squeeze(), expected, rtol=1e-3, atol=0)


def test_rounding_is_no_remainder_where_nothing_is_left_out():
    kron = random_kron([(3, 7), (3, 7)], rank=7, n_rows=9)
    rounded = in_float32(kron.state_dict())
    # A prior beside which the curvature is rounding.
    delta = torch.tensor(1e8)
    single = rounded.decompose() + delta
    double = kron.decompose() + delta.double()
    for exponent in (-1, -0.5):
        expected = double.diag(exponent).float()
        for found in (single.diag(exponent), single.to_matrix(exponent).diagonal()):
            assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize(
    ("rank", "tail"), [(0, True), (3, True), (3, False), (100, True)]
)
def test_the_determinant_of_a_posterior_is_that_of_its_matrix(rank, tail, prior):
    # With a temperature, which divides the curvature and not the prior precision.
    la = fitted(rank=rank, tail=tail, temperature=0.7)
    la.prior_precision = some_precision(la, prior)
    P = la.posterior_precision.to_matrix()
    assert_close(la.log_det_posterior_precision, P.logdet())

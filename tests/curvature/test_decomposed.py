"""Both matrix types against dense matrices, for every operation and exponent."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext.curvature.decomposed import LowRankKronDecomposed
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


def in_float64(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


def log_det(matrix: Tensor) -> Tensor:
    return torch.linalg.slogdet(matrix).logabsdet


@dataclass(frozen=True)
class Shape:
    """Sizes of a LoRA weight's factors, and whether the small one is of outputs."""

    small: int
    large: int
    small_output: bool

    @property
    def matrix(self) -> tuple[int, int]:
        """The weight's own shape, `(m, n)`."""
        if self.small_output:
            return self.small, self.large
        return self.large, self.small


def in_turn(*sizes: tuple[int, int]) -> list[Shape]:
    """Make shapes of A and B in turn, of so many ranks and features."""
    shapes = []
    for index, (small, large) in enumerate(sizes):
        # A has as many outputs as its rank, and B as many inputs.
        is_A = index % 2 == 0
        shape = Shape(small, large, small_output=is_A)
        shapes.append(shape)
    return shapes


def random_kron(
    shapes: list[Shape], rank: int, n_rows: int, tail: bool = True
) -> LowRankKron:
    """Sum random rows in both factors of each block."""
    noise = generator()
    blocks = []
    for shape in shapes:
        block = KroneckerBlock.zeros(
            shape.matrix, shape.small_output, rank, tail, CPU, torch.float64
        )
        factors = (block.output_factor, block.input_factor)
        for factor in factors:
            rows = torch.randn(n_rows, factor.size, generator=noise)
            updates = StreamingUpdates()
            updates.add(factor, rows.double())
        # Any number but 1, which would divide nothing.
        block.normalizer = in_float64(n_rows + 0.5)
        blocks.append(block)
    return LowRankKron(blocks)


def factor_matrix(factor: Factor) -> Tensor:
    """Build a factor from columns and trace, by none of its own operations."""
    if isinstance(factor, DenseFactor):
        return factor.matrix
    columns = factor.columns
    n_columns = columns.shape[1]
    n_kept = min(factor.rank, n_columns, factor.size)
    n_left_out = factor.size - n_kept
    # `eigh` sorts eigenvalues from small to large.
    values, vectors = torch.linalg.eigh(columns @ columns.T)
    values = values[n_left_out:]
    vectors = vectors[:, n_left_out:]
    kept = vectors @ values.diag() @ vectors.T
    if not factor.tail or not n_left_out:
        return kept
    identity = torch.eye(factor.size).double()
    complement = identity - vectors @ vectors.T
    left_out = factor.trace - values.sum()
    tail = left_out / n_left_out
    return kept + tail * complement


def matrix_of(kron: LowRankKron) -> Tensor:
    """Build a sum form as one matrix."""
    blocks = []
    for block in kron.blocks:
        F_out = factor_matrix(block.output_factor)
        F_in = factor_matrix(block.input_factor)
        product = torch.kron(F_out, F_in)
        blocks.append(product / block.normalizer)
    return torch.block_diag(*blocks)


def some_vectors(*shape: int) -> Tensor:
    return normal(*shape, seed=1)


@st.composite
def sums(draw: st.DrawFn) -> LowRankKron:
    """Draw sum forms of one to three blocks, of any rank."""
    rank_of_lora = st.integers(1, 4)
    n_features = st.integers(1, 7)
    size = st.tuples(rank_of_lora, n_features)
    sizes = st.lists(size, min_size=1, max_size=3)
    # From nothing that is kept to more than any factor has.
    rank = st.integers(0, 9)
    n_rows = st.integers(1, 12)
    tail = st.booleans()
    return random_kron(
        shapes=in_turn(*draw(sizes)),
        rank=draw(rank),
        n_rows=draw(n_rows),
        tail=draw(tail),
    )


def sizes_of(kron: LowRankKron) -> Tensor:
    """Count the weights of each block."""
    sizes = []
    for block in kron.blocks:
        n_rows = block.output_factor.size
        n_columns = block.input_factor.size
        sizes.append(n_rows * n_columns)
    return torch.tensor(sizes)


@settings(deadline=None, max_examples=60)
@given(kron=sums(), layerwise=st.booleans(), scale=st.floats(0.1, 10))
def test_decomposed_operations_equal_dense_ones(kron, layerwise, scale):
    n_weights = sizes_of(kron)
    n_blocks = len(n_weights)
    n_deltas = n_blocks if layerwise else 1
    # Not so small that dense inverses lose what the tolerance asks for.
    deltas = torch.rand(n_deltas).double() + 0.1
    decomposed = kron.decompose()
    P = scale * decomposed + deltas
    found = P.logdet()
    scaled_from_the_right = decomposed * scale + deltas
    assert_close(scaled_from_the_right.logdet(), found)

    of_blocks = deltas.expand(n_blocks)
    prior = of_blocks.repeat_interleave(n_weights)
    curvature = scale * matrix_of(kron)
    dense = curvature + prior.diag()
    assert_tight(found, log_det(dense))
    W = some_vectors(2, 3, len(dense))
    covariance = torch.linalg.inv(dense)
    square_form = W @ covariance @ W.mT
    assert_tight(P.inv_square_form(W), square_form)
    for exponent in (-1, -0.5, 0.5, 1):
        expected = power(dense, exponent)
        assert_power(P, exponent, expected, W)


def assert_power(
    P: LowRankKronDecomposed, exponent: float, expected: Tensor, W: Tensor
) -> None:
    """Compare a power as a matrix, its diagonal, and products with vectors."""
    assert_tight(P.to_matrix(exponent), expected)
    diagonal = P.diag(exponent)
    assert_tight(diagonal, expected.diag())
    matrix = W[0]
    vector = matrix[0]
    # With two leading dimensions, one, and none.
    for vectors in (W, matrix, vector):
        product = P.bmm(vectors, exponent)
        assert_tight(product, vectors @ expected)


def test_gradient_in_the_prior_precision_is_that_of_finite_differences():
    shapes = in_turn((2, 5), (3, 4))
    kron = random_kron(shapes, rank=2, n_rows=6)
    decomposed = kron.decompose()
    n_weights = sum(sizes_of(kron).tolist())
    W = some_vectors(1, 2, n_weights)

    def determinant_and_square_form(deltas: Tensor) -> tuple[Tensor, Tensor]:
        P = decomposed + deltas
        return P.logdet(), P.inv_square_form(W)

    # In float64, since finite differences of float32 are too rough to compare.
    deltas = torch.tensor([0.3, 0.7]).double()
    deltas.requires_grad_()
    assert torch.autograd.gradcheck(determinant_and_square_form, deltas)


def in_float32(blocks: list[dict[str, Any]]) -> LowRankKron:
    place = (CPU, torch.float32)
    places = [place] * len(blocks)
    return LowRankKron.from_state_dict(blocks, places)


def test_nothing_cancels_at_a_tiny_prior_precision_in_float32():
    # The weights lie within the kept directions, where the curvature is 1e8 times the
    # prior.
    ratio = 1e8
    n_kept = 3
    square = normal(50, 50).float()
    rotation = torch.linalg.qr(square).Q
    kept = rotation[:, :n_kept]
    input_factor = {
        "columns": ratio**0.5 * kept,
        "trace": in_float64(n_kept * ratio),
        "rank": n_kept,
        "tail": True,
    }
    block = {
        "output_factor": {"matrix": torch.eye(2)},
        "input_factor": input_factor,
        "normalizer": in_float64(1.0),
    }
    curvature = in_float32([block]).decompose()
    P = curvature + torch.tensor(1.0)
    # The same direction in both rows of the weight.
    direction = kept.sum(1)
    w = direction.repeat(2)
    variances = P.inv_square_form(w[None, None])
    # Twice, the squared length of three directions.
    squared_length = 2 * n_kept
    expected = torch.tensor(squared_length / (ratio + 1))
    assert_close(variances.squeeze(), expected, rtol=1e-3, atol=0)


def test_rounding_is_no_remainder_where_nothing_is_left_out():
    shapes = in_turn((3, 7), (3, 7))
    kron = random_kron(shapes, rank=7, n_rows=9)
    rounded = in_float32(kron.state_dict())
    # A prior beside which the curvature is rounding.
    delta = torch.tensor(1e8)
    single = rounded.decompose() + delta
    double = kron.decompose() + delta.double()
    for exponent in (-1, -0.5):
        expected = double.diag(exponent).float()
        of_vector = single.diag(exponent)
        assert_close(of_vector, expected, rtol=1e-5, atol=0)
        of_matrix = single.to_matrix(exponent).diagonal()
        assert_close(of_matrix, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize(
    ("rank", "tail"), [(0, True), (3, True), (3, False), (100, True)]
)
def test_the_determinant_of_a_posterior_is_that_of_its_matrix(rank, tail, prior):
    # With a temperature, which divides the curvature and not the prior precision.
    la = fitted(rank=rank, tail=tail, temperature=0.7)
    la.prior_precision = some_precision(la, prior)
    P = la.posterior_precision.to_matrix()
    assert_close(la.log_det_posterior_precision, log_det(P))

"""Both matrix types against dense matrices, for every operation and exponent."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext.curvature.block import KroneckerBlock
from laplace_lora_ext.curvature.factors import (
    DenseFactor,
    Factor,
    StreamingUpdates,
)
from laplace_lora_ext.curvature.matrix import LowRankKron, LowRankKronDecomposed
from tests.support.dense import power
from tests.support.posteriors import PRIORS, fitted, generator, some_precision

# Both sides go through an eigendecomposition, of matrices that random rows make.
TIGHT = {"rtol": 1e-8, "atol": 1e-9}
CPU = torch.device("cpu")


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
        shapes.append(Shape(small, large, small_output=index % 2 == 0))
    return shapes


def random_kron(
    shapes: list[Shape],
    rank: int,
    n_rows: int,
    tail: bool = True,
) -> LowRankKron:
    """Sum random rows in both factors of each block."""
    noise = generator()
    blocks = []
    for shape in shapes:
        block = KroneckerBlock.zeros(
            shape.matrix,
            shape.small_output,
            rank,
            tail,
            CPU,
            torch.float64,
        )
        for factor in (block.output_factor, block.input_factor):
            rows = torch.randn(n_rows, factor.size, generator=noise)
            StreamingUpdates().add(factor, rows.double())
        # Any number but 1, which would divide nothing.
        normalizer = n_rows + 0.5
        block.normalizer = torch.tensor(normalizer, dtype=torch.float64)
        blocks.append(block)
    return LowRankKron(blocks)


def factor_matrix(factor: Factor) -> Tensor:
    """Build a factor from columns and trace, by none of its own operations."""
    if isinstance(factor, DenseFactor):
        return factor.matrix
    n_columns = factor.columns.shape[1]
    n_kept = min(factor.rank, n_columns, factor.size)
    n_left_out = factor.size - n_kept
    # `eigh` sorts eigenvalues from small to large.
    values, vectors = torch.linalg.eigh(factor.columns @ factor.columns.T)
    values = values[n_left_out:]
    vectors = vectors[:, n_left_out:]
    kept = vectors @ values.diag() @ vectors.T
    if not factor.tail or not n_left_out:
        return kept
    complement = torch.eye(factor.size).double() - vectors @ vectors.T
    mean_left_out = (factor.trace - values.sum()) / n_left_out
    return kept + mean_left_out * complement


def matrix_of(kron: LowRankKron) -> Tensor:
    """Build a sum form as one matrix."""
    blocks = []
    for block in kron.blocks:
        F_out = factor_matrix(block.output_factor)
        F_in = factor_matrix(block.input_factor)
        blocks.append(torch.kron(F_out, F_in) / block.normalizer)
    return torch.block_diag(*blocks)


def some_vectors(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(1)).double()


@st.composite
def sums(draw: st.DrawFn) -> LowRankKron:
    """Draw sum forms of one to three blocks, of any rank."""
    rank_of_lora = st.integers(1, 4)
    n_features = st.integers(1, 7)
    sizes = draw(
        st.lists(
            st.tuples(rank_of_lora, n_features),
            min_size=1,
            max_size=3,
        )
    )
    return random_kron(
        shapes=in_turn(*sizes),
        # From nothing that is kept to more than any factor has.
        rank=draw(st.integers(0, 9)),
        n_rows=draw(st.integers(1, 12)),
        tail=draw(st.booleans()),
    )


@settings(deadline=None, max_examples=60)
@given(
    kron=sums(),
    layerwise=st.booleans(),
    scale=st.floats(0.1, 10),
)
def test_decomposed_operations_equal_dense_ones(kron, layerwise, scale):
    sizes = []
    for block in kron.blocks:
        n_rows = block.output_factor.size
        n_columns = block.input_factor.size
        sizes.append(n_rows * n_columns)
    n_weights = torch.tensor(sizes)
    n_deltas = len(n_weights) if layerwise else 1
    # Not so small that dense inverses lose what the tolerance asks for.
    deltas = torch.rand(n_deltas).double() + 0.1
    P = scale * kron.decompose() + deltas
    scaled_from_the_right = kron.decompose() * scale + deltas
    assert_close(scaled_from_the_right.logdet(), P.logdet())

    prior = deltas.expand(len(n_weights)).repeat_interleave(n_weights)
    dense = scale * matrix_of(kron) + prior.diag()
    log_determinant = torch.linalg.slogdet(dense).logabsdet
    assert_close(P.logdet(), log_determinant, **TIGHT)
    W = some_vectors(2, 3, len(dense))
    square_form = W @ torch.linalg.inv(dense) @ W.mT
    assert_close(P.inv_square_form(W), square_form, **TIGHT)
    for exponent in (-1, -0.5, 0.5, 1):
        assert_power(P, exponent, power(dense, exponent), W)


def assert_power(
    P: LowRankKronDecomposed,
    exponent: float,
    expected: Tensor,
    W: Tensor,
) -> None:
    """Compare a power as a matrix, its diagonal, and products with vectors."""
    assert_close(P.to_matrix(exponent), expected, **TIGHT)
    assert_close(P.diag(exponent), expected.diag(), **TIGHT)
    # With two leading dimensions, one, and none.
    for vectors in (W, W[0], W[0, 0]):
        product = vectors @ expected
        assert_close(P.bmm(vectors, exponent), product, **TIGHT)


def test_gradient_in_the_prior_precision_is_that_of_finite_differences():
    shapes = in_turn((2, 5), (3, 4))
    kron = random_kron(shapes, rank=2, n_rows=6).decompose()
    W = some_vectors(1, 2, 2 * 5 + 3 * 4)

    def determinant_and_square_form(
        deltas: Tensor,
    ) -> tuple[Tensor, Tensor]:
        P = kron + deltas
        return P.logdet(), P.inv_square_form(W)

    # In float64, since finite differences of float32 are too rough to compare.
    deltas = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(determinant_and_square_form, (deltas,))


def in_float32(blocks: list[dict[str, Any]]) -> LowRankKron:
    places = [(CPU, torch.float32)] * len(blocks)
    return LowRankKron.from_state_dict(blocks, places)


def test_nothing_cancels_at_a_tiny_prior_precision_in_float32():
    # The weights lie within the kept directions, where the curvature is 1e8 times the
    # prior.
    n_kept = 3
    square = torch.randn(50, 50, generator=generator())
    rotation = torch.linalg.qr(square).Q
    kept = rotation[:, :n_kept]
    block = {
        "output_factor": {"matrix": torch.eye(2)},
        "input_factor": {
            "columns": 1e4 * kept,
            "trace": torch.tensor(3e8, dtype=torch.float64),
            "rank": n_kept,
            "tail": True,
        },
        "normalizer": torch.tensor(1.0, dtype=torch.float64),
    }
    # The same direction in both rows of the weight.
    w = kept.sum(1).repeat(2)
    P = in_float32([block]).decompose() + torch.tensor(1.0)
    variance = P.inv_square_form(w[None, None]).squeeze()
    # Twice, the squared length of three directions.
    squared_length = 2 * n_kept
    expected = torch.tensor(squared_length / (1e8 + 1))
    assert_close(variance, expected, rtol=1e-3, atol=0)


def test_rounding_is_no_remainder_where_nothing_is_left_out():
    shapes = in_turn((3, 7), (3, 7))
    kron = random_kron(shapes, rank=7, n_rows=9)
    # A prior beside which the curvature is rounding.
    delta = torch.tensor(1e8)
    single = in_float32(kron.state_dict()).decompose() + delta
    double = kron.decompose() + delta.double()
    for exponent in (-1, -0.5):
        expected = double.diag(exponent).float()
        assert_close(single.diag(exponent), expected, rtol=1e-5, atol=0)
        of_matrix = single.to_matrix(exponent).diagonal()
        assert_close(of_matrix, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize(
    ("rank", "tail"),
    [
        (0, True),
        (3, True),
        (3, False),
        (100, True),
    ],
)
def test_the_determinant_of_a_posterior_is_that_of_its_matrix(rank, tail, prior):
    # With a temperature, which divides the curvature and not the prior precision.
    la = fitted(rank=rank, tail=tail, temperature=0.7)
    la.prior_precision = some_precision(la, prior)
    P = la.posterior_precision.to_matrix()
    expected = torch.linalg.slogdet(P).logabsdet
    assert_close(la.log_det_posterior_precision, expected)

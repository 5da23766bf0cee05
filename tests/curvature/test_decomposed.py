"""Both matrix types against dense matrices, for every operation and exponent."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext.curvature.decomposed import LowRankKronDecomposed, Spectrum
from laplace_lora_ext.curvature.kron import KroneckerBlock, StreamingUpdates
from tests.support.dense import power
from tests.support.posteriors import generator, normal

CPU = torch.device("cpu")


def assert_tight(found: Tensor, expected: Tensor) -> None:
    """Compare in float64, as near as two eigendecompositions of random rows come."""
    assert_close(found, expected, rtol=1e-8, atol=1e-9)


def random_blocks(
    sizes: list[tuple[int, int]], rank: int, n_rows: int, tail: bool = True
) -> list[KroneckerBlock]:
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
        for of_outputs, n_numbers in zip((True, False), shape, strict=True):
            rows = torch.randn(n_rows, n_numbers, generator=noise)
            StreamingUpdates().add(block, rows.double(), of_outputs)
        # Any number but 1, which would divide nothing.
        block.normalizer = torch.tensor(n_rows + 0.5).double()
        blocks.append(block)
    return blocks


def decompose(blocks: list[KroneckerBlock]) -> LowRankKronDecomposed:
    return LowRankKronDecomposed.of_blocks([block.decompose() for block in blocks])


def large_matrix(block: KroneckerBlock) -> Tensor:
    """Build the large factor from columns and trace, by none of its operations."""
    d, n_columns = block.columns.shape
    n_left_out = d - min(block.rank, n_columns)
    # `eigh` sorts eigenvalues from small to large.
    values, vectors = torch.linalg.eigh(block.columns @ block.columns.T)
    values, vectors = values[n_left_out:], vectors[:, n_left_out:]
    kept = vectors @ values.diag() @ vectors.T
    if not block.tail or not n_left_out:
        return kept
    complement = torch.eye(d).double() - vectors @ vectors.T
    return kept + (block.trace - values.sum()) / n_left_out * complement


def matrix_of(blocks: list[KroneckerBlock]) -> Tensor:
    """Build sums as one matrix."""
    matrices = []
    for block in blocks:
        factors = block.matrix, large_matrix(block)
        if not block.small_output:
            factors = factors[::-1]
        matrices.append(torch.kron(*factors) / block.normalizer)
    return torch.block_diag(*matrices)


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
# Of one shape, A and B in turn: of square ones the orientation tells.
@example([(2, 5)] * 4 + [(3, 3)] * 2, 2, 6, True, True, 1.0)
def test_decomposed_operations_equal_dense_ones(
    sizes, rank, n_rows, tail, layerwise, scale
):
    blocks = random_blocks(sizes, rank, n_rows, tail)
    n_weights = torch.tensor(sizes).prod(1)
    # Not so small that dense inverses lose what the tolerance asks for.
    deltas = torch.rand(len(sizes) if layerwise else 1).double() + 0.1
    of_data = decompose(blocks)
    # Rounding leaves none below 0, whose root would be no number at a tiny prior.
    assert of_data.spectrum.values.min() >= 0
    P = scale * of_data + deltas
    assert_close((of_data * scale + deltas).logdet(), P.logdet())

    prior = deltas.expand(len(sizes)).repeat_interleave(n_weights)
    dense = scale * matrix_of(blocks) + prior.diag()
    assert_tight(P.logdet(), dense.logdet())
    W = normal(2, 3, len(dense), seed=1)
    assert_tight(P.inv_square_form(W), W @ torch.linalg.inv(dense) @ W.mT)
    for exponent in (-1, -0.5, 0.5, 1):
        expected = power(dense, exponent)
        assert_tight(P.to_matrix(exponent), expected)
        # With two leading dimensions, one, and none.
        for vectors in (W, W[0], W[0, 0]):
            assert_tight(P.bmm(vectors, exponent), vectors @ expected)


def test_nothing_cancels_at_a_tiny_prior_precision_in_float32():
    # The weights lie within the kept directions, where the curvature is 1e8 times the
    # prior.
    ratio = 1e8
    n_kept = 3
    kept = torch.linalg.qr(normal(50, 50).float()).Q[:, :n_kept]
    block = KroneckerBlock.zeros((2, 50), True, n_kept, True, CPU, torch.float32)
    block.matrix = torch.eye(2)
    block.columns = ratio**0.5 * kept
    block.trace = torch.tensor(n_kept * ratio).double()
    block.normalizer = torch.tensor(1.0).double()
    P = decompose([block]) + torch.tensor(1.0)
    # The same direction in both rows of the weight.
    w = kept.sum(1).repeat(2)
    variances = P.inv_square_form(w[None, None])
    # Twice, the squared length of three directions.
    expected = torch.tensor(2 * n_kept / (ratio + 1))
    assert_close(variances.squeeze(), expected, rtol=1e-3, atol=0)


def test_rounding_is_no_remainder_where_nothing_is_left_out():
    blocks = random_blocks([(3, 7), (3, 7)], rank=7, n_rows=9)
    rounded = [
        KroneckerBlock.from_state_dict(block.state_dict(), CPU, torch.float32)
        for block in blocks
    ]
    # A prior by which rounding would be multiplied.
    delta = torch.tensor(1e-10)
    single = decompose(rounded) + delta
    double = decompose(blocks) + delta.double()
    expected = double.to_matrix(-1).diagonal().float()
    assert_close(single.to_matrix(-1).diagonal(), expected, rtol=1e-2, atol=0)


def test_a_spectrum_is_known_again_but_for_rounding():
    blocks = [block.decompose() for block in random_blocks([(2, 5), (2, 5)], 3, 9)]
    spectrum = LowRankKronDecomposed.of_blocks(blocks).spectrum

    def scaled(factor: float) -> Spectrum:
        return spectrum._replace(values=factor * spectrum.values)

    assert spectrum.equals(scaled(1 + 1e-6))
    assert not spectrum.equals(scaled(1 + 1e-5))

"""Both matrix types against dense matrices, for every operation and exponent."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from laplace_lora_ext.curvature.block import KroneckerBlock
from laplace_lora_ext.curvature.factors import (
    DenseFactor,
    Factor,
    LowRankFactor,
    StreamingUpdates,
)
from laplace_lora_ext.curvature.matrix import LowRankKron
from tests.support.dense import power
from tests.support.posteriors import PRIORS, fitted, generator, some_precision

EXPONENTS = [-1, -0.5, 0.5, 1]
TIGHT = {"rtol": 1e-8, "atol": 1e-9}
CPU = torch.device("cpu")


def random_kron(shapes, rank, tail, n_rows) -> LowRankKron:
    """Make blocks (r, d) and (d, r) in turn, from random rows."""
    noise = generator()
    blocks = []
    for index, (small, large) in enumerate(shapes):
        small_output = index % 2 == 0
        shape = (small, large) if small_output else (large, small)
        block = KroneckerBlock.zeros(
            shape, small_output, rank, tail, CPU, torch.float64
        )
        for factor in (block.output_factor, block.input_factor):
            rows = torch.randn(n_rows, factor.size, generator=noise)
            StreamingUpdates().add(factor, rows.double())
        block.normalizer = torch.tensor(n_rows + 0.5, dtype=torch.float64)
        blocks.append(block)
    return LowRankKron(blocks)


def factor_matrix(factor: Factor) -> torch.Tensor:
    """Build a factor from columns and trace, by none of its own operations."""
    if isinstance(factor, DenseFactor):
        return factor.matrix
    values, vectors = torch.linalg.eigh(factor.columns @ factor.columns.T)
    n_kept = min(factor.rank, factor.columns.shape[1], factor.size)
    n_left_out = factor.size - n_kept
    # `eigh` sorts eigenvalues from small to large.
    values = values[n_left_out:]
    vectors = vectors[:, n_left_out:]
    matrix = vectors @ values.diag() @ vectors.T
    if factor.tail and n_left_out:
        complement = torch.eye(factor.size).double() - vectors @ vectors.T
        mean_left_out = (factor.trace - values.sum()) / n_left_out
        matrix = matrix + mean_left_out * complement
    return matrix


def matrix_of(kron: LowRankKron) -> torch.Tensor:
    """Build a sum form as one matrix."""
    blocks = []
    for block in kron.blocks:
        F_out = factor_matrix(block.output_factor)
        F_in = factor_matrix(block.input_factor)
        blocks.append(torch.kron(F_out, F_in) / block.normalizer)
    return torch.block_diag(*blocks)


@settings(deadline=None, max_examples=60)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 7)),
        min_size=1,
        max_size=3,
    ),
    rank=st.integers(0, 9),
    tail=st.booleans(),
    n_rows=st.integers(1, 12),
    layerwise=st.booleans(),
    scale=st.floats(0.1, 10),
)
def test_decomposed_operations_equal_dense_ones(
    shapes, rank, tail, n_rows, layerwise, scale
):
    kron = random_kron(shapes, rank, tail, n_rows)
    sizes = torch.tensor([m * n for m, n in shapes])
    deltas = torch.rand(len(shapes) if layerwise else 1).double() + 0.1
    P = scale * kron.decompose() + deltas
    scaled_from_the_right = kron.decompose() * scale + deltas
    assert_close(scaled_from_the_right.logdet(), P.logdet())

    added = deltas.expand(len(shapes)).repeat_interleave(sizes)
    reference = scale * matrix_of(kron) + added.diag()
    W = torch.randn(
        2,
        3,
        len(added),
        generator=generator(1),
    ).double()
    log_determinant = torch.linalg.slogdet(reference).logabsdet
    square_form = W @ torch.linalg.inv(reference) @ W.mT
    assert_close(P.logdet(), log_determinant, **TIGHT)
    assert_close(P.inv_square_form(W), square_form, **TIGHT)
    for exponent in EXPONENTS:
        expected = power(reference, exponent)
        assert_close(P.to_matrix(exponent), expected, **TIGHT)
        assert_close(P.diag(exponent), expected.diag(), **TIGHT)
        for w in (W, W[0], W[0, 0]):
            assert_close(P.bmm(w, exponent), w @ expected, **TIGHT)


def test_gradient_in_the_prior_precision_is_that_of_finite_differences():
    sums = random_kron(
        [(2, 5), (3, 4)],
        rank=2,
        tail=True,
        n_rows=6,
    )
    kron = sums.decompose()
    delta = torch.tensor(
        [0.3, 0.7],
        dtype=torch.float64,
        requires_grad=True,
    )
    W = torch.randn(
        1,
        2,
        22,
        generator=generator(1),
    ).double()

    def determinant_and_square_form(
        delta: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        P = kron + delta
        return P.logdet(), P.inv_square_form(W)

    assert torch.autograd.gradcheck(determinant_and_square_form, (delta,))


def test_nothing_cancels_at_a_tiny_prior_precision_in_float32():
    # The weights lie within the kept directions, where the curvature is 1e8 times the
    # prior.
    input_factor = {
        "columns": 1e4 * torch.eye(50)[:, :3],
        "trace": torch.tensor(3e8, dtype=torch.float64),
        "rank": 3,
        "tail": True,
    }
    state = {
        "output_factor": {"matrix": torch.eye(2)},
        "input_factor": input_factor,
        "normalizer": torch.tensor(1.0, dtype=torch.float64),
    }
    single = LowRankKron.from_state_dict([state], [(CPU, torch.float32)])
    rotation = torch.linalg.qr(torch.randn(50, 50, generator=generator())).Q
    factor = single.blocks[0].input_factor
    assert isinstance(factor, LowRankFactor)
    factor.columns = rotation @ factor.columns
    kept = rotation[:, :3] @ torch.ones(3)
    W = kept.repeat(2)[None, None]
    variance = (single.decompose() + torch.tensor(1.0)).inv_square_form(W)
    expected = torch.tensor(6 / (1e8 + 1))
    assert_close(variance.squeeze(), expected, rtol=1e-3, atol=0)


def test_rounding_is_no_remainder_where_nothing_is_left_out():
    kron = random_kron(
        [(3, 7), (3, 7)],
        rank=7,
        tail=True,
        n_rows=9,
    )
    delta = torch.tensor(1e8)
    places = [(CPU, torch.float32)] * 2
    single = LowRankKron.from_state_dict(kron.state_dict(), places).decompose() + delta
    double = kron.decompose() + delta.double()
    for exponent in (-1, -0.5):
        expected = double.diag(exponent).float()
        of_matrix = single.to_matrix(exponent).diagonal()
        assert_close(single.diag(exponent), expected, rtol=1e-5, atol=0)
        assert_close(of_matrix, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize(
    ("rank", "tail"),
    [(0, True), (3, True), (3, False), (100, True)],
)
def test_the_determinant_of_a_posterior_is_that_of_its_matrix(rank, tail, prior):
    la = fitted(rank=rank, tail=tail, temperature=0.7)
    la.prior_precision = some_precision(la, prior)
    expected = torch.linalg.slogdet(la.posterior_precision.to_matrix()).logabsdet
    assert_close(la.log_det_posterior_precision, expected)

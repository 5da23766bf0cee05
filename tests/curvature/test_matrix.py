"""Both matrix types against dense matrices, for every operation and exponent."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laplace_lora_ext.curvature.block import KroneckerBlock
from laplace_lora_ext.curvature.factors import LowRankFactor, StreamingUpdates
from laplace_lora_ext.curvature.matrix import LowRankKron
from tests.support.dense import matrix_of, power
from tests.support.posteriors import PRIORS, fitted, some_precision

EXPONENTS = [-1, -0.5, 0.5, 1]


TIGHT = {"rtol": 1e-8, "atol": 1e-9}


def random_kron(shapes, rank, tail, n_rows, seed=0) -> LowRankKron:
    """Blocks (r, d) and (d, r) of given sizes, from random rows."""
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for i, (small, large) in enumerate(shapes):
        small_output = i % 2 == 0
        shape = (small, large) if small_output else (large, small)
        block = KroneckerBlock.zeros(
            shape, small_output, rank, tail, torch.device("cpu"), torch.float64
        )
        for factor in (block.output_factor, block.input_factor):
            rows = torch.randn(n_rows, factor.size, generator=generator).double()
            StreamingUpdates().add(factor, rows)
        block.normalizer = torch.tensor(n_rows + 0.5, dtype=torch.float64)
        blocks.append(block)
    return LowRankKron(blocks)


@settings(deadline=None, max_examples=60)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 7)), min_size=1, max_size=3),
    rank=st.integers(0, 9),
    tail=st.booleans(),
    n_rows=st.integers(1, 12),
    layerwise=st.booleans(),
    scale=st.floats(0.1, 10),
)
def test_decomposed_operations_equal_dense_ones(shapes, rank, tail, n_rows, layerwise, scale):
    kron = random_kron(shapes, rank, tail, n_rows)
    deltas = torch.rand(len(shapes) if layerwise else 1).double() + 0.1
    sizes = [m * n for m, n in shapes]
    added = torch.cat([d.expand(s) for d, s in zip(deltas.expand(len(shapes)), sizes, strict=True)])
    P = scale * kron.decompose() + deltas
    torch.testing.assert_close((kron.decompose() * scale + deltas).logdet(), P.logdet())
    reference = scale * matrix_of(kron) + added.diag()
    W = torch.randn(2, 3, sum(sizes), generator=torch.Generator().manual_seed(1)).double()

    torch.testing.assert_close(P.logdet(), torch.linalg.slogdet(reference).logabsdet, **TIGHT)
    torch.testing.assert_close(
        P.inv_square_form(W), W @ torch.linalg.inv(reference) @ W.mT, **TIGHT
    )
    for exponent in EXPONENTS:
        expected = power(reference, exponent)
        torch.testing.assert_close(P.to_matrix(exponent), expected, **TIGHT)
        torch.testing.assert_close(P.diag(exponent), expected.diag(), **TIGHT)
        for w in (W, W[0], W[0, 0]):
            torch.testing.assert_close(P.bmm(w, exponent), w @ expected, **TIGHT)


def test_gradient_in_the_prior_precision_is_that_of_finite_differences():
    kron = random_kron([(2, 5), (3, 4)], rank=2, tail=True, n_rows=6).decompose()
    delta = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
    W = torch.randn(1, 2, 22, generator=torch.Generator().manual_seed(1)).double()
    assert torch.autograd.gradcheck(
        lambda d: ((kron + d).logdet(), (kron + d).inv_square_form(W)), (delta,)
    )


def test_nothing_cancels_at_a_tiny_prior_precision_in_float32():
    # The weights lie within the kept directions, where the curvature is 1e8 times the prior.
    single = LowRankKron.from_state_dict(
        [
            {
                "output_factor": {"matrix": torch.eye(2)},
                "input_factor": {
                    "columns": 1e4 * torch.eye(50)[:, :3],
                    "trace": torch.tensor(3e8, dtype=torch.float64),
                    "rank": 3,
                    "tail": True,
                },
                "normalizer": torch.tensor(1.0, dtype=torch.float64),
            }
        ],
        [(torch.device("cpu"), torch.float32)],
    )
    rotation = torch.linalg.qr(torch.randn(50, 50, generator=torch.Generator().manual_seed(0))).Q
    factor = single.blocks[0].input_factor
    assert isinstance(factor, LowRankFactor)
    factor.columns = rotation @ factor.columns
    W = (rotation[:, :3] @ torch.ones(3)).repeat(2)[None, None]
    variance = (single.decompose() + torch.tensor(1.0)).inv_square_form(W).squeeze()
    torch.testing.assert_close(variance, torch.tensor(6 / (1e8 + 1)), rtol=1e-3, atol=0)


def test_rounding_is_no_remainder_where_nothing_is_left_out():
    kron = random_kron([(3, 7), (3, 7)], 7, True, n_rows=9)
    delta = torch.tensor(1e8)
    places = [(torch.device("cpu"), torch.float32)] * 2
    single = LowRankKron.from_state_dict(kron.state_dict(), places).decompose() + delta
    double = kron.decompose() + delta.double()
    for exponent in (-1, -0.5):
        expected = double.diag(exponent).float()
        for found in (single.diag(exponent), single.to_matrix(exponent).diagonal()):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize(("rank", "tail"), [(0, True), (3, True), (3, False), (100, True)])
def test_the_determinant_of_a_posterior_is_that_of_its_matrix(rank, tail, prior):
    la = fitted(rank=rank, tail=tail, temperature=0.7)
    la.prior_precision = some_precision(la, prior)
    expected = torch.linalg.slogdet(la.posterior_precision.to_matrix()).logabsdet
    torch.testing.assert_close(la.log_det_posterior_precision, expected)

"""One Kronecker-factored block, in sum form and in the eigenbasis of its factors."""

from __future__ import annotations

import pytest
import torch

from laplace_lora_ext.curvature.block import DecomposedBlock, KroneckerBlock
from tests.support.rows import decaying_rows


def some_block(small_output: bool, rank: int = 2, tail: bool = True) -> KroneckerBlock:
    """Of a weight (3 x 7) or (7 x 3), from nine rows a factor."""
    shape = (3, 7) if small_output else (7, 3)
    sizes = shape, small_output, rank, tail, torch.device("cpu"), torch.float64
    block = KroneckerBlock.zeros(*sizes)
    for factor in (block.output_factor, block.input_factor):
        factor.update(decaying_rows(9, factor.size))
    block.normalizer = torch.tensor(4.0).double()
    return block


ORIENTATIONS = pytest.mark.parametrize("small_output", [True, False])


@ORIENTATIONS
def test_rounding_is_no_remainder_where_nothing_is_left_out(small_output):
    decomposed, delta = some_block(small_output, rank=7).decompose(), torch.tensor(1e8)
    small, large = (
        type(factor)(*(numbers.float() for numbers in factor))
        for factor in (decomposed.small, decomposed.large)
    )
    single = DecomposedBlock(small, large, small_output)
    for exponent in (-1, -0.5):
        expected = decomposed.diag(delta.double(), exponent).float()
        torch.testing.assert_close(single.diag(delta, exponent), expected, rtol=1e-5, atol=0)
        expected = decomposed.to_matrix(delta.double(), exponent).diagonal().float()
        found = single.to_matrix(delta, exponent).diagonal()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@ORIENTATIONS
def test_a_projection_divides_a_weight_into_two_orthogonal_parts(small_output):
    decomposed = some_block(small_output).decompose()
    weights = torch.randn(4, 3, 7, generator=torch.Generator().manual_seed(0)).double()
    leading, remainder = decomposed.project(weights)
    assert leading.shape == (4, 3, 2)
    across = remainder @ decomposed.large.vectors
    torch.testing.assert_close(across, torch.zeros_like(across))
    whole = decomposed.small.vectors @ (leading @ decomposed.large.vectors.mT + remainder)
    torch.testing.assert_close(whole, weights)


def test_blocks_share_inputs_where_they_have_one_factor_or_nothing_yet():
    sizes = (3, 7), True, 2, True, torch.device("cpu"), torch.float64
    first, second, other = (KroneckerBlock.zeros(*sizes) for _ in range(3))
    assert first.has_inputs_of(second)
    for block in (first, other):
        block.input_factor.update(decaying_rows(9, 7))
        block.normalizer = block.normalizer + 9
    assert not first.has_inputs_of(second)
    assert not second.has_inputs_of(first)
    assert not first.has_inputs_of(other)
    second.input_factor, second.normalizer = first.input_factor, first.normalizer
    assert first.has_inputs_of(second)

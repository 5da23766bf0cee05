"""One Kronecker-factored block, in sum form and in the eigenbasis of its factors."""

from __future__ import annotations

import pytest
import torch

from laplace_lora_ext.curvature.block import DecomposedBlock, KroneckerBlock
from laplace_lora_ext.curvature.factors import StreamingUpdates
from tests.support.rows import decaying_rows


def some_block(small_output: bool, rank: int = 2, tail: bool = True) -> KroneckerBlock:
    """Of a weight (3 x 7) or (7 x 3), from nine rows a factor."""
    shape = (3, 7) if small_output else (7, 3)
    sizes = shape, small_output, rank, tail, torch.device("cpu"), torch.float64
    block = KroneckerBlock.zeros(*sizes)
    for factor in (block.output_factor, block.input_factor):
        StreamingUpdates().add(factor, decaying_rows(9, factor.size))
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

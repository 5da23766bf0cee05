"""The directions along which Jacobians of different examples are compared."""

import pytest
import torch

from laplace_lora_ext.linearized.basis import Basis, eigenbasis
from laplace_lora_ext.predictive.statistics import from_triangle
from tests.support.models import ragged_batches
from tests.support.posteriors import fitted, generator


@pytest.mark.parametrize(("per_row", "columns"), [(None, 3), (1, 1), (3, 3), (5, 5), (1000, 99)])
def test_features_and_the_rest_add_up_to_the_jacobian(per_row, columns):
    la = fitted(rank=3)
    rows = sum(len(block.small.values) for block in la.H.blocks)
    basis = Basis(la.H, None if per_row is None else per_row * rows, generator())
    for index, block in enumerate(la.H.blocks):
        r, d = len(block.small.values), len(block.large.vectors)
        J = torch.randn(2, 3, r, d, generator=generator(index)).double()
        features, rest = basis(index, J)
        assert features.shape == (2, 3, r * min(columns, d))
        assert (basis.feature_block == index).sum() == r * min(columns, d)
        products = features @ features.mT + from_triangle(rest, 3)
        torch.testing.assert_close(products, J.flatten(2) @ J.flatten(2).mT)
        if columns >= d:
            assert not rest.any()


def test_eigenvectors_come_first_and_a_seed_gives_the_others():
    la = fitted(rank=3)
    rows = sum(len(block.small.values) for block in la.H.blocks)
    first, same, other = (
        Basis(la.H, 5 * rows, generator(seed))._directions[0] for seed in (0, 0, 1)
    )
    kept = la.H.blocks[0].large.vectors
    torch.testing.assert_close(first.T @ first, torch.eye(5).double())
    torch.testing.assert_close((kept.T @ first[:, :3]).abs(), torch.eye(3).double())
    assert torch.equal(first, same)
    assert not torch.allclose(first[:, 3:], other[:, 3:])


def test_another_structure_finds_the_same_eigenvectors_in_a_pass_of_its_own():
    la, other = fitted(rank=10), fitted(structure="diag")
    H = eigenbasis(other.model, other.blocks, other.trained_likelihood, ragged_batches())
    for block, expected in zip(H.blocks, la.H.blocks, strict=True):
        torch.testing.assert_close(block.large.values, expected.large.values)
        U, V = block.large.vectors, expected.large.vectors
        torch.testing.assert_close(U @ U.T, V @ V.T)

"""The matrix of features plus the identity, factorised on its smaller side."""

import pytest
import torch

from laplace_lora_ext.linearized.gram import Gram


@pytest.mark.parametrize("n_rows", [3, 8, 9, 40])
def test_it_equals_dense_algebra(n_rows):
    torch.manual_seed(0)
    W = torch.randn(n_rows, 8, dtype=torch.float64)
    X = torch.randn(5, 2, 8, dtype=torch.float64)
    M = torch.eye(8, dtype=torch.float64) + W.T @ W
    gram = Gram(lambda: W.split(7), n_rows, 8)
    torch.testing.assert_close(2 * gram.half_logdet(), M.logdet())
    torch.testing.assert_close(gram.quadratic(X), X @ M.inverse() @ X.mT)
    torch.testing.assert_close(gram.determined(), 1 - M.inverse().diagonal())


def test_many_rows_are_never_held_at_once():
    W = torch.randn(50, 8, dtype=torch.float64)
    held = []

    def parts():
        for part in W.split(5):
            held.append(len(part))
            yield part

    assert Gram(parts, 50, 8)._cholesky.shape == (8, 8)
    assert max(held) == 5

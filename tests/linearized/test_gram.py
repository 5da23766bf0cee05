"""The matrix of features plus the identity, factorised on its smaller side."""

import pytest
import torch

from laplace_lora_ext.linearized.gram import Gram


@pytest.mark.parametrize("n_rows", [3, 8, 9, 40])
def test_it_equals_dense_algebra(n_rows):
    torch.manual_seed(0)
    W = torch.randn(n_rows, 8, dtype=torch.float64)
    X = torch.randn(5, 2, 8, dtype=torch.float64)
    gram = Gram(lambda: W.split(7), n_rows, 8)
    for deviation in (torch.ones(8).double(), torch.rand(8).double() + 0.5):
        scaled = W * deviation
        M = torch.eye(8, dtype=torch.float64) + scaled.T @ scaled
        precision = gram.precision(deviation)
        torch.testing.assert_close(2 * precision.half_logdet(), M.logdet())
        torch.testing.assert_close(precision.quadratic(X), X @ M.inverse() @ X.mT)
        torch.testing.assert_close(precision.determined(), 1 - M.inverse().diagonal())
        torch.testing.assert_close(precision.solve(X[0, 0]), M.inverse() @ X[0, 0])


def test_many_rows_are_never_held_at_once():
    W = torch.randn(50, 8, dtype=torch.float64)
    held = []

    def parts():
        for part in W.split(5):
            held.append(len(part))
            yield part

    assert Gram(parts, 50, 8)._matrix.shape == (8, 8)
    assert max(held) == 5


def test_rows_are_summed_in_double_precision():
    torch.manual_seed(0)
    W = 1e3 * torch.randn(200, 5) + 1e3
    exact = torch.eye(5).double() + W.double().T @ W.double()
    precision = Gram(lambda: W.split(7), 200, 5).precision(torch.ones(5).double())
    assert (2 * precision.half_logdet()).item() == pytest.approx(exact.logdet().item(), rel=1e-13)

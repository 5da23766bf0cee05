"""Products with features in parts, against the same in one piece."""

import pytest
import torch

from laplace_lora_ext.linearized import features as module
from laplace_lora_ext.linearized.features import Features


@pytest.mark.parametrize("rows", [1, 6, 1000])  # less than an example, two, and all
def test_products_in_parts_are_those_of_the_whole(monkeypatch, rows):
    monkeypatch.setattr(module, "_ROWS", rows)
    torch.manual_seed(0)
    Phi = torch.randn(7, 3, 5).double()
    features = Features(Phi)
    assert [part for part, _ in features.parts()][-1].stop == 7
    w, x = torch.randn(5).double(), torch.randn(2, 7, 3).double()
    roots = torch.randn(7, 2, 3).double()
    B = roots.mT @ roots
    torch.testing.assert_close(features.times(w), Phi @ w)
    torch.testing.assert_close(
        features.transposed_times(x[0]), torch.einsum("ncf,nc->f", Phi, x[0])
    )
    torch.testing.assert_close(features.transposed_times(x), torch.einsum("ncf,knc->kf", Phi, x))
    curvature = torch.einsum("ncf,ncd,ndg->fg", Phi, B, Phi)
    torch.testing.assert_close(features.normal_product(roots, w), curvature @ w)
    deviation = torch.rand(5).double()
    precision = features.gram(roots.__getitem__).precision(deviation)
    M = torch.eye(5).double() + deviation[:, None] * curvature * deviation
    torch.testing.assert_close(precision.solve(w), M.inverse() @ w)


def test_results_are_in_double_precision_whatever_the_features():
    features = Features(torch.randn(7, 3, 5))
    assert features.times(torch.ones(5).double()).dtype == torch.float64
    assert features.transposed_times(torch.ones(7, 3).double()).dtype == torch.float64
    assert features.normal_product(torch.ones(7, 2, 3), torch.ones(5)).dtype == torch.float64

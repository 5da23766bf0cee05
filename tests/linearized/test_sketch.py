"""Random features whose inner products are those of the Jacobians on average."""

import pytest
import torch

from laplace_lora_ext.linearized.sketch import Sketch
from tests.support.posteriors import generator


def test_inner_products_of_a_sketch_are_those_of_the_jacobians_on_average():
    shapes = [(2, 30), (2, 5)]
    torch.manual_seed(0)
    G = [torch.randn(1, 3, *shape, dtype=torch.float64) for shape in shapes]
    exact = sum(g.flatten(2) @ g.flatten(2).mT for g in G)
    products = []
    for seed in range(2000):
        generator = torch.Generator().manual_seed(seed)
        sketch = Sketch(shapes, 32, torch.device("cpu"), torch.float64, generator)
        features = [sketch(index, g) for index, g in enumerate(G)]
        assert [f.shape[-1] for f in features] == [16, 10]  # 8 columns of 30, and all 5
        assert sketch.feature_block.tolist() == [0] * 16 + [1] * 10
        products.append(sum(f @ f.mT for f in features))
    products = torch.stack(products)
    deviation = (products.mean(0) - exact) / (products.std(0) / len(products) ** 0.5)
    assert deviation.abs().max() < 4
    # E (xᵀΩΩᵀy)² - (xᵀy)² = (|x|² |y|² + (xᵀy)²) / s, summed over the rows of the small side.
    rows = G[0][0]
    norms = rows.square().sum(-1)
    variance = (norms**2 * 2 / 8).sum(-1)
    torch.testing.assert_close(products.var(0)[0].diagonal(), variance, rtol=0.15, atol=0.0)


@pytest.mark.parametrize(
    ("n_features", "columns"),
    [(1, [1, 1]), (4, [1, 1]), (11, [2, 2]), (40, [8, 5]), (500, [30, 5])],
)
def test_features_are_about_as_many_as_asked_for(n_features, columns):
    shapes = [(3, 30), (2, 5)]
    sketch = Sketch(shapes, n_features, torch.device("cpu"), torch.float32, generator())
    features = [sketch(i, torch.ones(1, 1, *shape)).shape[-1] for i, shape in enumerate(shapes)]
    assert features == [3 * columns[0], 2 * columns[1]]
    assert sketch.feature_block.tolist() == [0] * features[0] + [1] * features[1]

"""Draws under many prior precisions as combinations of a few."""

import pytest
import torch

from laplace_lora_ext.text.grid import TOLERANCE, interpolation


def spectrum(kind):
    generator = torch.Generator().manual_seed(0)
    return {
        "broad": torch.cat([torch.zeros(3), torch.logspace(-8, 3, 2000)]),
        "narrow": torch.rand(50, generator=generator),
        "none": torch.zeros(5),
    }[kind].double()


@pytest.mark.parametrize("kind", ["broad", "narrow", "none"])
@pytest.mark.parametrize(("low", "high", "most"), [(-1, 3, 8), (-1, 5, 11), (-4, 4, 15)])
def test_few_nodes_meet_the_tolerance_on_every_eigenvalue(kind, low, high, most):
    grid, e = torch.logspace(low, high, 40).double(), spectrum(kind)
    nodes, coefficients, error = interpolation(grid, e)
    exact = (grid + e[:, None]).rsqrt()
    found = (nodes + e[:, None]).rsqrt() @ coefficients.mT
    relative = (found / exact - 1).abs().max().item()
    assert relative == pytest.approx(error, rel=0.2)
    assert relative <= 1.1 * TOLERANCE
    assert len(nodes) <= most
    torch.testing.assert_close(nodes.aminmax(), grid.aminmax())  # both ends are nodes
    # The errors of products are not multiplied with much.
    shares = (nodes + e[:, None]).rsqrt() @ coefficients.abs().mT / exact
    assert shares.max() < 12


def test_a_grid_of_fewer_points_than_nodes_is_its_own():
    grid = torch.tensor([0.01, 1.0, 100.0]).double()
    nodes, coefficients, error = interpolation(grid, spectrum("broad"))
    assert torch.equal(nodes, grid)
    assert torch.equal(coefficients, torch.eye(3).double())
    assert error == 0

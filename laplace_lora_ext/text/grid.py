"""Approximates draws under many prior precisions by combinations of draws under a few."""

from __future__ import annotations

from typing import NamedTuple

import torch

TOLERANCE = 1e-2
"""The largest relative error of any coordinate of an interpolated draw."""

_PENALTY = 1e-3  # of a coefficient, relative to an error of the same size


class Interpolation(NamedTuple):
    """`(λ + e)^(-1/2) ≈ Σ_m c_m (λ_m + e)^(-1/2)`, for all eigenvalues e of a curvature.

    So anything linear in a draw, such as its product with a Jacobian, is the same combination of
    its values at the nodes, under any prior precision.

    Attributes
    ----------
    nodes : torch.Tensor
        `(M,)`, λ_m
    coefficients : torch.Tensor
        `(G, M)`, for each λ of the grid
    error : float
        the largest relative error over all λ and e
    """

    nodes: torch.Tensor
    coefficients: torch.Tensor
    error: float


def interpolation(
    grid: torch.Tensor, eigenvalues: torch.Tensor, tolerance: float = TOLERANCE
) -> Interpolation:
    """Use as few nodes as a tolerance allows, at Chebyshev nodes in log λ.

    Over a range of λ, the functions `(λ + e)^(-1/2)` of e lie close to the span of a few of them.
    The coefficients minimise relative squares over the actual eigenvalues, with a penalty that
    keeps them small. The error is measured on the same eigenvalues rather than bounded.

    Parameters
    ----------
    grid : torch.Tensor
        `(G,)`, λ
    eigenvalues : torch.Tensor
        `(E,)`, e, not negative
    tolerance : float, default=TOLERANCE
    """
    grid, e = grid.double().cpu(), _thinned(eigenvalues.double().cpu())
    wanted = (grid + e[:, None]).rsqrt()  # (E, G)
    for n_nodes in range(2, len(grid)):
        nodes = _nodes(grid, n_nodes)
        given = (nodes + e[:, None]).rsqrt()  # (E, M)
        shares = given[None] / wanted.mT[..., None]  # (G, E, M)
        # Products are not exact, and large coefficients would magnify their errors.
        penalty = torch.diag_embed(shares.amax(1)) * _PENALTY * len(e) ** 0.5
        systems = torch.cat([shares, penalty], dim=1)
        ones = torch.cat([torch.ones_like(e), torch.zeros_like(nodes)]).expand(len(grid), -1)
        coefficients = torch.linalg.lstsq(systems, ones[..., None], driver="gelsd").solution
        error = (shares @ coefficients - 1).abs().max().item()
        if error <= tolerance:
            return Interpolation(nodes, coefficients.squeeze(-1), error)
    return Interpolation(grid, torch.eye(len(grid)).to(grid), 0.0)


def _nodes(grid: torch.Tensor, n_nodes: int) -> torch.Tensor:
    """Chebyshev nodes in log λ, stretched to include both ends."""
    angles = (torch.arange(n_nodes).to(grid) + 0.5) * torch.pi / n_nodes
    places = angles.cos() / angles[0].cos()
    low, high = grid.log().min(), grid.log().max()
    return ((low + high + (high - low) * places) / 2).exp()


def _thinned(eigenvalues: torch.Tensor) -> torch.Tensor:
    """At most a few hundred numbers that cover the eigenvalues, also in their logarithm."""
    distinct = eigenvalues.clamp_min(0).unique()
    if len(distinct) <= 400:
        return distinct
    positive = distinct[distinct > 0]
    places = torch.linspace(0, len(positive) - 1, 300).round().long()
    lowest, highest = positive[[0, -1]].log10().tolist()
    spread = torch.logspace(lowest, highest, 100).to(positive)
    return torch.cat([distinct[:1], positive[places], spread])

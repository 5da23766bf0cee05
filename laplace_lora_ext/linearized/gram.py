"""The matrix `I + D WᵀW D`, factorised on the smaller side of W."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

import torch

_PANELS = 4  # of columns in a symmetric product: 10 of their 16 pairs are computed


class Gram:
    """`WᵀW` of `(rows, features)` W in float64, of which any scaling of the features is made.

    Where there are more rows than features, it is summed in parts and W never held whole.

    Parameters
    ----------
    parts : callable
        gives W in parts `(b, features)`
    n_rows, n_features : int
    """

    def __init__(
        self, parts: Callable[[], Iterable[torch.Tensor]], n_rows: int, n_features: int
    ) -> None:
        self._is_summed = n_rows > n_features
        if self._is_summed:
            self._matrix = torch.zeros(n_features, n_features, dtype=torch.float64)
            for part in parts():
                _add_lower_triangle(self._matrix, part.double())
        else:
            self._matrix = torch.cat([part.double() for part in parts()])
        self._last: tuple[torch.Tensor, Precision] | None = None

    def precision(self, deviation: torch.Tensor) -> Precision:
        """`I + D WᵀW D`, where D scales the features by `deviation`, `(features,)`."""
        if self._last is None or not torch.equal(self._last[0], deviation):
            self._last = None  # makes room
            self._last = deviation, self._factorised(deviation)
        return self._last[1]

    def _factorised(self, deviation: torch.Tensor) -> Precision:
        scaled = self._matrix * deviation
        if self._is_summed:
            return Precision(scaled.mul_(deviation[:, None]), None)
        return Precision(scaled @ scaled.mT, scaled)


class Precision:
    """`M = I + WᵀW`, of whose W either `WᵀW` or `W Wᵀ` is factorised.

    Woodbury's identity gives the inverse of M in the second case.

    Parameters
    ----------
    products : torch.Tensor
        `WᵀW`, or `W Wᵀ` where the rows are given; its upper triangle is not read
    rows : torch.Tensor, optional
        W
    """

    def __init__(self, products: torch.Tensor, rows: torch.Tensor | None) -> None:
        self._rows = rows
        products.diagonal().add_(1)
        self._cholesky = torch.linalg.cholesky(products)

    def half_logdet(self) -> torch.Tensor:
        """Half of the log-determinant of M, `()`."""
        return self._cholesky.diagonal().log().sum()

    def quadratic(self, X: torch.Tensor) -> torch.Tensor:
        """`X M⁻¹ Xᵀ` of each of `(b, m, features)`: `(b, m, m)`."""
        if self._rows is None:
            solved = self._solve(X.flatten(0, 1).mT).mT.unflatten(0, X.shape[:2])
            return solved @ solved.mT
        solved = self._solve(self._rows @ X.flatten(0, 1).mT).mT.unflatten(0, X.shape[:2])
        return X @ X.mT - solved @ solved.mT

    def determined(self) -> torch.Tensor:
        """Diagonal of `I - M⁻¹`, `(features,)`: how far the data determine each feature."""
        if self._rows is None:
            return 1 - self._inverse.diagonal()
        return self._solve(self._rows).square().sum(0)

    def solve(self, x: torch.Tensor) -> torch.Tensor:
        """`M⁻¹ x` of `(features,)` numbers."""
        if self._rows is None:
            return self._inverse @ x
        return x - self._rows.mT @ (self._inverse @ (self._rows @ x))

    @cached_property
    def _inverse(self) -> torch.Tensor:
        # Many systems are solved, one at a time: by products, each several times as fast.
        return torch.cholesky_inverse(self._cholesky)

    def _solve(self, columns: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve_triangular(self._cholesky, columns, upper=False)


def _add_lower_triangle(matrix: torch.Tensor, rows: torch.Tensor) -> None:
    """Add `rowsᵀ rows`, but for blocks above the diagonal."""
    width = -(-len(matrix) // _PANELS)
    for start in range(0, len(matrix), width):
        panel = slice(start, start + width)
        matrix[start:, panel].addmm_(rows[:, start:].mT, rows[:, panel])

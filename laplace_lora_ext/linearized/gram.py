"""The matrix `I + WᵀW`, factorised on the smaller side of W."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


class Gram:
    """`M = I + WᵀW` of `(rows, features)` W in float64.

    Where there are more rows than features, W is summed in parts and never held whole; else
    `I + W Wᵀ` is factorised, and Woodbury's identity gives the inverse of M.

    Parameters
    ----------
    parts : callable
        gives W in parts `(b, features)`
    n_rows, n_features : int
    """

    def __init__(
        self, parts: Callable[[], Iterable[torch.Tensor]], n_rows: int, n_features: int
    ) -> None:
        if n_rows > n_features:
            M = torch.eye(n_features, dtype=torch.float64)
            for part in parts():
                M.addmm_(part.mT, part)
            self._rows = None
        else:
            self._rows = torch.cat(list(parts()))
            M = torch.eye(n_rows, dtype=torch.float64) + self._rows @ self._rows.mT
        self._cholesky = torch.linalg.cholesky(M)

    def half_logdet(self) -> torch.Tensor:
        """Half of the log-determinant of M, `()`."""
        return self._cholesky.diagonal().log().sum()

    def quadratic(self, X: torch.Tensor) -> torch.Tensor:
        """`X M⁻¹ Xᵀ` of each of `(b, m, features)`: `(b, m, m)`."""
        if self._rows is None:
            solved = self._solve(X.flatten(0, 1).mT).unflatten(1, X.shape[:2])
            return torch.einsum("kbm,kbn->bmn", solved, solved)
        solved = self._solve(self._rows @ X.flatten(0, 1).mT).unflatten(1, X.shape[:2])
        return X @ X.mT - torch.einsum("kbm,kbn->bmn", solved, solved)

    def determined(self) -> torch.Tensor:
        """Diagonal of `I - M⁻¹`, `(features,)`: how far the data determine each feature."""
        if self._rows is None:
            return 1 - torch.cholesky_inverse(self._cholesky).diagonal()
        return self._solve(self._rows).square().sum(0)

    def _solve(self, columns: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve_triangular(self._cholesky, columns, upper=False)

"""The host's structures over LoRA weights, each registered with the host by its `_key`."""

from __future__ import annotations

from typing import Any

import torch
from laplace.baselaplace import DiagLaplace, FullLaplace, KronLaplace
from laplace.curvature import CurvatureInterface
from laplace.curvature.curvlinops import CurvlinopsGGN
from laplace.utils.matrix import Kron, KronDecomposed

from laplace_lora_ext.curvature.backend import LowRankKronGGN, LowRankKronInterface
from laplace_lora_ext.lora_laplace import LoRALaplace
from laplace_lora_ext.precision import without_autocast


class KronLoRALaplace(LoRALaplace, KronLaplace):
    """The host's `KronLaplace` over LoRA weights: both Kronecker factors dense."""

    _key = ("lora", "kron")
    _default_backend = CurvlinopsGGN

    def _check_backend(self, backend: type[CurvatureInterface]) -> None:
        if issubclass(backend, LowRankKronInterface):
            raise ValueError(
                f'{backend.__name__} keeps low-rank factors: use hessian_structure="lowrank_kron".'
            )

    def _summed_curvature(self) -> Kron:
        assert self.H_facs is not None
        return _with_scaled_inputs(self.H_facs, self.n_data)

    @without_autocast
    def _adopt_curvature(self, n_data: int) -> None:
        assert isinstance(self.H, Kron)
        self.H_facs = _with_scaled_inputs(self.H, 1 / n_data)
        self.H = self.H_facs.decompose(damping=self.damping)

    @property
    def log_det_posterior_precision(self) -> torch.Tensor:
        """Log-determinant of the posterior precision, in float64."""
        P = self.posterior_precision
        eigenvalues: Any = [[values.double() for values in pair] for pair in P.eigenvalues]
        return KronDecomposed(P.eigenvectors, eigenvalues, P.deltas.double(), P.damping).logdet()


class DiagLoRALaplace(LoRALaplace, DiagLaplace):
    """The host's `DiagLaplace` over LoRA weights."""

    _key = ("lora", "diag")
    _default_backend = LowRankKronGGN

    @staticmethod
    def _diagonal(H: torch.Tensor) -> torch.Tensor:
        return H

    @property
    def log_det_posterior_precision(self) -> torch.Tensor:
        """Log-determinant of the posterior precision, in float64."""
        return self.posterior_precision.double().log().sum()


class FullLoRALaplace(LoRALaplace, FullLaplace):
    """The host's `FullLaplace` over LoRA weights: a dense matrix of all of them, for small ones."""

    _key = ("lora", "full")
    # The host's default needs forward-mode derivatives, which fused attention does not have.
    _default_backend = LowRankKronGGN

    @property
    def log_det_posterior_precision(self) -> torch.Tensor:
        """Log-determinant of the posterior precision, in float64."""
        return self.posterior_precision.double().logdet()


def _with_scaled_inputs(kron: Kron, scalar: float) -> Kron:
    """The host sums output factors over the data and averages input factors."""
    kfacs: Any = [[F[0], F[1] * scalar] if len(F) == 2 else F for F in kron.kfacs]
    return Kron(kfacs)

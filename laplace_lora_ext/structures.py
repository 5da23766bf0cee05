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
from laplace_lora_ext.models.locks import without_autocast
from laplace_lora_ext.models.weights import check_in_place


class KronLoRALaplace(LoRALaplace, KronLaplace):
    """The host's `KronLaplace` over LoRA weights: both Kronecker factors dense."""

    _key = ("lora", "kron")
    _default_backend = CurvlinopsGGN

    def _check_backend(self, backend: type[CurvatureInterface]) -> None:
        if issubclass(backend, LowRankKronInterface):
            raise ValueError(
                f'{backend.__name__} keeps low-rank factors: use hessian_structure="lowrank_kron".'
            )

    def _zeros(self) -> Kron:
        check_in_place(self.blocks, 'hessian_structure="kron"')
        weights: Any = self.params
        return Kron.init_from_model(weights, self._device, self._dtype)

    def _packed(self, H: Kron) -> Any:
        return H.kfacs

    def _unpacked(self, state: Any) -> Kron:
        kfacs = [
            [factor.to(self._device, block.statistics_dtype) for factor in factors]
            for factors, block in zip(state, self.blocks, strict=True)
        ]
        return Kron(kfacs)  # pyright: ignore[reportArgumentType]

    @without_autocast
    def _decomposed(self, H: Kron, n_data: int) -> tuple[Kron, KronDecomposed]:
        # The host sums output factors over the data and averages input factors.
        kfacs: Any = [[F[0], F[1] / n_data] if len(F) == 2 else F for F in H.kfacs]
        return H, Kron(kfacs).decompose(damping=self.damping)

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

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(self.n_params, device=self._device, dtype=self._dtype)

    @property
    def log_det_posterior_precision(self) -> torch.Tensor:
        """Log-determinant of the posterior precision, in float64."""
        return self.posterior_precision.double().log().sum()


class FullLoRALaplace(LoRALaplace, FullLaplace):
    """The host's `FullLaplace` over LoRA weights: one dense matrix, for small adapters."""

    _key = ("lora", "full")
    # The host's default needs forward-mode derivatives, which fused attention lacks.
    _default_backend = LowRankKronGGN

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(self.n_params, self.n_params, device=self._device, dtype=self._dtype)

    def _add_batch(self, H: Any, X: Any, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if not self.model.output_size:  # ASDL's Jacobians need it before their first pass
            with self.model.prepared(), torch.no_grad():
                self.model(X)
        return super()._add_batch(H, X, y)

    @property
    def log_det_posterior_precision(self) -> torch.Tensor:
        """Log-determinant of the posterior precision, in float64."""
        return self.posterior_precision.double().logdet()

"""The structures that a curvature over LoRA weights can have, each registered with the host."""

from __future__ import annotations

from typing import Any

import torch
from laplace.baselaplace import DiagLaplace, FullLaplace, KronLaplace, ParametricLaplace
from laplace.curvature import CurvatureInterface
from laplace.curvature.curvlinops import CurvlinopsGGN
from laplace.utils.matrix import Kron, KronDecomposed

from laplace_lora_ext.curvature.backend import LowRankKronGGN, LowRankKronInterface
from laplace_lora_ext.curvature.passes import visit_jacobians
from laplace_lora_ext.lora_laplace import LoRALaplace
from laplace_lora_ext.matrix import LowRankKron
from laplace_lora_ext.precision import without_autocast


class LowRankKronLoRALaplace(LoRALaplace, KronLaplace):
    """Laplace-LoRA: Kronecker-factored curvature whose large factors are kept low-rank.

    Parameters
    ----------
    model, likelihood, **kwargs
        see `LoRALaplace`
    backend : type of LowRankKronInterface, default=LowRankKronGGN
    backend_kwargs : dict, optional
        `rank` (10), `kfac_approx` ("gradient"), `tail` (True), `stochastic` (False); the paper's
        choice is `laplace_lora_ext.PAPER_SETTINGS`

    References
    ----------
    Yang et al., "Bayesian low-rank adaptation for large language models", ICLR 2024.
    """

    _key = ("lora", "lowrank_kron")
    _default_backend = LowRankKronGGN
    H: Any  # LowRankKron while data are summed, LowRankKronDecomposed afterwards
    H_facs: Any  # LowRankKron, to which the data of another run can be added

    def _check_backend(self, backend: type[CurvatureInterface]) -> None:
        if not issubclass(backend, LowRankKronInterface):
            raise ValueError(
                f"{backend.__name__} has no low-rank factors: use LowRankKronGGN or "
                'LowRankKronEF, or hessian_structure="kron".'
            )

    @property
    def backend(self) -> LowRankKronInterface:
        backend = super().backend
        assert isinstance(backend, LowRankKronInterface)
        return backend

    def _init_H(self) -> None:  # noqa: N802
        self.H = self.backend.zeros()

    def _add_batch(self, X: Any, y: torch.Tensor) -> torch.Tensor:
        return self.backend.accumulate(self.H, X, y)

    def _summed_curvature(self) -> LowRankKron:
        return self.H_facs

    @without_autocast
    def _adopt_curvature(self, n_data: int) -> None:
        self.H_facs = self.H.cut()
        self.H = self.H_facs.decompose()

    def _moments(self, X: Any, joint: bool) -> tuple[torch.Tensor, torch.Tensor]:
        precision: Any = self.posterior_precision
        covariances = []

        def add(index: int, jacobian: torch.Tensor) -> None:
            if joint:
                jacobian = jacobian.flatten(0, 1)
            covariance = precision.blocks[index].inv_square_form(jacobian, precision.deltas[index])
            covariances.append(covariance)

        f_mu = visit_jacobians(self.model, self.blocks, X, add, self.enable_backprop)
        return f_mu, torch.stack(covariances).sum(0)

    def state_dict(self) -> dict[str, Any]:
        """State as the host's, with tensors and numbers alone for the curvature."""
        return ParametricLaplace.state_dict(self) | {"H": self.H_facs.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._check_weights(state_dict)
        ParametricLaplace.load_state_dict(self, state_dict)
        self.H_facs = LowRankKron.from_state_dict(state_dict["H"])
        self.H = self.H_facs.decompose()


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

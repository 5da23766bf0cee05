"""The host's structures over LoRA weights, which the host finds by `_key`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from laplace.baselaplace import DiagLaplace, FullLaplace, KronLaplace
from laplace.utils.matrix import KronDecomposed

from laplace_lora_ext.curvature.structure import (
    DiagStructure,
    FullStructure,
    KronStructure,
    Structure,
)
from laplace_lora_ext.lora_laplace import LoRALaplace


class KronLoRALaplace(LoRALaplace, KronLaplace):
    """The host's `KronLaplace` over LoRA weights: both Kronecker factors dense."""

    _key = ("lora", "kron")
    _structure: ClassVar[type[Structure[Any, Any]]] = KronStructure

    @property
    def structure(self) -> KronStructure:
        structure = super().structure
        assert isinstance(structure, KronStructure)
        return replace(structure, damping=self.damping)

    @property
    def log_det_posterior_precision(self) -> torch.Tensor:
        """Log-determinant of the posterior precision, in float64."""
        P = self.posterior_precision
        # Pairs, whatever the host's annotation says.
        eigenvalues: Any = [
            [values.double() for values in pair] for pair in P.eigenvalues
        ]
        deltas = P.deltas.double()
        in_double = KronDecomposed(P.eigenvectors, eigenvalues, deltas, P.damping)
        return in_double.logdet()


class DiagLoRALaplace(LoRALaplace, DiagLaplace):
    """The host's `DiagLaplace` over LoRA weights."""

    _key = ("lora", "diag")
    _structure: ClassVar[type[Structure[Any, Any]]] = DiagStructure

    @property
    def log_det_posterior_precision(self) -> torch.Tensor:
        """Log-determinant of the posterior precision, in float64."""
        return self.posterior_precision.double().log().sum()


class FullLoRALaplace(LoRALaplace, FullLaplace):
    """The host's dense `FullLaplace` over LoRA weights, for small adapters."""

    _key = ("lora", "full")
    _structure: ClassVar[type[Structure[Any, Any]]] = FullStructure

    @property
    def log_det_posterior_precision(self) -> torch.Tensor:
        """Log-determinant of the posterior precision, in float64."""
        return self.posterior_precision.double().logdet()

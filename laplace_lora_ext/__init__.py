"""Laplace approximations over LoRA weights, for laplace-torch, PEFT and transformers.

Importing this package registers `subset_of_weights="lora"` with `laplace.Laplace`, for the
structures "lowrank_kron", "kron", "diag" and "full".
"""

from laplace_lora_ext.curvature.backend import PAPER_SETTINGS, LowRankKronEF, LowRankKronGGN
from laplace_lora_ext.hessian_structures import (
    DiagLoRALaplace,
    FullLoRALaplace,
    KronLoRALaplace,
)
from laplace_lora_ext.laplace import Laplace
from laplace_lora_ext.linearized_model import LinearizedModel
from laplace_lora_ext.lora_laplace import LoRALaplace
from laplace_lora_ext.lowrank_kron import LowRankKronLoRALaplace
from laplace_lora_ext.matrix import LowRankKron, LowRankKronDecomposed
from laplace_lora_ext.predictive_statistics import Moments, PredictiveStatistics
from laplace_lora_ext.tuning_history import TuningHistory
from laplace_lora_ext.variance_shares import VarianceShares

__all__ = [
    "PAPER_SETTINGS",
    "DiagLoRALaplace",
    "FullLoRALaplace",
    "KronLoRALaplace",
    "Laplace",
    "LinearizedModel",
    "LoRALaplace",
    "LowRankKron",
    "LowRankKronDecomposed",
    "LowRankKronEF",
    "LowRankKronGGN",
    "LowRankKronLoRALaplace",
    "Moments",
    "PredictiveStatistics",
    "TuningHistory",
    "VarianceShares",
]

"""Laplace approximations over LoRA weights, for laplace-torch, PEFT and transformers.

Importing this package registers `subset_of_weights="lora"` with `laplace.Laplace`, for
the structures "lowrank_kron", "kron", "diag" and "full".
"""

import laplace_lora_ext.metrics as metrics
import laplace_lora_ext.plots as plots
from laplace_lora_ext.curvature.accumulation import PAPER_SETTINGS
from laplace_lora_ext.laplace import Laplace, LowRankKronLoRALaplace, from_pretrained
from laplace_lora_ext.lora_laplace import LoRALaplace
from laplace_lora_ext.merging import merge
from laplace_lora_ext.mixture import LaplaceMixture
from laplace_lora_ext.models.choices import DataCollatorForChoices
from laplace_lora_ext.predicting import Predictor
from laplace_lora_ext.predictive.learnt_variance import LearntVariance
from laplace_lora_ext.predictive.moments import Moments
from laplace_lora_ext.predictive.predictions import NumberPrediction, Prediction, Review
from laplace_lora_ext.predictive.scores import TextScores
from laplace_lora_ext.predictive.statistics import PredictiveStatistics
from laplace_lora_ext.training.stages import in_stages, train_in_stages
from laplace_lora_ext.tuning import (
    Agreement,
    GridSearch,
    Marglik,
    SecondTraining,
    TokenGridSearch,
    ValGD,
)
from laplace_lora_ext.tuning.method import TuningHistory

__all__ = [
    "PAPER_SETTINGS",
    "Agreement",
    "DataCollatorForChoices",
    "GridSearch",
    "Laplace",
    "LaplaceMixture",
    "LearntVariance",
    "LoRALaplace",
    "LowRankKronLoRALaplace",
    "Marglik",
    "Moments",
    "NumberPrediction",
    "Prediction",
    "PredictiveStatistics",
    "Predictor",
    "Review",
    "SecondTraining",
    "TextScores",
    "TokenGridSearch",
    "TuningHistory",
    "ValGD",
    "from_pretrained",
    "in_stages",
    "merge",
    "metrics",
    "plots",
    "train_in_stages",
]

"""The prior precision that held-out texts choose for another training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from laplace_lora_ext.text.gridsearch import TokenGridSearch
from laplace_lora_ext.tuning.method import TuningMethod
from laplace_lora_ext.tuning.second_training import SecondTraining


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSecondTraining(SecondTraining):
    """`laplace_lora_ext.SecondTraining` for tokens: `TokenGridSearch` chooses by default."""

    search: Callable[..., TuningMethod] = TokenGridSearch

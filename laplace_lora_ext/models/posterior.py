"""What choosing a prior and predicting need of a posterior."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from laplace_lora_ext.likelihoods import Likelihood
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.weights import Block


@dataclass(frozen=True)
class Hyperparameters:
    """All that a search may change of a posterior, under the names of its attributes."""

    prior_precision: torch.Tensor
    sigma_noise: torch.Tensor
    temperature: float | torch.Tensor


class Posterior(Protocol):
    """A Laplace approximation over LoRA weights; `LoRALaplace` is one.

    Classes of folders that import this one are `Any` here.
    """

    model: LogitsModel
    blocks: list[Block]
    likelihood: Any
    trained_likelihood: Likelihood
    predicted_likelihood: Likelihood
    prior_precision: Any
    sigma_noise: Any
    hyperparameters: Any  # what `Hyperparameters` hold, or a mixture's own
    enable_backprop: bool
    n_data: int
    n_outputs: int
    learnt_variance: Any

    @property
    def curvature_scale(self) -> torch.Tensor: ...

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any: ...

    def check_model(self) -> None: ...

    def moments(
        self, X: Any, joint: bool, directions: Any = ...
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def sample(
        self, n_samples: int = 100, generator: torch.Generator | None = None
    ) -> torch.Tensor: ...

    def log_marginal_likelihood(
        self, prior_precision: Any = None, sigma_noise: Any = None
    ) -> torch.Tensor: ...

    def statistics_of(self, loader: Any, progress_bar: bool) -> Any: ...

    def statistics_by_batch(self) -> Callable[[Any], Any] | None: ...

    def for_model(self, model: nn.Module) -> Any: ...

"""What functions in the other folders need of a posterior."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from laplace_lora_ext.likelihoods import Likelihood
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import Block


class Posterior(Protocol):
    """A Laplace approximation over LoRA weights; `LoRALaplace` is one.

    Classes of folders that import this one are `Any` here.
    """

    model: LogitsModel
    blocks: list[Block]
    likelihood: Any
    trained_likelihood: Likelihood
    dict_key_x: str
    dict_key_y: str
    enable_backprop: bool
    prior_mean: Any
    prior_precision: Any
    sigma_noise: Any
    temperature: float
    mean: torch.Tensor
    loss: Any
    n_data: int
    n_outputs: int
    n_params: int
    n_layers: int
    learnt_variance: Any
    _predicted_likelihood: Likelihood
    _backend: Any
    _backend_cls: Any
    _fitted: Any
    _prior_precision: Any
    _sigma_noise: Any
    _posterior_scale: Any
    _places: list[tuple[torch.device, torch.dtype]]

    @property
    def scatter(self) -> torch.Tensor: ...

    @property
    def _H_factor(self) -> torch.Tensor: ...  # noqa: N802

    @property
    def _device(self) -> torch.device: ...

    @property
    def _dtype(self) -> torch.dtype: ...

    @property
    def _sizes(self) -> list[int]: ...

    @property
    def _backend_options(self) -> dict[str, Any]: ...

    @property
    def _kept(self) -> Any: ...

    def around(self, model: nn.Module) -> Any: ...

    def _settings(self) -> dict[str, Any]: ...

    def _check_model(self) -> None: ...

    def _check_H_init(self) -> None: ...  # noqa: N802

    def _prepared(self) -> AbstractContextManager[None]: ...

    def _zeros(self) -> Any: ...

    def _curv_closure(self, X: Any, y: torch.Tensor, N: int) -> tuple[torch.Tensor, Any]: ...

    def _add_batch(self, H: Any, X: Any, y: torch.Tensor) -> tuple[torch.Tensor, Any]: ...

    def _sums(self) -> Any: ...

    def _packed(self, H: Any) -> Any: ...

    def _unpacked(self, state: Any) -> Any: ...

    def _adopt(self, H: Any, n_data: int) -> None: ...

    def _glm_predictive_distribution(
        self, X: Any, joint: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def _moments(
        self, X: Any, joint: bool, directions: Any = ...
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def predictive_moments(self, x: Any) -> Any: ...

    def sample(
        self, n_samples: int = 100, generator: torch.Generator | None = None
    ) -> torch.Tensor: ...

    def log_marginal_likelihood(
        self, prior_precision: Any = None, sigma_noise: Any = None
    ) -> torch.Tensor: ...

    def statistics_of(self, loader: Any, progress_bar: bool) -> Any: ...

    def trying(self) -> AbstractContextManager[None]: ...

    def state_dict(self) -> dict[str, Any]: ...

"""Laplace approximations over LoRA weights: the host's classes, fitted through a model adapter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from laplace.baselaplace import ParametricLaplace
from laplace.curvature import CurvatureInterface
from torch import nn

import laplace_lora_ext.fit as data_fit
import laplace_lora_ext.saving as saving
import laplace_lora_ext.state as state
from laplace_lora_ext.curvature.backend import LowRankKronInterface
from laplace_lora_ext.fitting import kind
from laplace_lora_ext.fitting.hosts_pass import curvature_of
from laplace_lora_ext.fitting.hyperparameters import Positive
from laplace_lora_ext.fitting.moving import follow, places_of
from laplace_lora_ext.likelihoods import LIKELIHOODS
from laplace_lora_ext.models.locks import LOCK, exclusive
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import (
    Block,
    check_known_to_host,
    find_blocks,
    warn_if_untrained,
    warn_of_frozen,
    warn_of_other_trainable,
)
from laplace_lora_ext.models.preference_model import PreferenceModel
from laplace_lora_ext.models.same_model import ModelState, check_runs, check_same
from laplace_lora_ext.passes import Directions, every_output, jacobians
from laplace_lora_ext.precision import without_autocast
from laplace_lora_ext.predictive import amortization, decisions, glm, networks, posterior_predictive
from laplace_lora_ext.predictive.amortized import LearntVariance
from laplace_lora_ext.predictive.statistics import PredictiveStatistics
from laplace_lora_ext.training import students
from laplace_lora_ext.tuning import by_name, prior


class LoRALaplace(ParametricLaplace):
    """What all Laplace approximations over LoRA weights share.

    The posterior is over the `lora_A` and `lora_B` weights of the active adapter. Everything else
    in the model, even a trainable head, stays at its MAP value. No method changes the model.

    Parameters
    ----------
    model : torch.nn.Module
        a `PeftModel`, or any module that holds plain LoRA layers and maps a batch to logits
    likelihood : {"classification", "regression", "reward_modeling"}
    sigma_noise, prior_precision, prior_mean, temperature, enable_backprop, dict_key_x, dict_key_y
        as for the host's classes
    backend, backend_kwargs
        the host's way to compute curvature, and its options
    class_token_ids : sequence of int, optional
        for a language model: the tokens of the answers, one a class
    mask_token_id : int, optional
        for a masked language model: the token at which the answer is read
    target_modules, layers_to_transform
        as in `peft.LoraConfig`: which LoRA layers take part; all if omitted
    **kwargs
        as for the host's class of the same structure

    Attributes
    ----------
    model : LogitsModel
    blocks : list of Block
        the LoRA weights that the posterior is over
    trained_likelihood : Likelihood
        of the training data; a reward model learns from preferences, which are two classes
    learnt_variance : LearntVariance or None
        what `amortize` has learnt of the present fit

    Raises
    ------
    ValueError, NotImplementedError
        See `laplace_lora_ext.models.lora_layers.find_blocks` and `LogitsModel`.
    """

    _default_backend: type[CurvatureInterface]
    model: LogitsModel
    blocks: list[Block]
    mean: torch.Tensor
    H: Any

    def __init__(
        self,
        model: nn.Module,
        likelihood: str,
        sigma_noise: float | torch.Tensor = 1.0,
        prior_precision: float | torch.Tensor = 1.0,
        prior_mean: float | torch.Tensor = 0.0,
        temperature: float = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: type[CurvatureInterface] | None = None,
        *,
        backend_kwargs: dict[str, Any] | None = None,
        class_token_ids: Sequence[int] | None = None,
        mask_token_id: int | None = None,
        target_modules: str | Sequence[str] | None = None,
        layers_to_transform: int | Iterable[int] | None = None,
        **kwargs: Any,
    ) -> None:
        backend = self._default_backend if backend is None else backend
        self._check_backend(backend)
        adapted = self._adapted(likelihood)
        self.model = adapted(model, class_token_ids, dict_key_y, mask_token_id)
        with LOCK:  # passes of other threads change what requires grad
            self.blocks = find_blocks(model, target_modules, layers_to_transform)
            warn_of_other_trainable(model)
        self.model.adapter = self.blocks[0].adapter
        warn_of_frozen(self.blocks)
        warn_if_untrained(self.blocks)
        self.trained_likelihood = LIKELIHOODS.get(likelihood, LIKELIHOODS["classification"])
        self._predicted_likelihood = LIKELIHOODS.get(likelihood, LIKELIHOODS["regression"])
        self.learnt_variance: LearntVariance | None = None
        self._fitted: ModelState | None = None
        if issubclass(backend, LowRankKronInterface):
            backend_kwargs = {"blocks": self.blocks, **(backend_kwargs or {})}
        else:
            check_known_to_host(self.blocks)
        with self._prepared():  # the host collects the parameters that require grad
            super().__init__(
                self.model,
                likelihood,
                sigma_noise,
                prior_precision,
                prior_mean,
                temperature,
                enable_backprop,
                dict_key_x,
                dict_key_y,
                backend,
                backend_kwargs=backend_kwargs,
                **kwargs,
            )
        self._places = places_of(self)

    around = kind.around

    # --- what the structures say ---------------------------------------------------------------

    def _adapted(self, likelihood: str) -> type[LogitsModel]:
        """What makes logits of the model's output."""
        return PreferenceModel if likelihood == "reward_modeling" else LogitsModel

    def _init_H(self) -> None:  # noqa: N802
        self.H = None  # the host starts with zeros, and predicts without a fit

    def _check_backend(self, backend: type[CurvatureInterface]) -> None:
        """Refuse a backend that lacks what the structure needs."""

    def _zeros(self) -> Any:
        """Curvature of no data."""
        raise NotImplementedError

    def _add_batch(self, H: Any, X: Any, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Loss of a batch, and `H` plus its curvature."""
        loss, of_batch = curvature_of(self, X, y)
        return loss, H + of_batch

    def _packed(self, H: Any) -> Any:
        """Sums as nested lists and dictionaries of tensors and numbers."""
        return H

    def _unpacked(self, state: Any) -> Any:
        """Sums from what `_packed` returned, on the blocks' devices."""
        return state.to(self._device, self._dtype)

    @property
    def _kept(self) -> Any:
        """The fit's curvature in the form in which a state holds it."""
        return self.H

    def _keep(self, H: Any) -> None:
        """Take over curvature in that form."""
        self.H = H

    def _sums(self) -> Any:
        """The fit's sums, to which those of more data can be added."""
        return self._kept

    def _adopt(self, H: Any, n_data: int) -> None:
        """Take over sums over `n_data` examples as the posterior's curvature."""
        self._keep(H)

    # --- fit -----------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return self.model.device

    @property
    def _dtype(self) -> torch.dtype:
        return self.blocks[0].statistics_dtype

    @property
    def _sizes(self) -> list[int]:
        return [block.weight.numel() for block in self.blocks]

    def _prepared(self) -> AbstractContextManager[None]:
        """The model in evaluation mode, with gradients for the LoRA weights alone."""
        return self.model.prepared([block.weight for block in self.blocks])

    @property
    def backend(self) -> CurvatureInterface:
        """Curvature of the blocks' weights, made at first use."""
        if self._backend is not None:
            return self._backend
        with self._prepared():
            return super().backend

    fit: Any = data_fit.fit

    def _check_model(self) -> None:
        """Refuse a model that has changed since the fit, and follow it where it has gone."""
        if self._fitted is None:
            check_runs(self.model, self.blocks)
            return
        check_same(self.model, self.blocks, self._fitted, self.mean)
        follow(self)

    def _check_H_init(self) -> None:  # noqa: N802
        super()._check_H_init()
        follow(self)

    # --- evidence and prior --------------------------------------------------------------------

    prior_precision: Any = Positive()
    sigma_noise: Any = Positive()
    temperature: Any = Positive()

    @exclusive
    def log_marginal_likelihood(
        self,
        prior_precision: torch.Tensor | None = None,
        sigma_noise: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._check_H_init()
        return super().log_marginal_likelihood(prior_precision, sigma_noise)

    log_det_prior_precision: Any = property(prior.log_determinant)
    scatter: Any = property(prior.squared_distance)

    optimize_prior_precision: Any = by_name.optimize_prior_precision
    trying = prior.trying

    def statistics_of(self, loader: Any, progress_bar: bool) -> PredictiveStatistics | None:
        """Statistics of a data set, or the given ones; None for a structure without any."""
        return None

    # --- predictions ---------------------------------------------------------------------------

    __call__: Any = posterior_predictive.posterior_predictive
    amortize = amortization.amortize
    predict = decisions.predict
    predict_proba = decisions.predict_proba
    lower_bound = decisions.lower_bound
    predictive_moments = glm.predictive_moments
    _glm_predictive_distribution: Any = glm.predictive_distribution
    _glm_functional_samples: Any = glm.functional_samples

    def _moments(
        self, X: Any, joint: bool, directions: Directions = every_output
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean `(B, C)`, and covariance `(B, C, C)` or, joint, `(B * C, B * C)`.

        With other `directions`, the covariance is that of S combinations of the outputs.
        """
        Js, f_mu = jacobians(self.model, self.blocks, X, self.enable_backprop, directions)
        return f_mu, self.functional_covariance(Js) if joint else self.functional_variance(Js)

    @without_autocast
    def functional_variance(self, Js: torch.Tensor) -> torch.Tensor:
        return super().functional_variance(Js)

    @without_autocast
    def functional_covariance(self, Js: torch.Tensor) -> torch.Tensor:
        return super().functional_covariance(Js)

    @without_autocast
    def square_norm(self, value: torch.Tensor) -> torch.Tensor:
        return super().square_norm(value)

    @exclusive
    @without_autocast
    def sample(
        self, n_samples: int = 100, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        return super().sample(n_samples, generator)

    @exclusive
    def _glm_predictive_samples(
        self, f_mu: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if f_mu.shape[-1] == 1:  # a single reward is a number, not a probability
            return self._glm_functional_samples(f_mu, *args, **kwargs)
        return super()._glm_predictive_samples(f_mu, *args, **kwargs)

    _nn_functional_samples: Any = networks.functional_samples
    _nn_predictive_classification: Any = networks.mean_probabilities

    distill = students.distill

    # --- state ---------------------------------------------------------------------------------

    save_pretrained = saving.save_pretrained
    push_to_hub = saving.push_to_hub
    sample_adapters = saving.sample_adapters

    state_dict: Any = state.state_dict
    load_state_dict: Any = state.load_state_dict

    def _settings(self) -> dict[str, Any]:
        """Backend of the curvature, and its options."""
        return {"backend": self._backend_cls.__name__, **self._backend_options}

    @property
    def _backend_options(self) -> dict[str, Any]:
        """The user's `backend_kwargs`, which know nothing of this model."""
        return {k: v for k, v in self._backend_kwargs.items() if k != "blocks"}

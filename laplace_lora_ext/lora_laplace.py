"""Laplace approximations over LoRA weights: the host's classes, fitted through a model adapter."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence, Sized
from typing import Any

import torch
import tqdm
from laplace.curvature import CurvatureInterface
from torch import nn
from torch.utils.data import DataLoader

from laplace_lora_ext.curvature.backend import LowRankKronInterface, check_targets
from laplace_lora_ext.curvature.passes import forward_pass
from laplace_lora_ext.errors import naming
from laplace_lora_ext.logits_model import LogitsModel
from laplace_lora_ext.lora_layers import find_blocks, warn_if_untrained, warn_of_other_trainable
from laplace_lora_ext.map_agreement import MapAgreement
from laplace_lora_ext.preference_model import PreferenceModel
from laplace_lora_ext.tuning import LoRATuning


class LoRALaplace(LoRATuning):
    """What all Laplace approximations over LoRA weights share.

    The posterior is over the `lora_A` and `lora_B` weights of the active adapter. Everything else
    in the model, a trainable head included, is held at its MAP value. Every method leaves the
    model exactly as it was.

    Parameters
    ----------
    model : torch.nn.Module
        a `PeftModel`, or any module that holds plain LoRA layers and maps a batch to logits
    likelihood : {"classification", "regression", "reward_modeling"}
    sigma_noise, prior_precision, prior_mean, temperature, enable_backprop, dict_key_x, dict_key_y
        of the host's classes
    backend : type of CurvatureInterface, optional
    backend_kwargs : dict, optional
    class_token_ids : sequence of int, optional
        for a causal language model: the tokens of the answers, one a class
    target_modules, layers_to_transform
        as in `peft.LoraConfig`: which LoRA layers take part; all if omitted
    **kwargs
        of the host's class for the same structure

    Raises
    ------
    ValueError, NotImplementedError
        See `laplace_lora_ext.lora_layers.find_blocks` and `LogitsModel`.
    """

    _default_backend: type[CurvatureInterface]
    mean: torch.Tensor

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
        target_modules: str | Sequence[str] | None = None,
        layers_to_transform: int | Iterable[int] | None = None,
        **kwargs: Any,
    ) -> None:
        backend = self._default_backend if backend is None else backend
        self._check_backend(backend)
        self.blocks = find_blocks(model, target_modules, layers_to_transform)
        warn_of_other_trainable(model)
        warn_if_untrained(self.blocks)
        adapted = PreferenceModel if likelihood == "reward_modeling" else LogitsModel
        self.model = adapted(model, class_token_ids, dict_key_y)
        self._agreement = MapAgreement()
        if issubclass(backend, LowRankKronInterface):
            backend_kwargs = {"blocks": self.blocks, **(backend_kwargs or {})}
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

    def _check_backend(self, backend: type[CurvatureInterface]) -> None:
        """Refuse a backend that has not what the structure needs."""

    @property
    def backend(self) -> CurvatureInterface:
        """Curvature of the blocks' weights, made at first use."""
        if self._backend is not None:
            return self._backend
        with self._prepared():
            return super().backend

    def fit(
        self,
        train_loader: DataLoader | Iterable[Any],
        override: bool = True,
        progress_bar: bool = False,
    ) -> None:
        """Fit the posterior around the model's present weights.

        If anything goes wrong on the way, the model and the previous fit stay as they were.

        Parameters
        ----------
        train_loader : DataLoader or iterable
            of mappings with labels, or of pairs `(X, y)`; read once. N is counted
        override : bool, default=True
            False adds the data to those of the previous fit
        progress_bar : bool, default=False

        Raises
        ------
        ValueError
            If the loader is empty, labels don't fit, or a number is not finite; the message
            names the batch, and the layer where there is one.
        RuntimeError
            If LoRA layers are bypassed in the forward pass.
        """
        before = dict(vars(self))
        known = self._summed_curvature() if self.n_data and not override else None
        try:
            self._init_H()
            loss, n_data = self._sum_curvature(train_loader, progress_bar)
            if known is not None:
                self.H = known + self.H
                loss, n_data = loss + before["loss"], n_data + before["n_data"]
            self._adopt_curvature(n_data)
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise
        self.loss, self.n_data = loss, n_data
        self.n_outputs = self.model.output_size
        self.mean = self._weights()
        self._posterior_scale = None
        self._agreement = MapAgreement()

    def _sum_curvature(
        self, train_loader: DataLoader | Iterable[Any], progress_bar: bool
    ) -> tuple[torch.Tensor, int]:
        """Add all batches to `self.H`; return the loss, in float64, and the number of data."""
        loss, n_data = torch.zeros((), device=self._device, dtype=torch.float64), 0
        batches = tqdm.tqdm(train_loader, desc="[Computing Hessian]", disable=not progress_bar)
        with self._prepared():
            for index, batch in enumerate(batches):
                with naming(f"batch {index}"):
                    X, y = self.model.split(batch)
                    loss += self._add_batch(X, y).to(loss)
                n_data += len(y)
        if not n_data:
            raise ValueError("The training loader has no data.")
        data_set = getattr(train_loader, "dataset", None)
        if isinstance(data_set, Sized) and len(data_set) != n_data:
            warnings.warn(
                f"Fitted on the {n_data} examples that the loader gave; its data set has "
                f"{len(data_set)}.",
                stacklevel=3,
            )
        return loss, n_data

    def _add_batch(self, X: Any, y: torch.Tensor) -> torch.Tensor:
        """Add a batch to `self.H` and return its loss."""
        # What the host's backends would not notice, this pass does.
        with forward_pass(self.model, self.blocks, X) as recorded:
            logits = recorded.logits.detach()
        y = check_targets(y, logits, self._training_likelihood)
        with torch.inference_mode(False), torch.enable_grad():
            loss, H = self._curv_closure(X, y.clone(), N=1)  # no inference tensor
        for block, part in zip(self.blocks, self._diagonal(H).split(self._sizes), strict=True):
            if not torch.isfinite(part).all():
                raise ValueError(f"LoRA layer {block.name}: non-finite curvature")
        self.H = self.H + H
        return loss

    @staticmethod
    def _diagonal(H: Any) -> torch.Tensor:
        """Diagonal of a batch's curvature, `(parameters,)`."""
        return H.diag()

    def _summed_curvature(self) -> Any:
        """What the sums of another run can be added to."""
        return self.H

    def _adopt_curvature(self, n_data: int) -> None:
        """Turn the sums in `self.H`, over `n_data` data, into what predictions use."""

    def _weights(self) -> torch.Tensor:
        """A copy of the LoRA weights as one vector, `(parameters,)`."""
        weights = [block.weight.detach().flatten() for block in self.blocks]
        return torch.cat([weight.to(self._device, self._dtype) for weight in weights])

    @property
    def log_det_prior_precision(self) -> torch.Tensor:
        """Log-determinant of the prior precision, in float64."""
        log_precision = torch.as_tensor(self.prior_precision).double().log()
        if len(log_precision) == self.n_params:
            return log_precision.sum()
        return (torch.tensor(self._sizes, device=self._device) * log_precision).sum()

    @property
    def scatter(self) -> torch.Tensor:
        """Squared distance of the weights from the prior mean under the prior, in float64."""
        squares = (self.mean - self.prior_mean).double().square()
        precision = torch.as_tensor(self.prior_precision).double()
        if len(precision) == self.n_params:
            return squares @ precision
        by_block = torch.stack([part.sum() for part in squares.split(self._sizes)])
        return (by_block * precision).sum()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a posterior that was fitted around the model's present weights.

        Raises
        ------
        ValueError
            If it belongs to another class, another likelihood or other weights.
        """
        self._check_weights(state_dict)
        super().load_state_dict(state_dict)

    def _check_weights(self, state_dict: dict[str, Any]) -> None:
        mean, weights = state_dict["mean"], self._weights()
        if mean.shape == weights.shape and not torch.equal(mean.to(weights), weights):
            raise ValueError(
                "The posterior was fitted around other LoRA weights than the model has now."
            )

"""Laplace approximations over LoRA weights: the host's classes, fitted through a model adapter."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from laplace.baselaplace import KronLaplace, ParametricLaplace
from laplace.curvature import CurvatureInterface
from torch import nn
from torch.utils.data import DataLoader

import laplace_lora_ext.saving as saving
from laplace_lora_ext.curvature.backend import LowRankKronInterface
from laplace_lora_ext.gaussian import LoRAGaussian, check_noise
from laplace_lora_ext.likelihoods import LIKELIHOODS, refuse_multi_label
from laplace_lora_ext.messages import warn
from laplace_lora_ext.models.locks import LOCK, exclusive
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import (
    active_adapter,
    check_known_to_host,
    find_blocks,
    is_untrained,
    warn_of_other_trainable,
)
from laplace_lora_ext.models.preference_model import PreferenceModel
from laplace_lora_ext.models.same_model import ModelState, check_runs, check_same
from laplace_lora_ext.models.weights import flattened
from laplace_lora_ext.passes.checks import check_called, inspected
from laplace_lora_ext.passes.recorder import Recorder
from laplace_lora_ext.predictive.amortized import LearntVariance
from laplace_lora_ext.processes.exchange import together
from laplace_lora_ext.sums import Sums, sums_of
from laplace_lora_ext.training import students


class LoRALaplace(LoRAGaussian):
    """What all Laplace approximations over LoRA weights share.

    The posterior is over the `lora_A` and `lora_B` weights of the active adapter. Everything else
    in the model, even a trainable head, stays at its MAP value. No method changes these weights.

    Parameters
    ----------
    model : torch.nn.Module
        a `PeftModel`, or any module that holds plain LoRA layers and maps a batch to logits
    likelihood : {"classification", "regression", "reward_modeling"}
    dict_key_y : str, default="labels"
        the key of a batch's labels
    backend, backend_kwargs
        the host's way to compute curvature, and its options
    class_token_ids : sequence of int, optional
        for a language model: the tokens of the answers, one a class
    mask_token_id : int, optional
        for a masked language model: the token at which the answer is read
    target_modules, layers_to_transform
        as in `peft.LoraConfig`: which LoRA layers take part; all if omitted
    weight_names : collection of str, optional
        names of LoRA weights without the adapter's name, such as "...query.lora_B.weight": these
        alone take part, whether or not they require grad
    **kwargs
        as for the host's class of the same structure: `prior_precision`, `prior_mean`,
        `sigma_noise`, `temperature`, `enable_backprop`, `dict_key_x` and so on

    Attributes
    ----------
    learnt_variance : LearntVariance or None
        what `amortize` has learnt of the present fit

    Raises
    ------
    ValueError, NotImplementedError
        See `laplace_lora_ext.models.lora_layers.find_blocks` and `LogitsModel`.
    """

    _default_backend: type[CurvatureInterface]
    loss: Any
    H: Any
    H_facs: Any  # the sums over data that `H` is made of

    def __init__(
        self,
        model: nn.Module,
        likelihood: str,
        *,
        dict_key_y: str = "labels",
        backend: type[CurvatureInterface] | None = None,
        backend_kwargs: dict[str, Any] | None = None,
        class_token_ids: Sequence[int] | None = None,
        mask_token_id: int | None = None,
        target_modules: str | Sequence[str] | None = None,
        layers_to_transform: int | Iterable[int] | None = None,
        weight_names: Collection[str] | None = None,
        **kwargs: Any,
    ) -> None:
        check_noise(kwargs.get("sigma_noise", 1.0))  # the host would ask whether it is 1
        backend = self._default_backend if backend is None else backend
        self._check_backend(backend)
        adapted = self._adapted(likelihood)
        with LOCK:  # passes of other threads change what is active
            adapter = active_adapter(model)
        self.model = adapted(model, class_token_ids, dict_key_y, mask_token_id, adapter)
        if likelihood == "classification" and self.model.is_multi_label:
            refuse_multi_label("No likelihood fits problem_type 'multi_label_classification'")
        with LOCK:  # and what requires grad
            self.blocks = find_blocks(model, target_modules, layers_to_transform, weight_names)
            warn_of_other_trainable(model)
        self.recorder = Recorder(self.model, self.blocks)
        if is_untrained(self.blocks):
            warn("Every lora_B weight is 0: the adapter looks untrained. Train it first.")
        self.trained_likelihood = LIKELIHOODS.get(likelihood, LIKELIHOODS["classification"])
        self.predicted_likelihood = LIKELIHOODS.get(likelihood, LIKELIHOODS["regression"])
        self.learnt_variance: LearntVariance | None = None
        self._fitted: ModelState | None = None
        if issubclass(backend, LowRankKronInterface):
            backend_kwargs = {"recorder": self.recorder, **(backend_kwargs or {})}
        else:
            check_known_to_host(self.blocks)
        with self._prepared():  # the host collects the parameters that require grad
            super().__init__(
                self.model,
                likelihood,
                dict_key_y=dict_key_y,
                backend=backend,
                backend_kwargs=backend_kwargs,
                **kwargs,
            )
        self._places = self._places_now()

    def for_model(self, model: nn.Module) -> LoRALaplace:
        """A posterior of the same class with the same options around another model, not fitted."""
        of_host = ("sigma_noise", "prior_mean", "temperature", "enable_backprop", "dict_key_x")
        if isinstance(self, KronLaplace):
            of_host += ("damping",)
        return type(self)(
            model,
            self.likelihood,
            dict_key_y=self.dict_key_y,
            backend=self._backend_cls,
            backend_kwargs=self._backend_options,
            class_token_ids=self.model.class_token_ids,
            mask_token_id=self.model.mask_token_id,
            weight_names=[block.known_as for block in self.blocks],
            **{name: getattr(self, name) for name in of_host},
        )

    def __repr__(self) -> str:
        """What it is of, how large, fitted to what, and its prior, in a line."""
        model = type(self.model.transformer or self.model.model).__name__
        fit = f"fitted to {self.n_data:,} examples" if self.n_data else "not fitted"
        prior = self.prior_precision.log().mean().exp().item()
        return (
            f"{type(self).__name__}({self.likelihood} by {model}; {len(self.blocks)} LoRA weights "
            f"of {sum(self._sizes):,} parameters; {fit}; prior precision {prior:.4g})"
        )

    def _adapted(self, likelihood: str) -> type[LogitsModel]:
        """What makes logits of the model's output."""
        return PreferenceModel if likelihood == "reward_modeling" else LogitsModel

    def _init_H(self) -> None:  # noqa: N802
        self.H = self.H_facs = None  # the host starts with zeros, and predicts without a fit

    def _check_backend(self, backend: type[CurvatureInterface]) -> None:
        """Refuse a backend that lacks what the structure needs."""

    def _zeros(self) -> Any:
        """Curvature of no data."""
        raise NotImplementedError

    def _add_batch(self, H: Any, X: Any, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Loss of a batch, and `H` plus its curvature.

        Labels that don't fit and numbers that are not finite are refused.
        """
        targets = self.trained_likelihood.as_targets(y.clone(), self._dtype)
        check = partial(self.trained_likelihood.check_targets, y)
        with self._prepared(), torch.enable_grad(), inspected(self.recorder, X, check):
            loss, of_batch = self._curv_closure(X, targets, N=1)
        diagonal = of_batch if getattr(of_batch, "ndim", 2) == 1 else of_batch.diag()
        for block, part in zip(self.blocks, diagonal.split(self._sizes), strict=True):
            if not torch.isfinite(part).all():
                raise ValueError(f"LoRA layer {block.name}: non-finite curvature")
        return loss, H + of_batch

    def _draw_after(self, n_examples: int) -> None:
        """Let the next batch's labels be drawn as those that follow so many examples."""
        if isinstance(self.backend, LowRankKronInterface):
            self.backend.n_before = n_examples

    def _packed(self, H: Any) -> Any:
        """Sums as nested lists and dictionaries of tensors and numbers."""
        return H

    def _unpacked(self, state: Any) -> Any:
        """Sums from what `_packed` returned, on the blocks' devices."""
        return state.to(self._device, self._dtype)

    def _decomposed(self, H: Any, n_data: int) -> tuple[Any, Any]:
        """What to keep of sums over `n_data` examples, and the curvature that they make."""
        return H, H

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

    @exclusive
    @torch.inference_mode(False)  # what is kept must not be inference tensors
    def fit(
        self,
        train_loader: DataLoader | Iterable[Any],
        override: bool = True,
        progress_bar: bool = False,
    ) -> None:
        """Fit the posterior around the model's present weights.

        If an error occurs, the model and the previous fit stay as they were.

        In a `torch.distributed` process group, call this on every rank, each with its own shard of
        the data (a `DistributedSampler`, or a loader that Accelerate prepared): all ranks end with
        the posterior of all data. The same goes for `predictive_statistics` and
        `optimize_prior_precision`. Each rank makes its own predictions.

        Parameters
        ----------
        train_loader : DataLoader or iterable
            of mappings with labels, or of pairs `(X, y)`; read once
        override : bool, default=True
            False adds the data to those of the previous fit, which `save_pretrained` and
            `from_pretrained` carry over to another process. A fit in parts is one fit of all
        progress_bar : bool, default=False

        Raises
        ------
        ValueError
            If the loader is empty, labels don't fit, a number is not finite, or two processes
            differ in weights or settings or have the same data. The message names the batch and
            the layer.
        RuntimeError
            If some LoRA layers are never called, or another rank has failed.
        """
        adds = self.n_data > 0 and not override
        with together():
            if adds:
                self.check_model()
            else:
                check_runs(self.model, self.blocks)
            self._move_with_model()
            fitted = ModelState.of(self.model, self.blocks)
            mean = flattened(self.blocks, self._device)
            before = Sums(self.H_facs, self.loss, self.n_data) if adds else None
            sums = sums_of(self, train_loader, progress_bar, before)
            if not adds:
                check_called(self.blocks, sums.called)
            curvature = self._decomposed(sums.H, sums.n_data)
        # All that can fail has been done.
        self.H_facs, self.H = curvature
        self.loss, self.n_data, self.n_outputs = sums.loss, sums.n_data, self.model.output_size
        self.mean, self._fitted = mean, fitted
        self._posterior_scale = self.learnt_variance = None

    def check_model(self) -> None:
        """Move the posterior to where its model is; refuse one that has changed since the fit."""
        super()._check_H_init()
        if self._fitted is not None:
            check_same(self.model, self.blocks, self._fitted, self.mean)
        self._move_with_model()

    def _check_H_init(self) -> None:  # noqa: N802
        super()._check_H_init()
        self._move_with_model()

    def _places_now(self) -> list[tuple[torch.device, torch.dtype]]:
        """Device and precision of what is over all blocks, and of each block."""
        return [(self._device, self._dtype), *(block.place for block in self.blocks)]

    @torch.inference_mode(False)
    def _move_with_model(self) -> None:
        """Move the posterior and its prior to where the model's LoRA weights are now."""
        now = self._places_now()
        if now == self._places:
            return
        if self.n_data:
            sums = self._unpacked(self._packed(self.H_facs))
            self.H_facs, self.H = self._decomposed(sums, self.n_data)
            self.mean, self.loss = self.mean.to(*now[0]), self.loss.to(self._device)
        if self.learnt_variance is not None:
            self.learnt_variance = self.learnt_variance.to(*now[0])
        for name in ("prior_precision", "prior_mean", "sigma_noise"):
            setattr(self, name, getattr(self, name))  # the host moves what it is given
        self._backend = None  # the host's keeps buffers that the model has replaced
        self._places = now

    save_pretrained = saving.save_pretrained
    sample_adapters = saving.sample_adapters
    distill = students.distill

    @exclusive
    def state_dict(self) -> dict[str, Any]:
        """The host's state, with settings and a description of the model.

        It holds tensors, numbers and text alone, in dictionaries and lists.
        """
        state = ParametricLaplace.state_dict(self)  # refuses a posterior without a fit
        assert self._fitted is not None
        learnt = self.learnt_variance and dict(vars(self.learnt_variance))
        own = {"H": self._packed(self.H_facs), "settings": self._settings()}
        return state | own | {"model": self._fitted.state_dict(), "learnt_variance": learnt}

    @exclusive
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a posterior that was fitted around the model's present weights.

        Parameters
        ----------
        state_dict : dict
            what `state_dict` returned

        Raises
        ------
        ValueError
            If its class, likelihood, model or settings are not these. The message names what
            differs, and nothing changes.
        """
        own = {"cls_name": type(self).__name__, "likelihood": self.likelihood}
        saving.check_state(state_dict, own | self._settings(), self.model, self.blocks)
        curvature = self._decomposed(self._unpacked(state_dict["H"]), state_dict["n_data"])
        place, learnt = (self._device, self._dtype), state_dict["learnt_variance"]
        learnt = None if learnt is None else LearntVariance(**learnt).to(*place)
        moved = {"mean": state_dict["mean"].to(*place), "loss": state_dict["loss"].to(self._device)}
        ParametricLaplace.load_state_dict(self, state_dict | moved)
        self.H_facs, self.H = curvature
        self.learnt_variance, self._posterior_scale = learnt, None
        self._fitted, self._places = ModelState.of(self.model, self.blocks), self._places_now()

    def _settings(self) -> dict[str, Any]:
        """Backend of the curvature, and its options."""
        return {"backend": self._backend_cls.__name__, **self._backend_options}

    @property
    def _backend_options(self) -> dict[str, Any]:
        """The user's `backend_kwargs`, which know nothing of this model."""
        return {k: v for k, v in self._backend_kwargs.items() if k != "recorder"}

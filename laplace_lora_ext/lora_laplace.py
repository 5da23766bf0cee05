"""Laplace approximations over LoRA weights: the host's classes, fitted through a model adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import huggingface_hub
import numpy as np
import torch
import torchmetrics
from laplace.baselaplace import ParametricLaplace
from laplace.curvature import CurvatureInterface
from torch import nn
from torch.utils.data import DataLoader

from laplace_lora_ext.curvature.backend import LowRankKronInterface
from laplace_lora_ext.curvature.matrix import LowRankKronDecomposed
from laplace_lora_ext.files import write_posterior
from laplace_lora_ext.fitting.checkpoint import keeper_in
from laplace_lora_ext.fitting.sums import sums_of
from laplace_lora_ext.likelihoods import LIKELIHOODS, Link
from laplace_lora_ext.linearized.basis import Basis, eigenbasis
from laplace_lora_ext.linearized.data import linearize
from laplace_lora_ext.linearized.model import LinearizedModel
from laplace_lora_ext.models.adapter_state import check_runs, check_unchanged, fingerprint
from laplace_lora_ext.models.adapters import find_peft_model, new_folders, write_adapter
from laplace_lora_ext.models.locks import exclusive
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import (
    Block,
    check_without_dora,
    find_blocks,
    warn_if_untrained,
    warn_of_other_trainable,
)
from laplace_lora_ext.models.model_state import FittedModel, ModelState
from laplace_lora_ext.models.placement import check_in_place
from laplace_lora_ext.models.preference_model import PreferenceModel
from laplace_lora_ext.passes import jacobians
from laplace_lora_ext.passes.checks import check_called, inspected
from laplace_lora_ext.precision import without_autocast
from laplace_lora_ext.predictive.decisions import Prediction
from laplace_lora_ext.predictive.links import mean_field, probit, sampled_alike, shared_noise
from laplace_lora_ext.predictive.map_agreement import MapAgreement
from laplace_lora_ext.predictive.moments import Moments
from laplace_lora_ext.predictive.sampling import gaussian_samples
from laplace_lora_ext.predictive.statistics import PredictiveStatistics
from laplace_lora_ext.processes.exchange import one_generator, together
from laplace_lora_ext.tuning import TuningHistory, TuningMethod, build


class LoRALaplace(ParametricLaplace):
    """What all Laplace approximations over LoRA weights share.

    The posterior is over the `lora_A` and `lora_B` weights of the active adapter. Everything else
    in the model, a trainable head included, stays at its MAP value. Every method leaves the model
    exactly as it was.

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
        for a language model: the tokens of the answers, one a class
    mask_token_id : int, optional
        for a masked language model: the token at which the answer is read
    target_modules, layers_to_transform
        as in `peft.LoraConfig`: which LoRA layers take part; all if omitted
    **kwargs
        of the host's class for the same structure

    Attributes
    ----------
    model : LogitsModel
    blocks : list of Block
        the LoRA weights that the posterior is over
    trained_likelihood : Likelihood
        that of the training data; rewards are learnt from preferences, which are two classes

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
        self.blocks = find_blocks(model, target_modules, layers_to_transform)
        warn_of_other_trainable(model)
        warn_if_untrained(self.blocks)
        adapted = self._adapted(likelihood)
        self.model = adapted(model, class_token_ids, dict_key_y, mask_token_id)
        self.trained_likelihood = LIKELIHOODS.get(likelihood, LIKELIHOODS["classification"])
        self._predicted_likelihood = LIKELIHOODS.get(likelihood, LIKELIHOODS["regression"])
        self._agreement = MapAgreement()
        self._fitted: FittedModel | None = None
        if issubclass(backend, LowRankKronInterface):
            backend_kwargs = {"blocks": self.blocks, **(backend_kwargs or {})}
        else:
            check_without_dora(self.blocks)
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

    # --- what the structures say ---------------------------------------------------------------

    def _adapted(self, likelihood: str) -> type[LogitsModel]:
        """What makes logits of the model's output."""
        return PreferenceModel if likelihood == "reward_modeling" else LogitsModel

    def _init_H(self) -> None:  # noqa: N802
        self.H = None  # there is no curvature before a fit, where the host has zeros

    def _check_backend(self, backend: type[CurvatureInterface]) -> None:
        """Refuse a backend that has not what the structure needs."""

    def _zeros(self) -> Any:
        """Curvature of no data."""
        raise NotImplementedError

    def _add_batch(self, H: Any, X: Any, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Loss of a batch, and the sum of its curvature and `H`."""
        targets = self.trained_likelihood.as_targets(y.clone(), self._dtype)
        check = partial(self.trained_likelihood.check_targets, y)
        with self._prepared(), torch.enable_grad(), inspected(self.model, self.blocks, X, check):
            loss, of_batch = self._curv_closure(X, targets, N=1)
        for block, part in zip(self.blocks, _diagonal(of_batch).split(self._sizes), strict=True):
            if not torch.isfinite(part).all():
                raise ValueError(f"LoRA layer {block.name}: non-finite curvature")
        return loss, H + of_batch

    def _sums(self) -> Any:
        """What the sums of another run can be added to."""
        return self.H

    def _packed(self, H: Any) -> Any:
        """Sums as a nest of tensors and numbers."""
        return H

    def _unpacked(self, state: Any) -> Any:
        """Sums from what `_packed` has returned, on the blocks' devices."""
        return state.to(self._device)

    def _identity(self) -> dict[str, str]:
        """What sums of several runs must have in common, so that they can be added."""
        kind = type(self).__name__, self.likelihood, self._dtype, self.model.class_token_ids
        return {
            "LoRA weights": fingerprint(self.blocks),
            "base or head": ModelState.of(self.model, self.blocks).digest(),
            "settings": repr((*kind, self._settings())),
        }

    def _adopt(self, H: Any, n_data: int) -> None:
        """Keep what the sums over `n_data` data come to."""
        self.H = H

    # --- fit -----------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return self.blocks[0].device

    @property
    def _dtype(self) -> torch.dtype:
        return self.blocks[0].statistics_dtype

    @property
    def _sizes(self) -> list[int]:
        return [block.weight.numel() for block in self.blocks]

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """The model in evaluation mode, with gradients for the LoRA weights alone."""
        with self.model.prepared([block.weight for block in self.blocks]):
            yield

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
        *,
        checkpoint: str | Path | None = None,
        every: int = 100,
    ) -> None:
        """Fit the posterior around the model's present weights.

        If anything goes wrong on the way, the model and the previous fit stay as they were.

        Where a `torch.distributed` process group is initialised, every rank calls this with its
        shard, by a `DistributedSampler` or prepared by Accelerate, and ends with the posterior of
        all data. So it is with `predictive_statistics`, `linearize` and
        `optimize_prior_precision`; predictions are each rank's own.

        Parameters
        ----------
        train_loader : DataLoader or iterable
            of mappings with labels, or of pairs `(X, y)`; read once. N is counted
        override : bool, default=True
            False adds the data to those of the previous fit
        progress_bar : bool, default=False
        checkpoint : str or Path, optional
            folder for the sums so far, from which the same call goes on after it was ended. The
            loader must give the same batches again, so seed one that shuffles. The file is removed
            when the fit is done
        every : int, default=100
            batches between two writings of the checkpoint

        Raises
        ------
        ValueError
            If the loader is empty, labels don't fit, or a number is not finite; the message
            names the batch, and the layer where there is one. With several processes also if
            they have the same data, other weights or other settings, and with a checkpoint if that
            is damaged or of another fit.
        RuntimeError
            If no batch calls some of the LoRA layers, or another rank has failed.
        """
        if not override:
            self._check_model()
        with together():
            keeper = keeper_in(checkpoint, every, self._identity())
            H, loss, n_data, called = sums_of(self, train_loader, keeper, progress_bar)
        if override or not self.n_data:
            check_called(self.blocks, called)
        if self.n_data and not override:
            H, loss, n_data = self._sums() + H, loss + self.loss, n_data + self.n_data
        self._adopt(H, n_data)
        self.loss, self.n_data = loss, n_data
        self.n_outputs = self.model.output_size
        self.mean, self._fitted = self._weights(), FittedModel(self.model, self.blocks)
        self._posterior_scale = None
        self._agreement = MapAgreement()
        keeper.remove()

    def _check_model(self) -> None:
        """Refuse to use the posterior with another model than that of the fit."""
        check_runs(self.blocks)
        if self._fitted is not None:
            check_unchanged(self.blocks, self.mean)
            self._fitted.check()

    def _weights(self) -> torch.Tensor:
        """A copy of the LoRA weights as one vector, `(parameters,)`."""
        weights = [block.values.flatten() for block in self.blocks]
        return torch.cat([weight.to(self._device, self._dtype) for weight in weights])

    # --- evidence and prior --------------------------------------------------------------------

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

    @exclusive
    @torch.inference_mode(False)
    @torch.enable_grad()
    def optimize_prior_precision(
        self,
        pred_type: str = "glm",
        method: str | TuningMethod = "marglik",
        n_steps: int = 1000,
        lr: float = 0.1,
        init_prior_prec: float | torch.Tensor = 1.0,
        prior_structure: str = "scalar",
        val_loader: DataLoader | Iterable[Any] | PredictiveStatistics | None = None,
        loss: torchmetrics.Metric | Callable[..., torch.Tensor] | None = None,
        log_prior_prec_min: float = -4,
        log_prior_prec_max: float = 4,
        grid_size: int = 100,
        link_approx: str | None = None,
        n_samples: int = 100,
        verbose: bool = False,
        progress_bar: bool = False,
        log_prior_prec_base: float = 10.0,
        *,
        tolerance: float = 1e-3,
        optimize_sigma_noise: bool = False,
        batch_size: int = 4,
        generator: torch.Generator | None = None,
        train_loader: DataLoader
        | Iterable[Any]
        | LinearizedModel
        | PredictiveStatistics
        | None = None,
        pooling: float = 3.0,
        max_change: float = 0.1,
        max_examples: int = 2000,
    ) -> TuningHistory:
        """Choose the prior precision; if anything goes wrong, it stays as it was.

        Parameters
        ----------
        method : str or TuningMethod
            how. "agreement" is the recommended one; it, "marglik", "linearized_marglik" and
            "linearized_loo" need no validation data, "gridsearch" and "val_gd" do. Each name
            stands for an object of `laplace_lora_ext.tuning`, which says what it does and what its
            options mean; such an object can be given instead
        verbose : bool, default=False
            print the result
        **options
            all other arguments are the object's. One that it lacks is refused, unless it has its
            default value

        Returns
        -------
        TuningHistory
            evidence or loss along the way

        Raises
        ------
        ValueError
            If an option or the data that a method needs are missing or don't suit it, or if the
            objective is not a number.
        NotImplementedError
            For "val_gd" with another structure than "lowrank_kron".

        Notes
        -----
        "marglik" tends to choose a smaller prior precision than validation data would, that is a
        broader posterior. "linearized_marglik" and "linearized_loo" come closer, and "agreement"
        closest; all three need the training data once more. `benchmarks/README.md` has the figures.
        """
        options = {
            name: value
            for name, value in locals().items()
            if name in _TUNING_DEFAULTS and not _is_default(value, _TUNING_DEFAULTS[name])
        }
        history = build(method, options)(self)
        if verbose:
            print(f"Optimized prior precision is {self.prior_precision}.")
        return history

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Try prior precisions within: predictions are not counted, and an error undoes all."""
        before = self._prior_precision, self._sigma_noise
        try:
            with self._agreement.paused():
                yield
        except BaseException:
            self._prior_precision, self._sigma_noise = before
            self._posterior_scale = None
            raise
        self._agreement = MapAgreement()

    def statistics_of(self, loader: Any, progress_bar: bool) -> PredictiveStatistics | None:
        """Statistics of a data set, or those that are given, where the structure has such."""
        return None

    @exclusive
    @torch.inference_mode(False)
    @without_autocast
    @together()
    def linearize(
        self,
        train_loader: DataLoader | Iterable[Any],
        n_features: int | None = None,
        generator: torch.Generator | None = None,
        progress_bar: bool = False,
    ) -> LinearizedModel:
        """One pass over the training set, for "linearized_marglik" and "linearized_loo".

        Parameters
        ----------
        train_loader : DataLoader or iterable
            the data of the fit
        n_features : int, optional
            along about how many directions Jacobians of different examples are compared; those
            eigenvectors that the curvature keeps if omitted. N examples with C outputs take
            `4 N C n_features` bytes of main memory. As many as there are LoRA weights are exact
        generator : torch.Generator, optional
            of directions beside the eigenvectors
        progress_bar : bool, default=False

        Raises
        ------
        ValueError
            If the loader has no data or not those of the fit, labels don't fit, or a number is
            not finite; the message names the batch.
        """
        self._check_H_init()
        if n_features is not None and n_features < 1:
            raise ValueError(f"n_features must be at least 1, not {n_features}.")
        self._check_model()
        fitted = self.model, self.blocks, self.trained_likelihood
        basis = Basis(self._eigenbasis(train_loader), n_features, one_generator(generator))
        distance = self.mean - self.prior_mean
        model = linearize(*fitted, distance, train_loader, basis, progress_bar)
        model.check_training_data(self.n_data, float(self.loss))
        return model

    def _eigenbasis(self, loader: Iterable[Any]) -> LowRankKronDecomposed:
        """A curvature with eigenvectors; a structure without them needs a pass for it."""
        return eigenbasis(self.model, self.blocks, self.trained_likelihood, loader)

    # --- predictions ---------------------------------------------------------------------------

    @exclusive
    def __call__(
        self,
        x: Any,
        pred_type: str = "glm",
        joint: bool = False,
        link_approx: str = "probit",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        fitting: bool = False,
        **model_kwargs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Posterior predictive on a batch, as the host's; `generator` seeds all that is sampled.

        Parameters
        ----------
        x : Mapping, torch.Tensor or Moments
            inputs of B examples; labels in a mapping are ignored. With "glm" their `Moments` will
            do, which have a prior precision of their own
        pred_type, joint, n_samples, diagonal_output, generator
            as the host's
        link_approx : {"probit", "mc", "mean_field", "bridge", "bridge_norm"}
            the host's, and "mean_field" (Lu, Ie & Sha, 2020): like "mc" it knows the covariance of
            the logits' differences, and unlike it draws no samples
        fitting : bool, default=False
            reward modeling only: probabilities of preferences instead of rewards
        **model_kwargs
            passed on to the model, with `pred_type="nn"`

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            probabilities `(B, C)`; for regression and rewards the mean `(B, C)` and covariance
            `(B, C, C)`

        Warns
        -----
        UserWarning
            With "glm", if more than 8 % of the predictions so far, of 100 or more, have another
            most probable class than the model itself.
        """
        predicted = self.trained_likelihood if fitting else self._predicted_likelihood
        links = _links(n_samples, generator)
        if predicted.is_gaussian and link_approx == "mean_field":
            link_approx = "probit"  # neither has a meaning, and the host knows this one
        if pred_type == "nn" and generator is not None:
            samples = self._nn_functional_samples(x, n_samples, generator, **model_kwargs)
            if predicted.is_gaussian:
                return samples.mean(0), samples.var(0)
            return samples.softmax(-1).mean(0)
        if pred_type == "glm" and not predicted.is_gaussian and link_approx in links:
            f_mu, f_var = self._glm_predictive_distribution(x)
            if diagonal_output and link_approx == "mc":
                f_var = torch.diag_embed(f_var.diagonal(dim1=1, dim2=2))
            with torch.autocast(self._device.type, enabled=False):
                output = links[link_approx](f_mu, f_var).exp()
        else:
            options = joint, link_approx, n_samples, diagonal_output, generator, fitting
            output = super().__call__(x, pred_type, *options, **model_kwargs)
        if pred_type == "glm" and isinstance(output, torch.Tensor):
            self._agreement.add(output, link_approx)
        return output

    @exclusive
    def predict(
        self,
        x: Any,
        link_approx: str = "mean_field",
        n_samples: int = 1000,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """Class probabilities with what a decision needs beside them, by "glm".

        Parameters
        ----------
        x : Mapping, torch.Tensor or Moments
            as for a call
        link_approx : {"mean_field", "probit", "mc"}
            of the probabilities
        n_samples : int, default=1000
            draws of the logits, for entropies and variances
        generator : torch.Generator, optional

        Returns
        -------
        Prediction

        Raises
        ------
        ValueError
            For a likelihood without classes, or another link.
        """
        if self._predicted_likelihood.is_gaussian:
            raise ValueError(f"{self.likelihood} predicts numbers: la(x) has their variance.")
        links = _links(n_samples, generator)
        if link_approx not in links:
            raise ValueError(f"link_approx {link_approx!r} is none of {list(links)}.")
        moments = Moments(*self._glm_predictive_distribution(x))
        with torch.autocast(self._device.type, enabled=False):
            probabilities = links[link_approx](*moments).exp()
            noise = shared_noise(moments.f_mu, n_samples, generator)
            prediction = Prediction.of(moments, probabilities, noise)
        self._agreement.add(prediction.probabilities, link_approx)
        return prediction

    def predict_proba(self, x: Any, link_approx: str = "mean_field") -> np.ndarray:
        """Class probabilities `(B, C)` as scikit-learn takes them, the same in every call."""
        prediction = self.predict(x, link_approx, generator=torch.Generator())
        return prediction.probabilities.detach().cpu().numpy()

    @exclusive
    def lower_bound(self, x: Any, k: float = 1.0) -> torch.Tensor:
        """Mean less `k` standard deviations of each output, `(B, C)`.

        For rewards of texts that reward models know little of: a policy that is trained on the
        mean seeks them out.

        Raises
        ------
        ValueError
            For classification.
        """
        if not self._predicted_likelihood.is_gaussian:
            raise ValueError("Classes have no bound: take one of rewards or of a regression.")
        f_mu, f_var = self._glm_predictive_distribution(x)
        return f_mu - k * f_var.diagonal(dim1=-2, dim2=-1).sqrt()

    @exclusive
    def predictive_moments(
        self, x: Any, *, joint: bool = False
    ) -> Moments | tuple[torch.Tensor, torch.Tensor]:
        """Mean `(B, C)` and covariance `(B, C, C)` of a batch's logits, without a link or noise.

        With `joint` a pair of tensors, `(B * C,)` and `(B * C, B * C)`.
        """
        moments = self._glm_predictive_distribution(x, joint)
        return moments if joint else Moments(*moments)

    def _glm_predictive_distribution(
        self, X: Any, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(X, Moments):
            if joint:
                raise ValueError("Moments hold no covariance between examples: pass the inputs.")
            # Some links change them in place.
            f_mu, f_var = X.to(self._device, self._dtype, copy=True)
        else:
            self._check_model()
            with torch.set_grad_enabled(self.enable_backprop):
                f_mu, f_var = self._moments(X, joint)
        if not torch.isfinite(f_var).all():
            raise ValueError("The predictive covariance is not finite: is the prior precision?")
        self._agreement.expect(f_mu)
        if joint:
            f_mu = f_mu.flatten()
        elif diagonal_output:
            f_var = f_var.diagonal(dim1=-2, dim2=-1)
        return f_mu, f_var

    def _moments(self, X: Any, joint: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean `(B, C)`, and covariance `(B, C, C)` or, joint, `(B * C, B * C)`."""
        Js, f_mu = jacobians(self.model, self.blocks, X, self.enable_backprop)
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

    @without_autocast
    def sample(
        self, n_samples: int = 100, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        return super().sample(n_samples, generator)

    @without_autocast
    def _glm_functional_samples(
        self,
        f_mu: torch.Tensor,
        f_var: torch.Tensor,
        n_samples: int,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        if diagonal_output:
            f_var = torch.diag_embed(f_var.diagonal(dim1=1, dim2=2))
        # Unlike the host's Cholesky factor, a symmetric root exists where a covariance is singular.
        return gaussian_samples(f_mu, f_var, shared_noise(f_mu, n_samples, generator))

    def _glm_predictive_samples(
        self,
        f_mu: torch.Tensor,
        f_var: torch.Tensor,
        n_samples: int,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        if f_mu.shape[-1] == 1:  # a single reward is a number, and no probability
            return self._glm_functional_samples(f_mu, f_var, n_samples, diagonal_output, generator)
        return super()._glm_predictive_samples(f_mu, f_var, n_samples, diagonal_output, generator)

    def _nn_functional_samples(
        self,
        X: Any,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        draws = range(n_samples)
        return torch.stack([self._sampled_logits(X, generator, model_kwargs) for _ in draws])

    def _nn_predictive_classification(
        self, X: Any, n_samples: int = 100, **model_kwargs: Any
    ) -> torch.Tensor:
        probs = torch.zeros(())
        for _ in range(n_samples):  # one draw's logits held at a time
            probs = probs + self._sampled_logits(X, None, model_kwargs).softmax(-1) / n_samples
        return probs

    def _sampled_logits(
        self, X: Any, generator: torch.Generator | None, model_kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Logits `(B, C)` of the model with one draw of its LoRA weights."""
        if isinstance(X, Moments):
            raise ValueError('Moments hold no inputs: pass these for pred_type="nn".')
        self._check_model()
        drawn = self._sampled_weights(generator)
        weights = {
            name: drawn[id(p)] for name, p in self.model.named_parameters() if id(p) in drawn
        }
        with self.model.prepared(), torch.set_grad_enabled(self.enable_backprop):
            return torch.func.functional_call(self.model, weights, (X,), model_kwargs)

    def _sampled_weights(self, generator: torch.Generator | None) -> dict[int, torch.Tensor]:
        """One draw of the LoRA weights, by the `id` of the parameters that they stand for."""
        check_in_place([block.layer for block in self.blocks], "A draw of the weights")
        parts = self.sample(1, generator)[0].split(self._sizes)
        return {
            id(block.weight): part.reshape(block.weight.shape).to(block.weight)
            for block, part in zip(self.blocks, parts, strict=True)
        }

    def sample_adapters(
        self,
        n_samples: int,
        directory: str | Path,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> list[Path]:
        """Write draws from the posterior as LoRA adapters, such as for a multi-adapter server.

        The mean of their softmax probabilities is the prediction of `pred_type="nn"` with as many
        samples and a generator in the same state. LoRA weights outside the posterior, and trained
        modules such as a head, are saved with their MAP values.

        Parameters
        ----------
        n_samples : int
        directory : str or Path
            gets one folder a draw, "sample_0" and so on, with a configuration and safetensors
            that `PeftModel.from_pretrained` loads
        generator : torch.Generator, optional
        **kwargs
            of `PeftModel.save_pretrained`, such as `save_embedding_layers`

        Returns
        -------
        list of Path
            the folders

        Raises
        ------
        FileExistsError
            If one of the folders is there already; nothing is written then.
        ValueError
            If the model holds no `PeftModel`.
        """
        model, adapter = find_peft_model(self.model), self.blocks[0].adapter
        return [
            write_adapter(model, adapter, self._sampled_weights(generator), folder, **kwargs)
            for folder in new_folders(directory, n_samples)
        ]

    # --- state ---------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the posterior into a folder, such as that of the adapter.

        `laplace_lora_ext.from_pretrained(model, folder)` reads it. There are two files,
        "laplace_posterior.safetensors" and "laplace_posterior.json".

        Parameters
        ----------
        folder : str or Path
            made where there is none
        """
        summary = {
            "evidence": self.log_marginal_likelihood().item(),
            "mean_prior_precision": torch.as_tensor(self.prior_precision).mean().item(),
            "n_data": self.n_data,
        }
        write_posterior(folder, self.state_dict(), summary)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Upload the adapter and the posterior to the Hugging Face hub.

        Parameters
        ----------
        repo_id : str
            made where there is none
        **kwargs
            of `huggingface_hub.upload_folder`, such as `token` and `commit_message`

        Returns
        -------
        huggingface_hub.CommitInfo
        """
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            find_peft_model(self.model).save_pretrained(folder)
            huggingface_hub.create_repo(repo_id, exist_ok=True, token=kwargs.get("token"))
            return huggingface_hub.upload_folder(repo_id=repo_id, folder_path=folder, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """State as the host's, with what the posterior rests on."""
        state = ParametricLaplace.state_dict(self)  # refuses a posterior that has not been fitted
        assert self._fitted is not None
        model = self._fitted.state.state_dict()
        return state | {"settings": self._settings(), "model": model}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a posterior that was fitted around the model's present weights.

        Raises
        ------
        ValueError
            If it belongs to another class, another likelihood, another model or other settings;
            the message names what differs, and nothing is changed.
        """
        missing = {"mean", "H", "cls_name", "likelihood", "settings", "model"} - state_dict.keys()
        if missing:
            raise ValueError(f"The state of a posterior has {sorted(missing)}, and this has not.")
        self._check_state(state_dict)
        self.prior_precision = state_dict["prior_precision"]  # raises before all is changed
        self._load_curvature(state_dict)
        self._fitted = FittedModel(self.model, self.blocks)
        self._posterior_scale = None
        self._agreement = MapAgreement()

    def _load_curvature(self, state_dict: dict[str, Any]) -> None:
        ParametricLaplace.load_state_dict(self, state_dict)

    def _settings(self) -> dict[str, Any]:
        """Backend of the curvature, and its options."""
        options = {k: v for k, v in self._backend_kwargs.items() if k != "blocks"}
        return {"backend": self._backend_cls.__name__, **options}

    def _check_state(self, state_dict: dict[str, Any]) -> None:
        for name, value in (("cls_name", type(self).__name__), ("likelihood", self.likelihood)):
            if state_dict[name] != value:
                raise ValueError(f"The posterior has {name}={state_dict[name]!r}, not {value!r}.")
        fitted = ModelState.from_state_dict(state_dict["model"])
        difference = fitted.difference(ModelState.of(self.model, self.blocks))
        if difference is not None:
            raise ValueError(f"The posterior was fitted to another model. {difference}.")
        for name, value in self._settings().items():
            before = state_dict["settings"].get(name)
            if before != value:
                raise ValueError(f"The posterior was fitted with {name}={before!r}, not {value!r}.")
        mean, weights = state_dict["mean"], self._weights()
        if mean.dtype != weights.dtype:
            raise ValueError(
                f"The posterior is in {mean.dtype}, and the model's LoRA weights need "
                f"{weights.dtype}: load them in the precision of the fit."
            )
        if not torch.equal(mean.to(weights), weights):
            raise ValueError(
                "The posterior was fitted around other LoRA weights than the model has now."
            )


def _links(n_samples: int, generator: torch.Generator | None) -> dict[str, Link]:
    """Links that are the library's own, by name."""
    return {
        "probit": probit,
        "mean_field": mean_field,
        "mc": sampled_alike(n_samples, generator),
    }


def _diagonal(H: Any) -> torch.Tensor:
    """Diagonal of a batch's curvature, `(parameters,)`; a diagonal curvature is its own."""
    return H if isinstance(H, torch.Tensor) and H.ndim == 1 else H.diag()


_TUNING_DEFAULTS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in signature(LoRALaplace.optimize_prior_precision).parameters.items()
    if name not in ("self", "method", "verbose")
}


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, str | int | float) and value == default)

"""Laplace approximations over LoRA weights: the host's classes, fitted through a model adapter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from numbers import Real
from typing import Any, ClassVar

import torch
from laplace.baselaplace import KronLaplace, ParametricLaplace
from laplace.curvature import CurvatureInterface
from torch import nn
from torch.utils.data import DataLoader

import laplace_lora_ext.saving as saving
from laplace_lora_ext.curvature.backend import LowRankKronInterface
from laplace_lora_ext.likelihoods import LIKELIHOODS
from laplace_lora_ext.messages import check_positive, listed
from laplace_lora_ext.models.locks import LOCK, exclusive
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import (
    Block,
    check_known_to_host,
    find_blocks,
    warn_if_untrained,
    warn_of_other_trainable,
)
from laplace_lora_ext.models.preference_model import PreferenceModel
from laplace_lora_ext.models.same_model import ModelState, check_runs, check_same
from laplace_lora_ext.models.weights import flattened
from laplace_lora_ext.numerics import without_autocast
from laplace_lora_ext.passes import Directions, every_output, jacobians
from laplace_lora_ext.passes.checks import check_called, inspected
from laplace_lora_ext.predictive import amortized, decisions, glm
from laplace_lora_ext.predictive.amortized import LearntVariance, amortized_moments
from laplace_lora_ext.predictive.glm import moments_for
from laplace_lora_ext.predictive.links import own_links
from laplace_lora_ext.predictive.moments import semidefinite, uncorrelated
from laplace_lora_ext.predictive.networks import functional_samples, mean_probabilities
from laplace_lora_ext.predictive.statistics import PredictiveStatistics
from laplace_lora_ext.processes.exchange import together
from laplace_lora_ext.sums import sums_of
from laplace_lora_ext.training import students
from laplace_lora_ext.tuning import METHODS, TuningHistory, TuningMethod, build


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
    trained_likelihood, predicted_likelihood : Likelihood
        of the training data and of predictions: a reward model learns from preferences, which are
        two classes, and predicts numbers
    learnt_variance : LearntVariance or None
        what `amortize` has learnt of the present fit

    Raises
    ------
    ValueError, NotImplementedError
        See `laplace_lora_ext.models.lora_layers.find_blocks` and `LogitsModel`.
    """

    _default_backend: type[CurvatureInterface]
    _methods: ClassVar[Mapping[str, type[TuningMethod]]] = METHODS  # to choose the prior precision
    model: LogitsModel
    blocks: list[Block]
    mean: torch.Tensor
    loss: Any
    H: Any
    H_facs: Any  # the sums over data that `H` is made of

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
        warn_if_untrained(self.blocks)
        self.trained_likelihood = LIKELIHOODS.get(likelihood, LIKELIHOODS["classification"])
        self.predicted_likelihood = LIKELIHOODS.get(likelihood, LIKELIHOODS["regression"])
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
        self._places = self._places_now()

    def for_model(self, model: nn.Module) -> LoRALaplace:
        """A posterior of the same class, with the same options, around another model; not fitted.

        Parameters
        ----------
        model : torch.nn.Module
        """
        options: dict[str, Any] = {
            "sigma_noise": self.sigma_noise,
            "prior_mean": self.prior_mean,
            "temperature": self.temperature,
            "enable_backprop": self.enable_backprop,
            "dict_key_x": self.dict_key_x,
            "dict_key_y": self.dict_key_y,
            "backend": self._backend_cls,
            "backend_kwargs": self._backend_options,
            "class_token_ids": self.model.class_token_ids,
            "mask_token_id": self.model.mask_token_id,
            "target_modules": sorted({block.lora_layer for block in self.blocks}),
        }
        if isinstance(self, KronLaplace):
            options["damping"] = self.damping
        return type(self)(model, self.likelihood, **options)

    def __repr__(self) -> str:
        """What it is of, how large, fitted to what, and its prior, in a line."""
        model = type(self.model.transformer or self.model.model).__name__
        fit = f"fitted to {self.n_data:,} examples" if self.n_data else "not fitted"
        prior = self.prior_precision.log().mean().exp().item()
        return (
            f"{type(self).__name__}({self.likelihood} by {model}; {len(self.blocks)} LoRA weights "
            f"of {sum(self._sizes):,} parameters; {fit}; prior precision {prior:.4g})"
        )

    # --- what the structures say ---------------------------------------------------------------

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
        places = {str(place) for place, _ in self._places}
        if len(places) > 1 and not issubclass(self._backend_cls, LowRankKronInterface):
            raise NotImplementedError(
                f"{self._backend_cls.__name__} needs the model on one device, not on "
                f'{listed(sorted(places))}: move it, or use hessian_structure="lowrank_kron".'
            )
        targets = self.trained_likelihood.as_targets(y.clone(), self._dtype)
        check = partial(self.trained_likelihood.check_targets, y)
        with self._prepared(), torch.enable_grad(), inspected(self.model, self.blocks, X, check):
            loss, of_batch = self._curv_closure(X, targets, N=1)
        diagonal = of_batch if getattr(of_batch, "ndim", 2) == 1 else of_batch.diag()
        for block, part in zip(self.blocks, diagonal.split(self._sizes), strict=True):
            if not torch.isfinite(part).all():
                raise ValueError(f"LoRA layer {block.name}: non-finite curvature")
        return loss, H + of_batch

    def _packed(self, H: Any) -> Any:
        """Sums as nested lists and dictionaries of tensors and numbers."""
        return H

    def _unpacked(self, state: Any) -> Any:
        """Sums from what `_packed` returned, on the blocks' devices."""
        return state.to(self._device, self._dtype)

    def _decomposed(self, H: Any, n_data: int) -> tuple[Any, Any]:
        """What to keep of sums over `n_data` examples, and the curvature that they make."""
        return H, H

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
            `from_pretrained` carry over to another process
        progress_bar : bool, default=False

        Raises
        ------
        ValueError
            If the loader is empty, labels don't fit, a number is not finite, or two processes
            differ in weights or settings or have the same data. The message names the batch and
            the layer.
        RuntimeError
            If some LoRA layers are never called, the weights change while the data are read, or
            another rank has failed.
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
            sums = sums_of(self, train_loader, progress_bar)
            try:
                check_same(self.model, self.blocks, fitted, mean)
            except RuntimeError as error:  # as by an optimizer in the loader
                raise RuntimeError(
                    f"The model has changed while its training data were read. {error}"
                ) from None
            if adds:
                sums = sums.plus(self.H_facs, self.loss, self.n_data)
            else:
                check_called(self.blocks, sums.called)
            curvature = self._decomposed(sums.H, sums.n_data)
        # All that can fail has been done.
        self.H_facs, self.H = curvature
        self.loss, self.n_data, self.n_outputs = sums.loss, sums.n_data, self.model.output_size
        self.mean, self._fitted = mean, fitted
        self._posterior_scale = self.learnt_variance = None

    def check_model(self) -> None:
        """Move the posterior to where its model is now.

        Raises
        ------
        AttributeError
            Without a fit.
        RuntimeError
            If the model has changed since the fit. The message says what.
        """
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

    # --- evidence and prior --------------------------------------------------------------------

    @property
    def prior_precision(self) -> torch.Tensor:
        """`(1,)`, `(blocks,)` or, with "diag", `(parameters,)`; positive and finite."""
        return self._prior_precision

    @prior_precision.setter
    def prior_precision(self, value: float | torch.Tensor) -> None:
        check_positive("prior_precision", value)
        host: Any = super(LoRALaplace, type(self))
        host.prior_precision.fset(self, value)

    @property
    def sigma_noise(self) -> torch.Tensor:
        """Standard deviation of a regression's noise, `()`; positive and finite."""
        return self._sigma_noise

    @sigma_noise.setter
    def sigma_noise(self, value: float | torch.Tensor) -> None:
        check_positive("sigma_noise", value)
        host: Any = super(LoRALaplace, type(self))
        host.sigma_noise.fset(self, value)

    @property
    def temperature(self) -> float | torch.Tensor:
        """What the curvature is divided by; positive and finite."""
        return self._temperature

    @temperature.setter
    def temperature(self, value: float | torch.Tensor) -> None:
        check_positive("temperature", value)
        if isinstance(value, torch.Tensor) and value.numel() == 1:  # which may have a graph
            self._temperature = value.reshape(())
        elif isinstance(value, Real):
            self._temperature = float(value)
        else:
            raise ValueError(f"temperature must be one number, not {value!r}.")
        self._posterior_scale = None  # that the host has made with the old value

    @property
    def curvature_scale(self) -> torch.Tensor:
        """Factor of the curvature beside the prior, `()`: 1 / (sigma_noise² temperature)."""
        return self._H_factor

    @exclusive
    def log_marginal_likelihood(
        self,
        prior_precision: torch.Tensor | None = None,
        sigma_noise: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._check_H_init()
        return super().log_marginal_likelihood(prior_precision, sigma_noise)

    @property
    def log_det_prior_precision(self) -> torch.Tensor:
        """Log-determinant of the prior precision, in float64."""
        log_precision = self.prior_precision.double().log()
        if len(log_precision) == self.n_params:
            return log_precision.sum()
        return (torch.tensor(self._sizes, device=self._device) * log_precision).sum()

    @property
    def scatter(self) -> torch.Tensor:
        """Squared distance of the weights from the prior mean under the prior, in float64."""
        squares = (self.mean - self.prior_mean).double().square()
        if len(self.prior_precision) < self.n_params:
            squares = torch.stack([part.sum() for part in squares.split(self._sizes)])
        return (squares * self.prior_precision.double()).sum()

    @exclusive
    @torch.inference_mode(False)
    @torch.enable_grad()
    def optimize_prior_precision(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        pred_type: str = "glm",
        method: str | TuningMethod = "marglik",
        *,
        verbose: bool = False,
        **options: Any,
    ) -> TuningHistory:
        """Choose the prior precision; if anything goes wrong, it stays as it was.

        Parameters
        ----------
        pred_type : {"glm", "nn"}
            which predictions "gridsearch" scores; the other methods know "glm" alone
        method : str or TuningMethod
            start with "agreement"; "second_training" is the surest, if there is time to train
            twice. "gridsearch" and "val_gd" need validation data; "marglik" needs none at all. Each
            name stands for an object of `laplace_lora_ext.tuning`, which explains the method and
            its options; you can also pass such an object
        verbose : bool, default=False
            print the result
        **options
            options of the method, such as `train_loader`, `val_loader`, `prior_structure` and
            `progress_bar`: the fields of its object

        Returns
        -------
        TuningHistory
            the evidence or loss along the way

        Raises
        ------
        ValueError
            If the method lacks an option, data are missing or don't suit it, or the objective is
            not a number.
        NotImplementedError
            For "val_gd" with another structure than "lowrank_kron".

        Notes
        -----
        "marglik" tends to choose a smaller prior precision, hence a broader posterior, than
        validation data would. "agreement" comes closer; it needs the training data once more.
        `benchmarks/README.md` has the figures.
        """
        if pred_type != "glm":
            options["pred_type"] = pred_type
        history = build(method, options, self._methods)(self)
        if verbose:
            print(f"Optimized prior precision is {self.prior_precision}.")
        return history

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Try prior precisions: an error restores the old one."""
        self._move_with_model()
        before = self._prior_precision, self._sigma_noise
        try:
            yield
        except BaseException:
            self._prior_precision, self._sigma_noise = before
            self._posterior_scale = None
            raise

    def statistics_of(self, loader: Any, progress_bar: bool) -> PredictiveStatistics | None:
        """Statistics of a data set, or the given ones; None for a structure without any."""
        return None

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
        """Predict a batch, as the host does; `generator` seeds everything that is sampled.

        Parameters
        ----------
        x : Mapping, torch.Tensor or Moments
            inputs of B examples, or with "glm" their `Moments`. Labels in a mapping are ignored
        pred_type : {"glm", "nn", "amortized"}
            the host's, and "amortized": as "glm", with the variances that `amortize` has learnt
        joint, n_samples, diagonal_output, generator
            as for the host
        link_approx : {"probit", "mc", "mean_field", "bridge", "bridge_norm"}
            the host's, and "mean_field" (Lu, Ie & Sha, 2020): it takes the covariance between
            logits into account, as "mc" does, but draws no samples
        fitting : bool, default=False
            reward modeling only: probabilities of preferences instead of rewards
        **model_kwargs
            for the model, with `pred_type="nn"`

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            probabilities `(B, C)`; for regression and rewards mean `(B, C)` and covariance
            `(B, C, C)`

        Notes
        -----
        Under a broad posterior over many classes, the mean probability ("mc", and sometimes
        "probit") can be largest for another class than the model's own, which costs accuracy.
        "mean_field" keeps to the model's class more often, and a larger prior precision cures it.
        """
        likelihood = self.trained_likelihood if fitting else self.predicted_likelihood
        if likelihood.is_gaussian and link_approx == "mean_field":
            link_approx = "probit"  # numbers need no link, and the host must know its name
        if pred_type == "nn" and generator is not None:
            if not likelihood.is_gaussian:
                return mean_probabilities(self, x, n_samples, generator, **model_kwargs)
            samples = functional_samples(self, x, n_samples, generator, **model_kwargs)
            return samples.mean(0), samples.var(0)
        links = own_links(n_samples, generator)
        if pred_type == "amortized":
            x, pred_type = amortized_moments(self, x), "glm"
            if likelihood.is_gaussian or link_approx not in links:
                x = x._replace(f_var=semidefinite(x.f_var))
        if pred_type == "glm" and not likelihood.is_gaussian and link_approx in links:
            alone = diagonal_output and link_approx == "mc"
            f_mu, f_var = moments_for(self, x, "probit" if alone else link_approx)
            if alone:  # the variances of all logits
                f_var = uncorrelated(f_var)
            with torch.autocast(self.model.device.type, enabled=False):
                return links[link_approx](f_mu, f_var).exp()
        options = joint, link_approx, n_samples, diagonal_output, generator, fitting
        host: Any = ParametricLaplace.__call__
        return host(self, x, pred_type, *options, **model_kwargs)

    amortize = amortized.amortize
    predict = decisions.predict
    predict_proba = decisions.predict_proba
    lower_bound = decisions.lower_bound
    predictive_moments = glm.predictive_moments
    _glm_predictive_distribution: Any = glm.predictive_distribution
    _glm_functional_samples: Any = glm.functional_samples

    def moments(
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

    _nn_functional_samples: Any = functional_samples
    _nn_predictive_classification: Any = mean_probabilities

    distill = students.distill

    # --- state ---------------------------------------------------------------------------------

    save_pretrained = saving.save_pretrained
    push_to_hub = saving.push_to_hub
    sample_adapters = saving.sample_adapters

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
        return {k: v for k, v in self._backend_kwargs.items() if k != "blocks"}

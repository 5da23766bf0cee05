"""Posteriors over LoRA weights: the host's classes, fitted through an adapter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from laplace_lora_ext.curvature.accumulation import Structure
from laplace_lora_ext.fit import Fit, fit
from laplace_lora_ext.messages import check_count, check_name, check_positive, warn
from laplace_lora_ext.models.choices import class_tokens
from laplace_lora_ext.models.lora_layers import (
    Selection,
    active_adapter,
    find_blocks,
    is_untrained,
)
from laplace_lora_ext.models.running import exclusive, normal_tensors
from laplace_lora_ext.models.same_model import (
    ModelState,
    check_same,
    first_changed,
    standing_of,
)
from laplace_lora_ext.passes.recorder import Recorder
from laplace_lora_ext.predicting import Predictor
from laplace_lora_ext.predictive.amortization import (
    amortize,
    amortized_moments,
    learnt_moments,
)
from laplace_lora_ext.predictive.learnt_variance import LearntVariance
from laplace_lora_ext.predictive.links import (
    DEFAULT_LINK,
    LINKS,
    log_probabilities,
    shared_noise,
)
from laplace_lora_ext.predictive.moments import (
    Moments,
    gaussian_samples,
    without_covariances,
)
from laplace_lora_ext.predictive.posterior import (
    WITHOUT_VARIANCE,
    Posterior,
    drawn_functions,
    drawn_weights,
    logits_with,
    moments_for,
)
from laplace_lora_ext.processes import together
from laplace_lora_ext.saving import write_state
from laplace_lora_ext.tasks import task_of
from laplace_lora_ext.tuning import build
from laplace_lora_ext.tuning.method import (
    TuningHistory,
    TuningMethod,
    mean_squared_slope,
)

_PRIORS = ("prior_precision", "prior_mean")
_NUMBERS = ("temperature", "logit_scale")
_POSITIVE = ("prior_precision", "sigma_noise", *_NUMBERS)
_BRIDGES = ("bridge", "bridge_norm")  # the host's links, which know a softmax alone
# What files hold of a posterior beside its fit, by the names of its attributes.
_SAVED = (
    "prior_mean",
    "prior_precision",
    "sigma_noise",
    "temperature",
    "logit_scale",
    "n_contrasts",
    "metadata",
)


def _of_fit(field: str, before: Any = None) -> Any:
    """Make an attribute of a posterior that is a field of its present fit.

    Setting it, as the host does, makes another fit with that field, since a fit never
    changes. Before the first one it is `before`, whatever the host sets.
    """

    def get(la: LoRALaplace) -> Any:
        return before if la._fit is None else getattr(la._fit, field)

    def put(la: LoRALaplace, value: Any) -> None:
        if la._fit is not None:
            la._fit = replace(la._fit, **{field: value})

    return property(get, put)


class LoRALaplace(Posterior, Predictor):
    """What all Laplace approximations over LoRA weights share.

    The posterior is over the `lora_A` and `lora_B` weights of the active adapter and,
    with `modules_to_save`, over its heads. Weights that are frozen are left out, unless
    all of their layer are. Everything else in the model stays at its MAP value. No
    method changes these weights.

    Parameters
    ----------
    model : torch.nn.Module
        a `PeftModel`, or any module that holds plain LoRA layers and maps a batch to
        logits
    likelihood : str
        "classification", "regression" or "reward_modeling"; with any structure but
        "kron" also "multi_label_classification" or "token_classification"; with
        "lowrank_kron" alone "language_modeling"
    dict_key_y : str, default="labels"
        the key of a batch's labels
    backend_kwargs : dict, optional
        options of what computes the curvature: `LowRankKronGGN`, or for "kron" the
        host's `CurvlinopsGGN`
    class_token_ids : sequence of int, or of sequences of int, optional
        for a language model: the tokens of the answers, one or several a class
    class_texts : sequence of str, optional
        in place of `class_token_ids`, the answers as they stand behind a prompt, a
        space in front included where there is one; `tokenizer` says which tokens they
        are
    tokenizer : transformers.PreTrainedTokenizerBase, optional
        for `class_texts`
    normalised : bool, default=False
        whether the logit of an answer of several tokens is the mean of their
        log-probabilities, rather than the sum
    mask_token_id : int, optional
        for a masked language model: the token at which the answer is read
    target_modules : str or sequence of str, optional
        as in `peft.LoraConfig`: which LoRA layers take part; all if omitted
    layers_to_transform : int or iterable of int, optional
        as in `peft.LoraConfig`: in which of the model's layers they are; in all if
        omitted
    modules_to_save : bool or collection of str, default=False
        heads that take part too: weights and biases of the linear layers that PEFT
        trains and saves beside LoRA, all (True) or those of some names, as in
        `peft.LoraConfig`. They want a much smaller prior precision than LoRA weights
    weight_names : collection of str, optional
        names of weights without the adapter's name, such as "...query.lora_B.weight":
        these alone take part, whether or not they require grad. Other selections are
        refused beside them
    **kwargs
        as for the host's class of the same structure: `prior_precision`, `prior_mean`,
        `sigma_noise` and `temperature`

    Attributes
    ----------
    model : LogitsModel
        the model, from batches to logits
    blocks : list of Block
        the LoRA weights that the posterior is over
    task : Task
        what the model was trained to predict
    mean : torch.Tensor
        `(parameters,)`, the LoRA weights at the fit
    loss : torch.Tensor
        `()`, negative log-likelihood of the training data; of a regression half the
        sum of squares
    n_data : int
        number of training examples; 0 before a fit
    n_outputs : int
        number of the model's outputs; 0 before a fit
    H
        the curvature, without a prior; None before a fit. Its type depends on the
        structure
    H_facs
        the sums over data that `H` is made of; None before a fit
    learnt_variance : LearntVariance or None
        what `amortize` has learnt of the present fit
    prior_precision : torch.Tensor
        `(1,)`, `(blocks,)` or, with "diag" and "full", `(parameters,)`; positive and
        finite, as are the three that follow
    sigma_noise : torch.Tensor
        `()`, the standard deviation of a regression's noise
    temperature : float
        what the curvature is divided by
    logit_scale : float, default=1.0
        what all predictions multiply the logits f by: `link(s f, s² V)`. A posterior
        can only make a model less sure than it is; with a scale above 1 it can be surer
        too, and without any variance the scale is the inverse of a softmax's
        temperature. The evidence and the curvature know nothing of it. Leave it at 1
        for a regression, which has `sigma_noise`, and for language modeling
    metadata : dict
        numbers and text that the posterior's file is to hold too, such as how texts
        were read; `laplace-lora` keeps the classes' names there
    n_contrasts : int or None, default=None
        for the links "mean_field" and "mc": how many classes to compare with the most
        probable one, by a backward pass each. None takes as many as matter, at most 8,
        and the rest to vary like these; C - 1 are exact

    Raises
    ------
    ValueError
        If the model has no LoRA weights, or not all of the weights or answers that the
        options ask for.
    NotImplementedError
        For weights or models that no posterior can be over; the message names them.
    """

    _key: tuple[str, str]  # the host finds each class by its own
    _kind_of_structure: ClassVar[type[Structure]]

    _searched = (*Predictor._searched, "sigma_noise")
    # The host's name for what `_once` makes for a fit, its prior and its noise.
    _posterior_scale: Any

    mean: Tensor = _of_fit("mean", 0.0)
    loss: Tensor = _of_fit("loss", 0.0)
    n_data: int = _of_fit("n_data", 0)
    n_outputs: int = _of_fit("n_outputs", 0)
    H: Any = _of_fit("curvature")
    H_facs: Any = _of_fit("sums")
    learnt_variance: LearntVariance | None = _of_fit("learnt_variance")

    summary: Callable[[], str]  # which "lowrank_kron" alone has

    @exclusive  # passes of other threads change what is active, and requires grad
    def __init__(
        self,
        model: nn.Module,
        likelihood: str,
        *,
        dict_key_y: str = "labels",
        backend_kwargs: dict[str, Any] | None = None,
        class_token_ids: Sequence[Any] | None = None,
        class_texts: Sequence[str] | None = None,
        tokenizer: Any = None,
        normalised: bool = False,
        mask_token_id: int | None = None,
        target_modules: str | Sequence[str] | None = None,
        layers_to_transform: int | Iterable[int] | None = None,
        modules_to_save: Selection = False,
        weight_names: Collection[str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.task = task_of(likelihood)
        _, structure = self._key
        what = f"For the likelihood {likelihood!r} hessian_structure"
        check_name(what, structure, self.task.structures)
        answers = class_tokens(class_token_ids, class_texts, tokenizer)
        adapter = active_adapter(model)
        self.model = self.task.adapter(
            model, answers, dict_key_y, mask_token_id, adapter, normalised=normalised
        )
        self.blocks = find_blocks(
            model, target_modules, layers_to_transform, weight_names, modules_to_save
        )
        if is_untrained(self.blocks):
            warn("Every lora_B weight is 0: the adapter looks untrained.")
        self.recorder = Recorder(self.model, self.blocks)
        self._fit: Fit | None = None
        # These may have a number for each block, and the host counts whole parameters.
        priors = {name: kwargs.pop(name) for name in _PRIORS if name in kwargs}
        options = {**self.task.backend_defaults, **(backend_kwargs or {})}
        # The host collects the parameters that require grad.
        with self.recorder.prepared():
            super().__init__(
                self.model,
                self.task.name_for_host,
                dict_key_y=dict_key_y,
                backend=None,  # which the structure makes
                backend_kwargs=options,
                **kwargs,
            )
        self.n_layers = len(self.blocks)
        self.n_params = sum(self._sizes)
        for name, value in priors.items():
            setattr(self, name, value)
        self.logit_scale = 1.0
        self.n_contrasts = None
        self.metadata: dict[str, Any] = {}
        self.likelihood = self.task.name  # as the backend and files know it
        # How the curvature of the blocks is summed, decomposed and packed.
        self._structure = self._kind_of_structure(self.recorder, self.task, options)
        self.backend  # noqa: B018 - refuses wrong options now, and not in `fit`

    @property
    def members(self) -> Sequence[LoRALaplace]:
        """List the posteriors that predict: this one alone. A mixture has several."""
        return [self]

    def for_model(self, model: nn.Module) -> LoRALaplace:
        """Make an unfitted posterior of the same options for another model."""
        other = type(self)(
            model,
            self.likelihood,
            dict_key_x=self.dict_key_x,
            dict_key_y=self.dict_key_y,
            backend_kwargs=self._structure.settings,
            class_token_ids=self.model.class_token_ids,
            mask_token_id=self.model.mask_token_id,
            normalised=self.model.normalised,
            weight_names=[block.known_as for block in self.blocks],
        )
        for name in _SAVED:
            setattr(other, name, getattr(self, name))
        other.metadata = deepcopy(self.metadata)
        return other

    def __repr__(self) -> str:
        """Say what it is of, how large, fitted to what, and its prior, in a line."""
        model = type(self.model.transformer or self.model.model).__name__
        fitted = f"fitted to {self.n_data:,} examples" if self.n_data else "not fitted"
        prior = self.prior_precision.log().mean().exp().item()
        scale = "" if self.logit_scale == 1 else f"; logit scale {self.logit_scale:.4g}"
        variance = "" if self.has_variance else "; without variance"
        return (
            f"{type(self).__name__}({self.likelihood} by {model}; {len(self.blocks)} "
            f"weights of {self.n_params:,} parameters; {fitted}; prior precision "
            f"{prior:.4g}{scale}{variance})"
        )

    @property
    def _device(self) -> torch.device:
        return self.model.device

    @property
    def _dtype(self) -> torch.dtype:
        return self.blocks[0].statistics_dtype

    @property
    def prior_precision_diag(self) -> Tensor:
        """Expand the prior precision to each number, `(parameters,)`."""
        prior = self.prior_precision
        if len(prior) == self.n_layers:
            sizes = torch.tensor(self._sizes, device=prior.device)
            prior = prior.repeat_interleave(sizes)
        return prior.expand(self.n_params)

    @property
    def _sizes(self) -> list[int]:
        return [block.n_params for block in self.blocks]

    # --- fitting ----------------------------------------------------------------------

    @property
    def backend(self) -> Any:
        """Return what computes the curvature of the blocks' weights."""
        return self._structure.backend

    @exclusive
    @normal_tensors
    def fit(
        self,
        train_loader: DataLoader | Iterable[Any],
        override: bool = True,
        progress_bar: bool = False,
    ) -> None:
        """Fit the posterior around the model's present weights.

        If an error occurs, the model and the previous fit stay as they were.

        In a `torch.distributed` process group, call this on every rank, each with its
        own shard of the data (a `DistributedSampler`, or a loader that Accelerate
        prepared): all ranks end with the posterior of all data. The same goes for
        whatever reads a data set, such as `optimize_prior_precision`, `amortize`,
        `predict` and `compare`. Of a batch each rank makes its own predictions.

        Parameters
        ----------
        train_loader : DataLoader or iterable
            of mappings with labels, or of pairs `(X, y)`; read once
        override : bool, default=True
            False adds the data to those of the previous fit, which `save_pretrained`
            and `from_pretrained` carry over to another process. A fit in parts is one
            fit of all
        progress_bar : bool, default=False
            whether to show one

        Raises
        ------
        ValueError
            If the loader is empty, labels don't fit, a number is not finite, or two
            processes differ in weights or settings or have the same data. The message
            names the batch and the layer.
        RuntimeError
            If some LoRA layers are never called, merged or disabled, another rank has
            failed or, with `override=False`, the model has changed.
        NotImplementedError
            If a mask does not suit "expand".

        Warns
        -----
        UserWarning
            If the model is no better than guessing on these texts, or the loader gives
            fewer or more than its data set has.
        """
        with together():
            self._move_with_model()
            fitted = fit(
                train_loader,
                self._structure,
                before=None if override else self._fit,
                progress_bar=progress_bar,
            )
        # All that can fail has been done.
        self._fit = fitted
        self._posterior_scale = None  # of the fit before

    @property
    def _fitted(self) -> Fit:
        """Return the present fit; an `AttributeError` before one."""
        super()._check_H_init()
        assert self._fit is not None
        return self._fit

    def check_model(self) -> None:
        """Move the posterior to its model; refuse a model that has changed."""
        fitted = self._fitted
        if fitted.standing is not None and fitted.standing.holds(self.model.tree):
            return
        check_same(self.model, self.blocks, fitted.model, fitted.mean)
        self._move_with_model()
        standing = standing_of(self.model, self.blocks)
        self._fit = replace(self._fitted, standing=standing)

    def _check_H_init(self) -> None:  # noqa: N802
        super()._check_H_init()
        self._move_with_model()

    @normal_tensors
    def _move_with_model(self) -> None:
        """Move the posterior and its prior to the model's LoRA weights."""
        if self._fit is not None and self._fit.homes == self.recorder.homes:
            return
        for name in ("prior_precision", "prior_mean", "sigma_noise"):
            setattr(self, name, getattr(self, name))  # the host moves what it is given
        if self._fit is not None:
            self._fit = self._fit.to(self._structure)

    # --- prior ------------------------------------------------------------------------

    @normal_tensors
    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; refuse numbers that make no Gaussian."""
        if name in _POSITIVE:
            check_positive(name, value)
            # Who gave it may change it in place; an inference tensor nobody could.
            if isinstance(value, Tensor):
                value = value.clone()
            self._posterior_scale = None  # that is made with the old value
        super().__setattr__(name, float(value) if name in _NUMBERS else value)

    def _once(self, make: Callable[[], Any]) -> Any:
        """Return what is made of a fit and its prior, once for both."""
        # Prior and noise may be changed in place.
        versions = self.prior_precision._version, self.sigma_noise._version
        kept = self._posterior_scale
        if kept is None or kept[0] != versions:
            self._check_H_init()
            kept = self._posterior_scale = versions, make()
        return kept[1]

    @property
    def has_variance(self) -> bool:
        """Tell whether the weights vary: not under a prior precision of 1e12.

        Searches end there where a `logit_scale` alone, a temperature, is best. Of a
        regression the prior precision is taken relative to the noise and to the
        outputs' mean squared slope. Without variance a prediction takes one forward
        pass, and its epistemic uncertainty is 0.
        """
        least = self.prior_precision.min().item()
        if self.task.has_noise and self._fit is not None:
            least /= mean_squared_slope(self) * self._H_factor.item()
        return least < 0.99 * WITHOUT_VARIANCE  # which float32 rounds

    @exclusive
    def log_marginal_likelihood(
        self, prior_precision: Tensor | None = None, sigma_noise: Tensor | None = None
    ) -> Tensor:
        self._check_H_init()
        return super().log_marginal_likelihood(prior_precision, sigma_noise)

    @property
    def log_det_prior_precision(self) -> Tensor:
        """Compute the log-determinant of the prior precision, in float64."""
        log_precision = self.prior_precision.double().log()
        if len(log_precision) == self.n_params:
            return log_precision.sum()
        sizes = torch.tensor(self._sizes, device=self._device)
        return (sizes * log_precision).sum()

    @property
    def scatter(self) -> Tensor:
        """Square the distance from the prior mean under the prior, in float64."""
        squares = (self.mean - self.prior_mean).double().square()
        return (squares * self.prior_precision_diag).sum()

    def optimize_prior_precision(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        pred_type: str = "glm",
        method: str | TuningMethod = "marglik",
        *,
        verbose: bool = False,
        **options: Any,
    ) -> TuningHistory:
        """Choose the prior precision.

        All hyperparameters are set in the end: `logit_scale` is 1 unless the method
        chooses it, and `sigma_noise` stays as it is where no noise is chosen. If
        anything goes wrong, they stay as they were.

        Parameters
        ----------
        pred_type : {"glm"}
            the host's word for predictions of the linearised model, the only ones that
            searches score
        method : str or TuningMethod
            "gridsearch" and "val_gd" need texts that the model hasn't seen, and
            "second_training" needs time to train again. "marglik" needs no data, and
            "agreement" the training texts: both may be far off. Each name stands for an
            object of `laplace_lora_ext.tuning`, which explains the method and its
            options; you can also pass such an object
        verbose : bool, default=False
            print the result
        **options
            options of the method, such as `train_loader`, `val_loader`,
            `prior_structure` and `progress_bar`: the fields of its object

        Returns
        -------
        TuningHistory
            the evidence or loss along the way

        Raises
        ------
        ValueError
            If data are missing or don't suit the method, or the objective is not a
            number.
        TypeError
            If the method lacks an option, or doesn't know one.
        NotImplementedError
            For "agreement" and "val_gd" of numbers, or with another structure than
            "lowrank_kron".
        """
        check_name("pred_type", pred_type, ["glm"])
        history = build(method, options, self.task)(self)
        if verbose:
            print(f"Optimized prior precision is {self.prior_precision}.")
        return history

    # --- predictions ------------------------------------------------------------------

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
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Predict a batch as the host does; `generator` seeds all draws.

        Parameters
        ----------
        x : Mapping, torch.Tensor or Moments
            inputs of B examples, or with "glm" their `Moments`. Labels in a mapping are
            ignored
        pred_type : {"glm", "nn", "amortized"}
            the host's, and "amortized": as "glm", with the variances that `amortize`
            has learnt
        joint : bool, default=False
            for regression and rewards: one mean `(B C,)` and one covariance `(B C,
            B C)` of all outputs of all examples together
        link_approx : {"probit", "mc", "mean_field", "bridge", "bridge_norm"}
            the host's, and "mean_field" (Lu, Ie & Sha, 2020): it takes the covariance
            between logits into account, as "mc" does, but draws no samples
        n_samples : int, default=100
            draws of the logits, for "mc", or of the weights, for "nn"
        diagonal_output : bool, default=False
            for "mc": draw each logit by itself, without the covariance between them
        generator : torch.Generator, optional
            for whatever is drawn; where weights are, on the model's device
        fitting : bool, default=False
            predict what the training's loss reads: of reward models probabilities of
            preferences instead of rewards, of several labels probabilities `(B, K, 2)`
            of both classes, and of labels of tokens `(N, C)` of the labelled ones

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            probabilities `(B, C)`, of K labels one each, `(B, K)`, or of labels of
            tokens `(B, T, C)`, nan at padding; for regression and rewards mean `(B, C)`
            and covariance `(B, C, C)` of the model's outputs (by "nn", or with
            `diagonal_output`, variances `(B, C)`), in which the noise of targets is
            not: add `sigma_noise**2`, or use `predict`

        Notes
        -----
        Under a broad posterior over many classes, the mean probability ("mc", and
        sometimes "probit") can be largest for another class than the model's own, which
        costs accuracy. "mean_field" keeps to the model's class more often, and a larger
        prior precision cures it.
        """
        self.task.check_linearised()
        check_name("pred_type", pred_type, ["glm", "nn", "amortized"])
        if not fitting:  # then labels say which tokens the loss reads
            x = self.model.unlabelled(x)
        task = self.task if fitting else self.task.predicted
        has_link = pred_type != "nn" and not task.has_noise
        if has_link:
            bridges = _BRIDGES if self.task.predicted.sees_differences else ()
            check_name("link_approx", link_approx, [*LINKS, *bridges])
        moments_of = learnt_moments if pred_type == "amortized" else moments_for
        by_gradients = has_link and pred_type == "glm" and not isinstance(x, Moments)

        def compute() -> Tensor | tuple[Tensor, Tensor]:
            if pred_type == "nn":
                samples = self._nn_functional_samples(x, n_samples, generator)
                if task.has_noise:
                    return samples.mean(0), samples.var(0)
                return task.class_logits(samples).softmax(-1).mean(0)
            link = link_approx
            if by_gradients and not self.has_variance:
                # Every link is the softmax then; the host's bridges divide 0 by 0.
                link = DEFAULT_LINK
            if has_link and link in LINKS:
                if diagonal_output and link == "mc":
                    # "probit" has the variances of all logits, not of contrasts.
                    f_mu, f_var = moments_of(self, x, "probit")
                    moments = Moments(f_mu, without_covariances(f_var))
                else:
                    moments = moments_of(self, x, link)
                return log_probabilities(moments, link, n_samples, generator).exp()
            of_all: Any = x
            if pred_type == "amortized":  # the host's bridges take square roots
                of_all = amortized_moments(self, x).semidefinite()
            if has_link:
                return self._glm_forward_call(
                    of_all, "classification", link_approx=link_approx
                )
            return self._glm_predictive_distribution(of_all, joint, diagonal_output)

        outputs = self.model.in_turn(compute, may_share=pred_type == "amortized")
        if fitting or isinstance(outputs, tuple):
            return outputs
        return self.model.in_places(task.shown(outputs), x)

    def amortize(
        self,
        loader: DataLoader | Iterable[Any],
        unlabelled: str | DataLoader | Iterable[Any] | None = "swapped",
        progress_bar: bool = False,
        generator: torch.Generator | None = None,
    ) -> LearntVariance:
        """Learn the variances of the logits, so that predictions take one forward pass.

        A ridge regression finds the logarithms of the variances, at the present prior
        precision, in what the output layer reads and in the log-probabilities (outputs,
        where they are numbers). No label goes in. Up to 16 outputs, it learns from
        exact variances, by a backward pass for each; with more, from those of eight
        draws, by 17 forward passes for each text, and averages their noise. With
        `pred_type="amortized"`, `la(batch)`, `la.predict(...)` and
        `la.predict_proba(...)` then use these variances, with every link. They are
        saved with the posterior, and refused when its fit, its prior precision, its
        noise or its temperature changes.

        Parameters
        ----------
        loader : DataLoader or iterable
            training data, with or without labels; read twice
        unlabelled : "swapped", DataLoader, iterable or None, default="swapped"
            more examples, such as predictions will meet. "swapped" adds a copy of each
            text in which 30 % of the tokens are those of other texts; to images and
            sounds it adds nothing
        progress_bar : bool, default=False
            whether to show one
        generator : torch.Generator, optional
            of the CPU, for swapped tokens; its initial seed also decides what weights
            are drawn. By default the same in every call

        Returns
        -------
        LearntVariance
            with `r_squared` and `mean_error`, which say how good it is; also in
            `la.learnt_variance`

        Raises
        ------
        ValueError
            If fewer than three examples have any variance, or the likelihood is
            "reward_modeling" or "language_modeling".
        """
        return amortize(self, loader, unlabelled, progress_bar, generator)

    @exclusive
    def function(self, seed: int, pred_type: str = "glm") -> Callable[[Any], Tensor]:
        """Draw one function from the posterior, the same for all batches.

        Values of different inputs vary together as the posterior says, which a batch's
        moments alone can't tell: what Thompson sampling or a decision over many inputs
        needs.

        Parameters
        ----------
        seed : int
            decides the draw
        pred_type : {"glm", "nn"}
            of the linearised model, by C backward passes a batch, or of the network
            with drawn weights, by one forward pass

        Returns
        -------
        callable
            takes a batch, with or without labels, and returns logits or numbers `(B,
            C)`; of tokens `(B, T, C)`, nan at padding

        Raises
        ------
        ValueError
            For another `pred_type`.
        RuntimeError
            Also in its calls, if the model is not the fitted one any more.
        """
        check_name("pred_type", pred_type, ["glm", "nn"])
        self.check_model()
        generator = torch.Generator(self.model.device).manual_seed(seed)
        weights = self.sample(1, generator)

        def function(batch: Any) -> Tensor:
            inputs = self.model.unlabelled(self.model.inputs(batch))
            logits = drawn_functions(self, weights, pred_type, inputs)
            return self.model.in_places(logits[0], inputs)

        return function

    @exclusive
    def functional_samples(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: Any,
        pred_type: str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        *,
        joint: bool = False,
    ) -> Tensor:
        """Draw logits or numbers `(S, B, C)` of a batch, of tokens `(S, B, T, C)`.

        Parameters
        ----------
        x : Mapping or torch.Tensor
            inputs of B examples; of tokens, padding is nan
        pred_type : {"glm", "nn"}
            of the linearised model, or of the network with drawn weights
        n_samples : int, default=100
            how many draws, S
        diagonal_output : bool, default=False
            draw each output by itself, without the covariance between them; for "glm"
        generator : torch.Generator, optional
            for the draws
        joint : bool, default=False
            examples vary together as the posterior says. By default those of "glm" all
            get the same noise, as the host has it, so that samples of two are as good
            as of one
        """
        x = self.model.unlabelled(x)
        check_name("pred_type", pred_type, ["glm", "nn"])
        if joint and diagonal_output:
            raise ValueError("joint=True draws no output by itself.")
        if joint:
            weights = self.sample(n_samples, generator)
            samples = drawn_functions(self, weights, pred_type, x)
        elif pred_type == "nn":
            samples = self._nn_functional_samples(x, n_samples, generator)
        else:
            f_mu, f_var = self._glm_predictive_distribution(x)
            if diagonal_output:
                f_var = without_covariances(f_var)
            noise = shared_noise(f_mu, n_samples, generator)
            # Unlike the host's Cholesky factor, a symmetric root of a singular
            # covariance exists.
            samples = gaussian_samples(f_mu, f_var, noise)
        return self.model.in_places(samples, x, dim=1)

    def predictive_samples(
        self,
        x: Any,
        pred_type: str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw probabilities or numbers.

        Parameters are as for `functional_samples`, but `joint`.
        """
        samples = self.functional_samples(
            x, pred_type, n_samples, diagonal_output, generator
        )
        task = self.task.predicted
        if task.has_noise:
            return samples
        return task.shown(task.class_logits(samples).softmax(-1))

    @exclusive
    def sample(
        self, n_samples: int = 100, generator: torch.Generator | None = None
    ) -> Tensor:
        with torch.autocast(self._device.type, enabled=False):
            return super().sample(n_samples, generator)

    # What the host's own functions call.

    def _glm_predictive_distribution(
        self, X: Any, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Predict mean and covariance, or variances, of scaled logits."""
        moments = self._moments(X, joint)
        f_mu, f_var = moments.scaled(self.logit_scale)
        if joint:
            return f_mu.flatten(), f_var
        if diagonal_output:
            f_var = f_var.diagonal(dim1=-2, dim2=-1)
        return f_mu, f_var

    def _nn_functional_samples(
        self, X: Any, n_samples: int = 100, generator: torch.Generator | None = None
    ) -> Tensor:
        """Compute scaled logits `(S, B, C)` under draws of the weights."""
        check_count("n_samples", n_samples)
        with self.model.forward_passes():
            self.check_model()
            draws = drawn_weights(self, n_samples, generator)
            logits = [logits_with(self, values, X) for values in draws]
        return self.logit_scale * torch.stack(logits)

    # --- adapters and files -----------------------------------------------------------

    @exclusive
    def save_pretrained(self, folder: str | Path) -> None:
        """Write the posterior into a folder, such as that of the adapter.

        `laplace_lora_ext.from_pretrained(model, folder)` reads it. It is one file,
        "laplace_posterior.safetensors", whose metadata hold all that is no tensor.

        Parameters
        ----------
        folder : str or Path
            made if it does not exist

        Raises
        ------
        TypeError
            If `metadata` or `backend_kwargs` hold what is no tensor, number or text.
        """
        write_state(self.state_dict(), folder)

    @exclusive
    def state_dict(self) -> dict[str, Any]:
        """Return the host's state, with settings and a description of the model.

        It holds tensors, numbers and text alone, in dictionaries and lists.
        """
        self._check_H_init()
        of_fit = self._fitted.state_dict(self._structure)
        saved = {name: getattr(self, name) for name in _SAVED}
        return of_fit | saved | self._identity

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
            If its class, likelihood, model or settings are not these. The message names
            what differs, and nothing changes.
        """
        identity = self._identity
        own = {**identity, **identity["settings"]}
        saved = {**state_dict, **state_dict["settings"]}
        for name in ("cls_name", "likelihood", *identity["settings"]):
            if saved.get(name) != own[name]:
                raise ValueError(
                    f"The posterior was fitted with {name}={saved.get(name)!r}, not "
                    f"{own[name]!r}: pass the same setting."
                )
        # As it is now, and not as saved: it may have been cast.
        now = ModelState.of(self.model, self.blocks)
        difference = ModelState.from_state_dict(state_dict["model"]).difference(now)
        if difference is not None:
            raise ValueError(
                f"The posterior was fitted to another model. {difference}."
            )
        if first_changed(self.blocks, state_dict["mean"]) is not None:
            raise ValueError(
                "The posterior was fitted around other LoRA weights than the model has "
                "now: load the adapter of the fit."
            )
        self._fit = Fit.from_state_dict(state_dict, self._structure, now)
        # A prior that is set lets go of what was made with the one before.
        for name in _SAVED:
            setattr(self, name, state_dict[name])

    @property
    def _identity(self) -> dict[str, Any]:
        """Collect what a state must be of to be loaded, beside model and data."""
        return {
            "cls_name": type(self).__name__,
            "likelihood": self.likelihood,
            "settings": self._structure.settings,
        }

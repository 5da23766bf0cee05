"""The Gaussian over LoRA weights: its prior, its evidence, and what it predicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from laplace.baselaplace import ParametricLaplace

from laplace_lora_ext.likelihoods import Likelihood
from laplace_lora_ext.messages import check_positive, check_single
from laplace_lora_ext.models.locks import exclusive, kept, without_autocast
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.posterior import Hyperparameters
from laplace_lora_ext.models.weights import Block
from laplace_lora_ext.passes.recorder import Directions, Recorder, every_output
from laplace_lora_ext.predictive import amortized, decisions, distributions
from laplace_lora_ext.predictive.links import own_links
from laplace_lora_ext.predictive.moments import semidefinite, uncorrelated
from laplace_lora_ext.predictive.statistics import PredictiveStatistics
from laplace_lora_ext.tuning import METHODS, build
from laplace_lora_ext.tuning.method import TuningHistory, TuningMethod


def check_noise(value: float | torch.Tensor) -> None:
    """Refuse a regression's noise that is not one positive number for all outputs."""
    instead = "divide the targets of each output by its own noise, and train on these"
    check_single("sigma_noise", value, instead)
    check_positive("sigma_noise", value)


class LoRAGaussian(ParametricLaplace):
    """The host's Gaussian, over LoRA weights: `LoRALaplace` fits it, saves it and moves it.

    Attributes
    ----------
    model : LogitsModel
    blocks : list of Block
        the LoRA weights that the posterior is over
    trained_likelihood, predicted_likelihood : Likelihood
        of the training data and of predictions: a reward model learns from preferences, which are
        two classes, and predicts numbers
    """

    _methods: ClassVar[Mapping[str, type[TuningMethod]]] = METHODS  # to choose the prior precision
    model: LogitsModel
    blocks: list[Block]
    recorder: Recorder
    mean: torch.Tensor
    trained_likelihood: Likelihood
    predicted_likelihood: Likelihood

    @property
    def _device(self) -> torch.device:
        return self.model.device

    @property
    def _dtype(self) -> torch.dtype:
        return self.blocks[0].statistics_dtype

    @property
    def _sizes(self) -> list[int]:
        return [block.weight.numel() for block in self.blocks]

    @property
    def prior_precision(self) -> torch.Tensor:
        """`(1,)`, `(blocks,)` or, with "diag", `(parameters,)`; positive and finite."""
        return self._prior_precision

    @prior_precision.setter
    @torch.inference_mode(False)
    def prior_precision(self, value: float | torch.Tensor) -> None:
        check_positive("prior_precision", value)
        host: Any = super(LoRAGaussian, type(self))
        host.prior_precision.fset(self, kept(value))

    @property
    def temperature(self) -> float | torch.Tensor:
        """What the curvature is divided by; positive and finite."""
        return self._temperature

    @temperature.setter
    @torch.inference_mode(False)
    def temperature(self, value: float | torch.Tensor) -> None:
        check_single("temperature", value, "it divides the curvature of all outputs alike")
        check_positive("temperature", value)
        # A tensor may have a graph.
        is_tensor = isinstance(value, torch.Tensor)
        self._temperature = kept(value).reshape(()) if is_tensor else float(value)
        self._posterior_scale = None  # that the host has made with the old value

    @property
    def sigma_noise(self) -> torch.Tensor:
        """Standard deviation of a regression's noise, `()`; positive and finite."""
        return self._sigma_noise

    @sigma_noise.setter
    @torch.inference_mode(False)
    def sigma_noise(self, value: float | torch.Tensor) -> None:
        check_noise(value)
        host: Any = super(LoRAGaussian, type(self))
        host.sigma_noise.fset(self, kept(value))

    @property
    def hyperparameters(self) -> Hyperparameters:
        """What a search may change, to be set again if it fails."""
        return Hyperparameters(self.prior_precision, self.sigma_noise, self.temperature)

    @hyperparameters.setter
    def hyperparameters(self, values: Hyperparameters) -> None:
        for name, value in vars(values).items():
            setattr(self, name, value)

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

    def optimize_prior_precision(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        pred_type: str = "glm",
        method: str | TuningMethod = "marglik",
        *,
        verbose: bool = False,
        **options: Any,
    ) -> TuningHistory:
        """Choose the prior precision; if anything goes wrong, it and the noise stay as they were.

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
        """
        if pred_type != "glm":
            options["pred_type"] = pred_type
        posterior: Any = self  # with what `LoRALaplace` adds
        history = build(method, options, self._methods)(posterior)
        if verbose:
            print(f"Optimized prior precision is {self.prior_precision}.")
        return history

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
        la: Any = self  # with what `LoRALaplace` adds
        likelihood = self.trained_likelihood if fitting else self.predicted_likelihood
        if likelihood.is_gaussian and link_approx == "mean_field":
            link_approx = "probit"  # numbers need no link, and the host must know its name
        if pred_type == "nn" and generator is not None:
            if not likelihood.is_gaussian:
                return distributions.mean_probabilities(la, x, n_samples, generator, **model_kwargs)
            samples = distributions.network_samples(la, x, n_samples, generator, **model_kwargs)
            return samples.mean(0), samples.var(0)
        links = own_links(n_samples, generator)
        if pred_type == "amortized":
            x, pred_type = amortized.amortized_moments(la, x), "glm"
            if likelihood.is_gaussian or link_approx not in links:
                x = x._replace(f_var=semidefinite(x.f_var))
        if pred_type == "glm" and not likelihood.is_gaussian and link_approx in links:
            alone = diagonal_output and link_approx == "mc"
            f_mu, f_var = distributions.moments_for(la, x, "probit" if alone else link_approx)
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
    predictive_moments = distributions.predictive_moments
    _glm_predictive_distribution: Any = distributions.predictive_distribution
    _glm_functional_samples: Any = distributions.functional_samples

    def moments(
        self, X: Any, joint: bool, directions: Directions = every_output
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean `(B, C)`, and covariance `(B, C, C)` or, joint, `(B * C, B * C)`.

        With other `directions`, the covariance is that of S combinations of the outputs.
        """
        Js, f_mu = self.recorder.jacobians(X, directions, self.enable_backprop)
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

    _nn_functional_samples: Any = distributions.network_samples
    _nn_predictive_classification: Any = distributions.mean_probabilities

"""Predictions of a Laplace approximation over LoRA weights, linearised or sampled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from laplace.baselaplace import ParametricLaplace

from laplace_lora_ext.adapters import find_peft_model, write_adapter
from laplace_lora_ext.curvature.passes import jacobians
from laplace_lora_ext.logits_model import LogitsModel
from laplace_lora_ext.lora_layers import Block
from laplace_lora_ext.map_agreement import MapAgreement
from laplace_lora_ext.mean_field import mean_field_log_softmax
from laplace_lora_ext.precision import without_autocast
from laplace_lora_ext.predictive_statistics import Moments
from laplace_lora_ext.square_root import square_root


class LoRAPredictive(ParametricLaplace):
    """The host's predictions, through a model adapter that leaves the model as it was.

    Attributes
    ----------
    model : LogitsModel
    blocks : list of Block
        the LoRA weights that the posterior is over
    """

    model: LogitsModel
    blocks: list[Block]
    _agreement: MapAgreement

    @property
    def _device(self) -> torch.device:
        return self.blocks[0].weight.device

    @property
    def _dtype(self) -> torch.dtype:
        return self.blocks[0].statistics_dtype

    @property
    def _training_likelihood(self) -> str:
        """Preferences are two classes while they are learnt, and rewards afterwards."""
        return "classification" if self.likelihood == "reward_modeling" else self.likelihood

    @property
    def _sizes(self) -> list[int]:
        return [block.weight.numel() for block in self.blocks]

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        with self.model.prepared([block.weight for block in self.blocks]):
            yield

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

        The host's links are joined by "mean_field" (Lu, Ie & Sha, 2020), which like "mc" depends on
        the covariance of the logits' differences, and unlike it draws no samples.

        Parameters
        ----------
        x : Mapping, torch.Tensor or Moments
            inputs of B examples; labels in a mapping are ignored. With "glm" their `Moments` will
            do, which have a prior precision of their own
        pred_type : {"glm", "nn"}
        joint : bool, default=False
            regression only: covariance between all examples
        link_approx : {"probit", "mc", "mean_field", "bridge", "bridge_norm"}
        n_samples : int, default=100
        diagonal_output : bool, default=False
        generator : torch.Generator, optional
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
        regression = self.likelihood == "regression" or (
            self.likelihood == "reward_modeling" and not fitting
        )
        mean_field = pred_type == "glm" and link_approx == "mean_field"
        if mean_field and regression:
            link_approx, mean_field = "probit", False  # plays no part, and the host knows it
        sampled = pred_type == "nn" or (link_approx == "mc" and not regression)
        if mean_field:
            output = mean_field_log_softmax(*self._glm_predictive_distribution(x)).exp()
        elif generator is None or not sampled:
            output = super().__call__(
                x,
                pred_type,
                joint,
                link_approx,
                n_samples,
                diagonal_output,
                generator,
                fitting,
                **model_kwargs,
            )
        elif regression:
            samples = self.functional_samples(x, pred_type, n_samples, generator=generator)
            output = samples.mean(0), samples.var(0)
        else:
            samples = self.predictive_samples(x, pred_type, n_samples, diagonal_output, generator)
            output = samples.mean(0)
        if pred_type == "glm" and isinstance(output, torch.Tensor):
            self._agreement.add(output, link_approx)
        return output

    def _glm_predictive_distribution(
        self, X: Any, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(X, Moments):
            if joint:
                raise ValueError("Moments hold no covariance between examples: pass the inputs.")
            # Some links change them in place.
            f_mu, f_var = X.to(self._device, self._dtype, copy=True)
        else:
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
        noise = torch.randn(
            f_mu.shape[1], n_samples, device=f_mu.device, dtype=f_mu.dtype, generator=generator
        )
        # A symmetric root exists where the covariance is singular and Cholesky fails.
        return f_mu + torch.einsum("bck,ks->sbc", square_root(f_var), noise)

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
        drawn = self._sampled_weights(generator)
        weights = {
            name: drawn[id(p)] for name, p in self.model.named_parameters() if id(p) in drawn
        }
        with self.model.prepared(), torch.set_grad_enabled(self.enable_backprop):
            return torch.func.functional_call(self.model, weights, (X,), model_kwargs)

    def _sampled_weights(self, generator: torch.Generator | None) -> dict[int, torch.Tensor]:
        """One draw of the LoRA weights, by the `id` of the parameters that they stand for."""
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
        model = find_peft_model(self.model)
        digits = len(str(n_samples - 1))
        folders = [Path(directory) / f"sample_{index:0{digits}}" for index in range(n_samples)]
        for folder in folders:
            if folder.exists():
                raise FileExistsError(f"{folder} exists: remove it or name another directory.")
        adapter = self.blocks[0].adapter
        return [
            write_adapter(model, adapter, self._sampled_weights(generator), folder, **kwargs)
            for folder in folders
        ]

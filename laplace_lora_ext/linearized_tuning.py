"""Choice of the prior precision on the training data, in the linearised model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from laplace_lora_ext.evidence_search import maximize_linearized_evidence
from laplace_lora_ext.linearization import LoRALinearization
from laplace_lora_ext.linearized_model import LinearizedModel
from laplace_lora_ext.loss_search import draw_seed, search_line
from laplace_lora_ext.tuning_history import TuningHistory
from laplace_lora_ext.validation_losses import (
    NegativeLogLikelihood,
    gaussian_loss,
    mean_field_categorical_loss,
    probit_categorical_loss,
    sampled_categorical_loss,
)


class LoRALinearizedTuning(LoRALinearization):
    """The searches that `optimize_prior_precision` makes in a linearised model."""

    def _linearized(
        self,
        train_loader: Any,
        method: str,
        generator: torch.Generator | None,
        progress_bar: bool,
    ) -> LinearizedModel:
        if len(torch.as_tensor(self.prior_precision)) == self.n_params:
            raise ValueError(f'method="{method}" knows the structures "scalar" and "layerwise".')
        if isinstance(train_loader, LinearizedModel):
            self._check_same_data(train_loader)
            return train_loader
        return self.linearize(train_loader, generator=generator, progress_bar=progress_bar)

    def _maximize_linearized_evidence(
        self, model: LinearizedModel, start: torch.Tensor, *search: Any
    ) -> TuningHistory:
        scale = float(self._H_factor)
        constant = float(self.log_likelihood + scale * self.loss)
        evidence = partial(model.evidence, scale=scale, constant=constant)
        history = maximize_linearized_evidence(evidence, start, *search)
        self.prior_precision = history.prior_precision[-1]
        return history

    def _minimize_leave_one_out(
        self,
        model: LinearizedModel,
        start: torch.Tensor,
        link_approx: str,
        n_samples: int,
        n_steps: int,
        generator: torch.Generator | None,
        progress_bar: bool,
    ) -> TuningHistory:
        scale = float(self._H_factor)
        negative_log_likelihood = self._negative_log_likelihood(link_approx, n_samples)
        seed = draw_seed(generator) if link_approx == "mc" else 0

        def loss(prior_precision: torch.Tensor) -> float:
            moments = model.leave_one_out(prior_precision, scale)
            draws = torch.Generator().manual_seed(seed)  # the same for every prior precision
            return negative_log_likelihood(moments, model.targets, draws).mean().item()

        history = search_line(loss, start, n_steps, progress_bar)
        self.prior_precision = history.prior_precision[history.objective.argmin()]
        return history

    def _negative_log_likelihood(self, link_approx: str, n_samples: int) -> NegativeLogLikelihood:
        if self.likelihood == "regression":
            return gaussian_loss(torch.as_tensor(self.sigma_noise))
        if link_approx == "mc":
            return sampled_categorical_loss(n_samples)
        if link_approx == "probit":
            return probit_categorical_loss
        if link_approx == "mean_field":
            return mean_field_categorical_loss
        raise ValueError(
            'method="val_gd" and "linearized_loo" know the links "mc", "probit" and "mean_field", '
            f"not {link_approx!r}."
        )

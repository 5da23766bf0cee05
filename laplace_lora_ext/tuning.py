"""`optimize_prior_precision`: by training data alone, or by the loss of validation data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torchmetrics
from laplace.utils import RunningNLLMetric, fix_prior_prec_structure, validate
from torch.utils.data import DataLoader

from laplace_lora_ext.evidence_search import maximize_evidence
from laplace_lora_ext.linearized_model import LinearizedModel
from laplace_lora_ext.linearized_tuning import LoRALinearizedTuning
from laplace_lora_ext.loss_search import minimize_validation_loss, search_grid
from laplace_lora_ext.map_agreement import MapAgreement
from laplace_lora_ext.predictive_statistics import PredictiveStatistics
from laplace_lora_ext.tuning_arguments import LINEARIZED, check_arguments
from laplace_lora_ext.tuning_history import TuningHistory


class LoRATuning(LoRALinearizedTuning):
    """Choice of the prior precision for a Laplace approximation over LoRA weights."""

    def optimize_prior_precision(
        self,
        pred_type: str = "glm",
        method: str = "marglik",
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
        train_loader: DataLoader | Iterable[Any] | LinearizedModel | None = None,
        pooling: float = 3.0,
    ) -> TuningHistory:
        """Choose the prior precision; if anything goes wrong, it stays as it was.

        Parameters
        ----------
        pred_type : {"glm", "nn"}
            the predictions that a grid search scores
        method : {"marglik", "linearized_marglik", "linearized_loo", "gridsearch", "val_gd"}
            "marglik" maximises the evidence of the training data (the paper's algorithm 2).
            "linearized_marglik" maximises that of the linearised model at its own mode, which is
            found anew for each prior precision (Antorán et al., ICML 2022): better where
            training has not ended in a mode of the posterior, such as all training without
            weight decay. It needs the training data once more.
            "linearized_loo" minimises the negative log-likelihood of each training example under
            the linearised model's posterior of all the others (Laplace-LOO; Vehtari et al., JMLR
            2016). Of a layerwise prior it chooses a common factor, and "linearized_marglik" the
            rest. It needs the training data once more.
            "gridsearch" takes the best of a grid of scalars on validation data, or of factors of
            `init_prior_prec`.
            "val_gd" follows the gradient of the validation loss (the paper's algorithm 3), for
            "lowrank_kron" only
        n_steps : int, default=1000
            steps of "val_gd", and the most that a search on training data takes
        lr : float, default=0.1
            first step in the logarithm of the prior precision, for "marglik" and "val_gd"
        init_prior_prec : float or torch.Tensor
            where all but "gridsearch" start. A tensor of more than one number also says the
            structure; "gridsearch" and "linearized_loo" choose a factor of it
        prior_structure : {"scalar", "layerwise", "diag"}
            one prior precision, one for each block, or, with "diag" curvature, for each weight
        val_loader : DataLoader, iterable or PredictiveStatistics
            validation data with labels. With "lowrank_kron" and "glm" they pass through the
            model once, or not at all where their statistics are given
        loss : torchmetrics.Metric or callable, optional
            of "gridsearch": of outputs and targets, as the host's
        log_prior_prec_min, log_prior_prec_max, grid_size, log_prior_prec_base
            the grid
        link_approx : {"probit", "mc", "mean_field", "bridge", "bridge_norm"}, optional
            of the predictions that are scored: choose that of your predictions. If omitted
            "probit" for "gridsearch", "mc" for "val_gd" and "mean_field" for "linearized_loo"; the
            latter two know these three
        n_samples : int, default=100
            of the logits, with "mc"
        verbose, progress_bar : bool, default=False
        tolerance : float, default=1e-3
            "marglik" stops when the evidence has varied by less than so many nats over ten
            steps, "linearized_marglik" over one; 0 takes all steps
        optimize_sigma_noise : bool, default=False
            with "marglik", for regression: choose `sigma_noise` by the evidence as well
        batch_size : int, default=4
            examples in a minibatch of "val_gd"
        generator : torch.Generator, optional
            of what "val_gd", "linearized_marglik" and "linearized_loo" draw
        train_loader : DataLoader, iterable or LinearizedModel
            of "linearized_marglik" and "linearized_loo": the data of the fit. They pass through
            the model once, or not at all where `linearize` has returned them
        pooling : float, default=3.0
            of the linearised methods with a layerwise prior: strength of a hyperprior that draws
            each block's prior precision to the scalar that the evidence prefers, as if so many
            more directions of the block had been determined. With 0 each block has its own
            evidence alone, which often raises its prior precision without bound

        Returns
        -------
        TuningHistory
            evidence or loss along the way

        Raises
        ------
        ValueError
            If the data that a method needs are missing, empty, without labels or of another fit,
            if an argument does not suit the method, or if the objective is not a number.
        NotImplementedError
            For "val_gd" with another structure than "lowrank_kron".

        Warns
        -----
        UserWarning
            If the evidence has not converged, has no maximum in some prior precision, or a loss
            has no minimum in it.

        Notes
        -----
        "marglik" tends to choose a smaller prior precision than validation data would, that is, a
        broader posterior; "linearized_marglik" comes closer, and "linearized_loo" closest. Measured
        by `python -m benchmarks calibration --methods lowrank_kron` (300 training texts, five
        classes, a scalar): 2.1, 9.2 and 22 on seed 0, and negative log-likelihoods of test texts of
        1.131, 0.976 and 0.923 with mean-field links on five seeds.

        In a layerwise prior "marglik", or "linearized_marglik" without pooling, may raise the prior
        precision of a block without bound: such a block is held at its MAP value, as if it took no
        part.
        """
        check_arguments(
            self.likelihood, pred_type, method, val_loader, train_loader, loss, optimize_sigma_noise
        )
        if not 0 <= pooling < math.inf:
            raise ValueError(f"pooling must be a number not below 0, not {pooling}.")
        before = self._prior_precision, self._sigma_noise
        is_scaled = torch.as_tensor(init_prior_prec).numel() > 1
        try:
            if method == "gridsearch":
                grid = torch.logspace(
                    log_prior_prec_min, log_prior_prec_max, grid_size, base=log_prior_prec_base
                )
                link_approx = link_approx or ("mc" if pred_type == "nn" else "probit")
                predictions = {
                    "pred_type": pred_type,
                    "link_approx": link_approx,
                    "n_samples": n_samples,
                }
                if is_scaled:
                    base = self._initial_logarithm(init_prior_prec, prior_structure).detach().exp()
                    grid = grid[:, None].to(base) * base
                history = self._search_grid(grid, val_loader, loss, predictions, progress_bar)
            else:
                start = self._initial_logarithm(init_prior_prec, prior_structure)
                if method == "val_gd":
                    statistics = self._validation_statistics(val_loader, progress_bar)
                    nll = self._negative_log_likelihood(link_approx or "mc", n_samples)
                    history = minimize_validation_loss(
                        statistics, start, nll, n_steps, lr, batch_size, generator, progress_bar
                    )
                    self.prior_precision = start.detach().exp()
                elif method in LINEARIZED:
                    model = self._linearized(train_loader, method, generator, progress_bar)
                    start = start.detach().exp().cpu()
                    if method == "linearized_marglik" or (len(start) > 1 and not is_scaled):
                        search = n_steps, tolerance, pooling, progress_bar
                        history = self._maximize_linearized_evidence(model, start, *search)
                        start = history.prior_precision[-1]
                    if method == "linearized_loo":
                        predictions = link_approx or "mean_field", n_samples
                        search = n_steps, generator, progress_bar
                        history = self._minimize_leave_one_out(model, start, *predictions, *search)
                else:
                    search = n_steps, lr, tolerance, progress_bar
                    history = self._maximize_evidence(start, optimize_sigma_noise, *search)
        except BaseException:
            self._prior_precision, self._sigma_noise = before
            self._posterior_scale = None
            raise
        self._agreement = MapAgreement()
        if verbose:
            print(f"Optimized prior precision is {self.prior_precision}.")
        return history

    def _validation_statistics(self, val_loader: Any, progress_bar: bool) -> PredictiveStatistics:
        """Statistics of validation data, with targets."""
        raise NotImplementedError(
            'method="val_gd" needs hessian_structure="lowrank_kron": use "gridsearch" instead.'
        )

    def _scored_batches(
        self, val_loader: Any, pred_type: str, progress_bar: bool
    ) -> Callable[[], Iterable[Any]]:
        """Validation batches as pairs or mappings, anew at each prior precision of a grid."""

        def batches() -> Iterable[Any]:
            empty = True
            for batch in val_loader:
                self.model.split(batch)  # refuses what has no labels
                empty = False
                yield batch
            if empty:
                raise ValueError("The loader has no data.")

        return batches

    def _maximize_evidence(
        self, logarithm: torch.Tensor, optimize_sigma_noise: bool, *search: Any
    ) -> TuningHistory:
        logarithms = [logarithm]
        if optimize_sigma_noise:
            logarithms.append(torch.as_tensor(self.sigma_noise).detach().log().requires_grad_())
        history = maximize_evidence(self.log_marginal_likelihood, logarithms, *search)
        self._warn_of_unbounded(logarithm)
        self.prior_precision = logarithm.detach().exp()
        if optimize_sigma_noise:
            self.sigma_noise = logarithms[1].detach().exp()
        return history

    def _search_grid(
        self,
        grid: torch.Tensor,
        val_loader: Any,
        loss: torchmetrics.Metric | Callable[..., torch.Tensor] | None,
        predictions: dict[str, Any],
        progress_bar: bool,
    ) -> TuningHistory:
        batches = self._scored_batches(val_loader, predictions["pred_type"], progress_bar)
        if loss is None and self.likelihood == "regression":
            loss = torchmetrics.MeanSquaredError(num_outputs=self.n_outputs).to(self._device)
        elif loss is None:
            loss = RunningNLLMetric().to(self._device)

        def score(prior_precision: torch.Tensor) -> float:
            self.prior_precision = prior_precision
            if isinstance(loss, torchmetrics.Metric):
                loss.reset()
            try:
                loader: Any = batches()
                return validate(self, loader, loss, dict_key_y=self.dict_key_y, **predictions)
            except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
                return math.inf  # as the host does: a covariance that is no covariance

        with self._prepared(), self._agreement.paused():
            history = search_grid(score, grid, progress_bar)
        self.prior_precision = history.prior_precision[history.objective.argmin()]
        return history

    def _initial_logarithm(
        self, init_prior_prec: float | torch.Tensor, prior_structure: str
    ) -> torch.Tensor:
        """Where a descent starts: a leaf `(1,)`, `(blocks,)` or `(parameters,)`, in float64."""
        start = torch.as_tensor(init_prior_prec).detach()
        if start.numel() == 1 and prior_structure != "scalar":
            sizes = self.n_layers, self.n_params
            start = fix_prior_prec_structure(
                start, prior_structure, *sizes, self._device, self._dtype
            )
        self.prior_precision = start  # refuses a structure that the curvature does not have
        if not (self.prior_precision > 0).all():
            raise ValueError("init_prior_prec must be above 0.")
        return self.prior_precision.double().log().requires_grad_()

    def _warn_of_unbounded(self, logarithm: torch.Tensor) -> None:
        """Warn where the evidence has no maximum in reach: the prior precision has run away."""
        logarithm = logarithm.detach().requires_grad_()
        evidence = self.log_marginal_likelihood(logarithm.exp())
        (slope,) = torch.autograd.grad(evidence, logarithm, retain_graph=True)
        (scatter,) = torch.autograd.grad(self.scatter, logarithm)
        # In a maximum the weights' distance from the prior mean pulls down as much as the number
        # of parameters that the data determine pushes up.
        pull = scatter / 2
        push = slope + pull
        balance = 0.01 * torch.maximum(push, pull)
        runaway = torch.minimum(push, pull) < balance.clamp_min(1e-6)
        if not runaway.any():
            return
        first = int(runaway.int().argmax())
        where = "" if len(runaway) == 1 else f" for {int(runaway.sum())} of {len(runaway)}"
        if len(runaway) == len(self.blocks):
            where += f", such as that of {self.blocks[first].name}"
        warnings.warn(
            f"The evidence has no maximum in reach in the prior precision{where}, which ended at "
            f"{logarithm[first].exp().item():.3g}. Is the adapter untrained, or the prior mean at "
            "its weights? Fewer prior precisions, such as a scalar, are safer.",
            stacklevel=4,
        )

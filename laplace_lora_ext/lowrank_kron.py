"""Laplace-LoRA: Kronecker-factored curvature whose large factors are kept low-rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import tqdm
from laplace.baselaplace import KronLaplace, ParametricLaplace
from laplace.curvature import CurvatureInterface
from torch.utils.data import DataLoader

from laplace_lora_ext.curvature.backend import (
    LowRankKronGGN,
    LowRankKronInterface,
    check_targets,
)
from laplace_lora_ext.curvature.passes import visit_jacobians
from laplace_lora_ext.errors import naming
from laplace_lora_ext.kronecker_block import DecomposedBlock
from laplace_lora_ext.lora_laplace import LoRALaplace
from laplace_lora_ext.matrix import LowRankKron
from laplace_lora_ext.precision import without_autocast
from laplace_lora_ext.predictive_statistics import PredictiveStatistics, upper_triangle
from laplace_lora_ext.variance_shares import VarianceShares


class LowRankKronLoRALaplace(LoRALaplace, KronLaplace):
    """Laplace-LoRA: Kronecker-factored curvature whose large factors are kept low-rank.

    Parameters
    ----------
    model, likelihood, **kwargs
        see `LoRALaplace`
    backend : type of LowRankKronInterface, default=LowRankKronGGN
    backend_kwargs : dict, optional
        `rank` (10), `kfac_approx` ("gradient"), `tail` (True), `stochastic` (False); the paper's
        choice is `laplace_lora_ext.PAPER_SETTINGS`

    References
    ----------
    Yang et al., "Bayesian low-rank adaptation for large language models", ICLR 2024.
    """

    _key = ("lora", "lowrank_kron")
    _default_backend = LowRankKronGGN
    H: Any  # LowRankKron while data are summed, LowRankKronDecomposed afterwards
    H_facs: Any  # LowRankKron, to which the data of another run can be added

    def _check_backend(self, backend: type[CurvatureInterface]) -> None:
        if not issubclass(backend, LowRankKronInterface):
            raise ValueError(
                f"{backend.__name__} has no low-rank factors: use LowRankKronGGN or "
                'LowRankKronEF, or hessian_structure="kron".'
            )

    @property
    def backend(self) -> LowRankKronInterface:
        backend = super().backend
        assert isinstance(backend, LowRankKronInterface)
        return backend

    def _init_H(self) -> None:  # noqa: N802
        self.H = self.backend.zeros()

    def _add_batch(self, X: Any, y: torch.Tensor) -> torch.Tensor:
        return self.backend.accumulate(self.H, X, y)

    def _summed_curvature(self) -> LowRankKron:
        return self.H_facs

    @without_autocast
    def _adopt_curvature(self, n_data: int) -> None:
        self.H_facs = self.H.cut()
        self.H = self.H_facs.decompose()

    def _moments(self, X: Any, joint: bool) -> tuple[torch.Tensor, torch.Tensor]:
        precision: Any = self.posterior_precision
        covariances = []

        def add(index: int, jacobian: torch.Tensor) -> None:
            if joint:
                jacobian = jacobian.flatten(0, 1)
            covariance = precision.blocks[index].inv_square_form(jacobian, precision.deltas[index])
            covariances.append(covariance)

        f_mu = visit_jacobians(self.model, self.blocks, X, add, self.enable_backprop)
        return f_mu, torch.stack(covariances).sum(0)

    @property
    def log_det_posterior_precision(self) -> torch.Tensor:
        """Log-determinant of the posterior precision, in float64."""
        self._check_H_init()
        return self.H.spectrum.logdet(self._H_factor, self.prior_precision)

    def predictive_statistics(
        self,
        loader: DataLoader | Iterable[Any],
        progress_bar: bool = False,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> PredictiveStatistics:
        """One pass over a data set, for predictions under every prior precision.

        Parameters
        ----------
        loader : DataLoader or iterable
            of mappings or pairs `(X, y)`; labels, where there are any, become `targets`
        progress_bar : bool, default=False
        device, dtype
            where and in which precision the statistics are kept; see `PredictiveStatistics` for
            their size

        Returns
        -------
        PredictiveStatistics

        Raises
        ------
        ValueError
            If the loader is empty, labels don't fit, some batches have labels and others none,
            or a number is not finite; the message names the batch.
        """
        self._check_H_init()
        batches = tqdm.tqdm(loader, desc="[Predictive statistics]", disable=not progress_bar)
        parts = []
        for index, batch in enumerate(batches):
            with naming(f"batch {index}"):
                X, y = self.model.split_if_labelled(batch)
                parts.append(self._statistics_of_batch(X, y, device, dtype))
        return PredictiveStatistics.concatenate(parts)

    def variance_by_layer(self, x: Any) -> VarianceShares:
        """Where the uncertainty comes from: shares in the variance of the logits.

        The curvature is block-diagonal, so that a posterior over some layers alone (the paper's
        table 15, `layers_to_transform` here) has the variance of all layers less the shares of
        those that it leaves out.

        Parameters
        ----------
        x : Mapping, torch.Tensor or PredictiveStatistics
            inputs of a batch, or the statistics of a data set

        Returns
        -------
        VarianceShares
            by block, by transformer layer, and of the A and the B matrices
        """
        if isinstance(x, PredictiveStatistics):
            self._check_same_fit(x)
            statistics = x
        else:
            self._check_H_init()
            statistics = self._statistics_of_batch(x, None, self._device, self._dtype)
        prior_precision = torch.as_tensor(self.prior_precision)
        variances = statistics.variance_by_block(prior_precision, self._H_factor)
        return VarianceShares.of(self.blocks, variances.mean(0))

    @without_autocast
    def _statistics_of_batch(
        self, X: Any, y: torch.Tensor | None, device: torch.device | str, dtype: torch.dtype
    ) -> PredictiveStatistics:
        """Project each block's Jacobian as soon as it is known."""
        curvature: list[DecomposedBlock] = self.H.blocks
        projections = [torch.empty(0)] * len(curvature)
        inner_products = [torch.empty(0)] * len(curvature)

        def project(index: int, jacobian: torch.Tensor) -> None:
            leading, remainder = curvature[index].project(jacobian)
            remainder = remainder.transpose(1, 2)[:, : None if curvature[index].n_left_out else 0]
            projections[index] = leading.flatten(2).to(device, dtype)
            inner_products[index] = upper_triangle(remainder @ remainder.mT).to(device, dtype)

        f_mu = visit_jacobians(self.model, self.blocks, X, project)
        if y is not None:
            y = check_targets(y, f_mu, self._training_likelihood).to(device)
        return PredictiveStatistics(
            f_mu.to(device, dtype),
            torch.cat(projections, dim=2),
            torch.cat(inner_products, dim=1),
            self.H.spectrum,
            self._H_factor.detach(),
            y,
        )

    def _validation_statistics(self, val_loader: Any, progress_bar: bool) -> PredictiveStatistics:
        if isinstance(val_loader, PredictiveStatistics):
            self._check_same_fit(val_loader)
            statistics = val_loader
        else:
            statistics = self.predictive_statistics(val_loader, progress_bar)
        if statistics.targets is None:
            raise ValueError("Validation data need labels, and the loader gives none.")
        return statistics

    def _scored_batches(
        self, val_loader: Any, pred_type: str, progress_bar: bool
    ) -> Callable[[], Iterable[Any]]:
        if pred_type != "glm":
            return super()._scored_batches(val_loader, pred_type, progress_bar)
        statistics = self._validation_statistics(val_loader, progress_bar)
        sizes, targets = statistics.batch_sizes, statistics.targets
        assert targets is not None

        def batches() -> Iterable[Any]:
            prior_precision = torch.as_tensor(self.prior_precision)
            moments = statistics.moments(prior_precision, self._H_factor)
            return zip(moments.split(sizes), targets.split(sizes), strict=True)

        return batches

    def _check_same_fit(self, statistics: PredictiveStatistics) -> None:
        self._check_H_init()
        if not torch.equal(statistics.spectrum.leading, self.H.spectrum.leading):
            raise ValueError("The statistics are those of another fit: gather them again.")

    def state_dict(self) -> dict[str, Any]:
        """State as the host's, with tensors and numbers alone for the curvature."""
        return ParametricLaplace.state_dict(self) | {"H": self.H_facs.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._check_weights(state_dict)
        ParametricLaplace.load_state_dict(self, state_dict)
        self.H_facs = LowRankKron.from_state_dict(state_dict["H"])
        self.H = self.H_facs.decompose()

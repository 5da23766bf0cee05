"""Laplace-LoRA: Kronecker-factored curvature whose large factors are kept low-rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from laplace.baselaplace import KronLaplace
from torch.utils.data import DataLoader

from laplace_lora_ext.curvature.structure import LowRankKronStructure, Structure
from laplace_lora_ext.lora_laplace import LoRALaplace
from laplace_lora_ext.models.locks import exclusive
from laplace_lora_ext.passes.recorder import Directions, every_output
from laplace_lora_ext.predictive.data_sets import Columns, over_loader
from laplace_lora_ext.predictive.moments import Moments
from laplace_lora_ext.predictive.statistics import PredictiveStatistics, statistics_of_batch


class LowRankKronLoRALaplace(LoRALaplace, KronLaplace):
    """Laplace-LoRA: Kronecker-factored curvature whose large factors are kept low-rank.

    Parameters
    ----------
    model, likelihood, **kwargs
        as for `LoRALaplace`
    backend : type of LowRankKronInterface, default=LowRankKronGGN
    backend_kwargs : dict, optional
        `rank` (10), `kfac_approx` ("gradient"), `tail` (True), `stochastic` (from 20 classes on),
        `num_samples`, `seed` (0); for the paper's settings pass `laplace_lora_ext.PAPER_SETTINGS`

    Attributes
    ----------
    H : LowRankKronDecomposed or None
        the curvature, without a prior; None before `fit`
    H_facs : LowRankKron or None
        the sums behind it, to which a later fit can add: with twice as many columns as the rank

    References
    ----------
    Yang et al., "Bayesian low-rank adaptation for large language models", ICLR 2024.
    """

    _key = ("lora", "lowrank_kron")
    _structure: ClassVar[type[Structure[Any, Any]]] = LowRankKronStructure
    # Classes for one likelihood, which share the host's key.
    _of_likelihood: ClassVar[dict[str, type[LowRankKronLoRALaplace]]] = {}

    def __new__(
        cls, model: Any = None, likelihood: str = "", *args: Any, **kwargs: Any
    ) -> LowRankKronLoRALaplace:
        is_general = cls is LowRankKronLoRALaplace
        return super().__new__(cls._of_likelihood.get(likelihood, cls) if is_general else cls)

    def moments(
        self, X: Any, joint: bool, directions: Directions = every_output
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.problem.check_linearised()
        precision: Any = self.posterior_precision
        covariances: list[torch.Tensor] = []  # of one part, by block

        def add(index: int, jacobian: torch.Tensor) -> None:
            if joint:
                jacobian = jacobian.flatten(0, 1)
            block, delta = precision.blocks[index], precision.deltas[index]
            covariances.append(block.inv_square_form(jacobian, delta))

        def moments_of(part: Any, _: slice) -> Moments:
            covariances.clear()
            f_mu = self.recorder.visit_jacobians(part, add, directions, self.enable_backprop)
            of_blocks = [covariance.to(f_mu.device) for covariance in covariances]
            return Moments(f_mu, torch.stack(of_blocks).sum(0))

        if joint:  # examples vary together: they can't come in parts
            return moments_of(X, slice(None))
        n_directions = len(directions(torch.zeros(1, self.n_outputs)))
        parts = self.recorder.in_parts(X, n_directions, moments_of)
        f_mu = torch.cat([part.f_mu for part in parts])
        f_var = torch.cat([part.f_var for part in parts])
        return f_mu, f_var

    @property
    def log_det_posterior_precision(self) -> torch.Tensor:
        """Log-determinant of the posterior precision, in float64."""
        self._check_H_init()
        return self.H.spectrum.logdet(self._H_factor, self.prior_precision)

    @exclusive
    @torch.inference_mode(False)
    def predictive_statistics(
        self,
        loader: DataLoader | Iterable[Any],
        progress_bar: bool = False,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> PredictiveStatistics:
        """Pass over a data set once, to predict it under any prior precision.

        Parameters
        ----------
        loader : DataLoader or iterable
            of mappings or pairs `(X, y)`; labels, if there are any, become `targets`
        progress_bar : bool, default=False
        device, dtype
            where and in which precision to keep the statistics; `PredictiveStatistics` says how
            large they are

        Returns
        -------
        PredictiveStatistics

        Raises
        ------
        ValueError
            If the loader is empty, labels don't fit, only some batches have labels, or a number is
            not finite. The message names the batch.
        """
        self.problem.check_linearised()
        self._check_H_init()

        def of_batch(batch: Any) -> Columns:
            self.check_model()
            pair = self.model.split_if_labelled(batch)
            return statistics_of_batch(self, pair, device, dtype).columns

        columns = over_loader(loader, of_batch, "[Predictive statistics]", progress_bar)
        f_mu, projections, inner_products, *targets = (column.to(device) for column in columns)
        return PredictiveStatistics(
            f_mu,
            projections,
            inner_products,
            self.H.spectrum,
            self._H_factor.detach(),
            *targets,  # none, if the data have no labels
        )

    @exclusive
    def summary(self) -> str:
        """Make a table of the LoRA weights and their priors: `print(la.summary())`.

        The last column says how many of a weight's parameters the data determine rather than the
        prior: the sum of e / (e + λ) over the eigenvalues e of its curvature, with the prior
        precision λ (MacKay, "Bayesian interpolation", Neural Computation 4, 1992).
        """
        self._check_H_init()
        spectrum = self.H.spectrum
        priors = self.prior_precision.double().expand(len(self.blocks))
        leading, remaining = spectrum.shifted(self._H_factor, priors)  # e + λ
        of_leading = 1 - priors[spectrum.leading_block] / leading
        of_remaining = 1 - priors[spectrum.remaining_block] / remaining
        determined = torch.zeros_like(priors)
        determined = determined.index_add(0, spectrum.leading_block, of_leading)
        determined = determined.index_add(
            0, spectrum.remaining_block, spectrum.multiplicity * of_remaining
        )
        names = [block.name.removeprefix("base_model.model.") for block in self.blocks]
        width = max(len(name) for name in names)
        rows = [f"{'LoRA weight':{width}}  parameters  prior precision  determined"]
        for row in zip(names, self._sizes, priors, determined, strict=True):
            name, size, prior, number = row
            rows.append(f"{name:{width}}  {size:10,}  {prior:15.4g}  {number:10.1f}")
        return "\n".join(rows)

    def statistics_of(self, loader: Any, progress_bar: bool) -> PredictiveStatistics:
        if not isinstance(loader, PredictiveStatistics):
            return self.predictive_statistics(loader, progress_bar)
        self._check_H_init()
        if not loader.spectrum.equals(self.H.spectrum):
            raise ValueError("The statistics belong to another fit: compute them again.")
        # `sigma_noise` and `temperature` may have changed since; the posterior may have moved.
        return replace(loader, scale=self._H_factor.detach().to(loader.scale))

    def statistics_by_batch(self) -> Callable[[Any], PredictiveStatistics]:
        def of_batch(batch: Any) -> PredictiveStatistics:
            self.check_model()
            pair = self.model.split_if_labelled(batch)
            return statistics_of_batch(self, pair, device="cpu", dtype=torch.float32)

        return of_batch

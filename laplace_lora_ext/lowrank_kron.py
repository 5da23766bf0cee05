"""Laplace-LoRA: Kronecker-factored curvature whose large factors are kept low-rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from laplace.baselaplace import KronLaplace
from laplace.curvature import CurvatureInterface
from torch.utils.data import DataLoader

from laplace_lora_ext.curvature.backend import LowRankKronGGN, LowRankKronInterface
from laplace_lora_ext.curvature.matrix import LowRankKron, LowRankKronDecomposed
from laplace_lora_ext.lora_laplace import LoRALaplace
from laplace_lora_ext.models.locks import exclusive, without_autocast
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
    _default_backend = LowRankKronGGN
    # Classes for one likelihood, which share the host's key.
    _of_likelihood: ClassVar[dict[str, type[LowRankKronLoRALaplace]]] = {}
    H_facs: Any

    def __new__(
        cls, model: Any = None, likelihood: str = "", *args: Any, **kwargs: Any
    ) -> LowRankKronLoRALaplace:
        own = cls is LowRankKronLoRALaplace
        return super().__new__(cls._of_likelihood.get(likelihood, cls) if own else cls)

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
        super()._init_H()
        self.backend  # noqa: B018 - refuses wrong `backend_kwargs` now rather than in `fit`

    def _zeros(self) -> LowRankKron:
        return self.backend.zeros()

    def _add_batch(
        self, H: LowRankKron, X: Any, y: torch.Tensor
    ) -> tuple[torch.Tensor, LowRankKron]:
        return self.backend.accumulate(H, X, y), H

    def _packed(self, H: LowRankKron) -> list[dict[str, Any]]:
        return H.state_dict()

    def _unpacked(self, state: list[dict[str, Any]]) -> LowRankKron:
        return LowRankKron.from_state_dict(state, [block.place for block in self.blocks])

    @without_autocast
    def _decomposed(self, H: LowRankKron, n_data: int) -> tuple[LowRankKron, LowRankKronDecomposed]:
        return H, H.decompose(self._device)

    def moments(
        self, X: Any, joint: bool, directions: Directions = every_output
    ) -> tuple[torch.Tensor, torch.Tensor]:
        precision: Any = self.posterior_precision
        covariances: list[torch.Tensor] = []  # of one part, by block

        def add(index: int, jacobian: torch.Tensor) -> None:
            if joint:
                jacobian = jacobian.flatten(0, 1)
            covariance = precision.blocks[index].inv_square_form(jacobian, precision.deltas[index])
            covariances.append(covariance)

        def moments(part: Any, _: slice) -> Moments:
            covariances.clear()
            f_mu = self.recorder.visit_jacobians(part, add, directions, self.enable_backprop)
            of_blocks = [covariance.to(f_mu.device) for covariance in covariances]
            return Moments(f_mu, torch.stack(of_blocks).sum(0))

        if joint:
            return moments(X, slice(None))
        n_directions = len(directions(torch.zeros(1, self.n_outputs)))
        f_mu, f_var = zip(*self.recorder.in_parts(X, n_directions, moments), strict=True)
        return torch.cat(f_mu), torch.cat(f_var)

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
        self._check_H_init()

        def of_batch(batch: Any) -> Columns:
            self.check_model()
            pair = self.model.split_if_labelled(batch)
            return statistics_of_batch(self, pair, device, dtype).columns

        columns = over_loader(loader, of_batch, "[Predictive statistics]", progress_bar)
        f_mu, projections, inner_products, *targets = (column.to(device) for column in columns)
        fit = self.H.spectrum, self._H_factor.detach()
        return PredictiveStatistics(f_mu, projections, inner_products, *fit, *targets)

    @exclusive
    def summary(self) -> str:
        """A table of the LoRA weights and their priors: `print(la.summary())`.

        The last column says how many of a weight's parameters the data determine rather than the
        prior: the sum of e / (e + λ) over the eigenvalues e of its curvature, with the prior
        precision λ (MacKay, "Bayesian interpolation", Neural Computation 4, 1992).
        """
        self._check_H_init()
        spectrum, priors = self.H.spectrum, self.prior_precision.double().expand(len(self.blocks))
        determined = torch.zeros_like(priors)
        for values, block, number in zip(
            spectrum.shifted(self._H_factor, priors),
            (spectrum.leading_block, spectrum.remaining_block),
            (1, spectrum.multiplicity),
            strict=True,
        ):
            determined = determined.index_add(0, block, number * (1 - priors[block] / values))
        names = [block.name.removeprefix("base_model.model.") for block in self.blocks]
        width = max(map(len, names))
        rows = [f"{'LoRA weight':{width}}  parameters  prior precision  determined"]
        for name, *numbers in zip(names, self._sizes, priors, determined, strict=True):
            rows.append("{:{}}  {:10,}  {:15.4g}  {:10.1f}".format(name, width, *numbers))
        return "\n".join(rows)

    def statistics_of(self, loader: Any, progress_bar: bool) -> PredictiveStatistics:
        if not isinstance(loader, PredictiveStatistics):
            return self.predictive_statistics(loader, progress_bar)
        self._check_H_init()
        if not loader.spectrum.equals(self.H.spectrum):
            raise ValueError("The statistics belong to another fit: compute them again.")
        # `sigma_noise` and `temperature` may have changed since; the posterior may have moved.
        return replace(loader, scale=self._H_factor.detach().to(loader.scale))

    def _settings(self) -> dict[str, Any]:
        return super()._settings() | self.backend.settings

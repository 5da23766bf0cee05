"""What to keep of a data set to try prior precisions without the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from laplace_lora_ext.curvature.matrix import Spectrum
from laplace_lora_ext.models.locks import as_tensor, cpu_as_default, without_autocast
from laplace_lora_ext.passes.derivatives import in_parts, visit_jacobians
from laplace_lora_ext.predictive.data_sets import Columns
from laplace_lora_ext.predictive.moments import MixtureMoments, Moments
from laplace_lora_ext.processes.shards import stacked

_AT_ONCE = 64  # examples whose projections are weighted: moments need the memory of a copy


@dataclass(eq=False, repr=False)
class PredictiveStatistics:
    """Logits of a data set and their Jacobians in the eigenbasis of a fitted curvature.

    z are projections of the Jacobians on the eigenvectors that the curvature keeps, and R inner
    products of what remains of the Jacobians. The covariance of an example's logits is

        f_var = Σ_e z_e z_eᵀ / (e + λ) + Σ_f R_f / (f + λ)

    for any prior precision λ, with the eigenvalues e and f of the `Spectrum`. All terms are
    positive semi-definite, so nothing cancels.

    An example takes `C (1 + E + F C)` numbers, where E is the sum of r k over the blocks and F that
    of r: 229 kB in float32 for 128 blocks of r 8, rank 10 and four classes.

    Parameters
    ----------
    f_mu : torch.Tensor
        `(N, C)` logits
    projections : torch.Tensor
        `(N, C, E)`
    inner_products : torch.Tensor
        `(N, F, C, C)`, the matrices R
    spectrum : Spectrum
        of the curvature, without a prior
    scale : torch.Tensor
        `()`, factor of the curvature: 1 / (sigma_noise² temperature)
    targets : torch.Tensor, optional
        `(N,)` labels or `(N, C)` numbers, if the data had any

    Notes
    -----
    `len(statistics)` is N, and `statistics[index]` selects examples.
    """

    f_mu: torch.Tensor
    projections: torch.Tensor
    inner_products: torch.Tensor
    spectrum: Spectrum
    scale: torch.Tensor
    targets: torch.Tensor | None = None

    @property
    def columns(self) -> Columns:
        """All tensors with a row for each example."""
        columns = self.f_mu, self.projections, self.inner_products
        return columns if self.targets is None else (*columns, self.targets)

    def of(self, columns: Columns) -> PredictiveStatistics:
        """Statistics of other examples of the same fit, from their `columns`."""
        f_mu, projections, inner_products, *targets = columns
        fit = self.spectrum, self.scale
        return PredictiveStatistics(f_mu, projections, inner_products, *fit, *targets)

    def required_targets(self) -> torch.Tensor:
        """The targets; an error if the data had none."""
        if self.targets is None:
            raise ValueError("Validation data need labels, but the loader gives none.")
        return self.targets

    def __len__(self) -> int:
        return len(self.f_mu)

    def __getitem__(self, index: slice | torch.Tensor) -> PredictiveStatistics:
        return self.of(tuple(column[index] for column in self.columns))

    @property
    def _device(self) -> torch.device:
        return self.f_mu.device

    @cpu_as_default()
    @without_autocast
    def moments(self, prior_precision: float | torch.Tensor) -> Moments:
        """Mean and covariance of the logits under a prior precision.

        Parameters
        ----------
        prior_precision : float or torch.Tensor
            λ, a scalar, or `(blocks,)` with one for each block; the covariance is differentiable
            in it. `inf` holds a block at its MAP value: with `inf` for all blocks but those of the
            first k layers, you get the moments of a posterior over only these layers

        Returns
        -------
        Moments
            f_mu, `(N, C)`, and f_var, `(N, C, C)`
        """
        deltas = as_tensor(prior_precision).to(self.spectrum.leading)
        eigenvalues = self.spectrum.shifted(self.scale, deltas)
        leading, remaining = (values.reciprocal().to(self.f_mu) for values in eigenvalues)
        covariances = []
        for z, R in zip(
            self.projections.split(_AT_ONCE), self.inner_products.split(_AT_ONCE), strict=True
        ):
            weighted = z * leading.sqrt()
            of_remainders = torch.einsum("nfab,f->nab", R, remaining)
            covariances.append(weighted @ weighted.mT + of_remainders)
        return Moments(self.f_mu, torch.cat(covariances))


@dataclass(eq=False)
class MixtureStatistics:
    """What each member keeps of a data set, to predict it under any prior.

    Attributes
    ----------
    members : tuple of PredictiveStatistics
    priors : tuple of torch.Tensor
        the members' own prior precisions, which a common factor multiplies

    Raises
    ------
    ValueError
        If the members' targets come in other orders.
    """

    members: tuple[PredictiveStatistics, ...]
    priors: tuple[torch.Tensor, ...]

    def __post_init__(self) -> None:
        targets = [member.targets for member in self.members if member.targets is not None]
        if any(not torch.equal(targets[0], other) for other in targets):
            raise ValueError(
                "The members read the data in other orders: pass a loader that does not shuffle."
            )

    def moments(self, factor: float | torch.Tensor) -> MixtureMoments:
        """Moments with the members' prior precisions multiplied by a factor."""
        pairs = zip(self.members, self.priors, strict=True)
        factor = as_tensor(factor)
        return MixtureMoments(
            tuple(statistics.moments(factor.to(prior) * prior) for statistics, prior in pairs)
        )

    def required_targets(self) -> torch.Tensor:
        """The targets; an error if the data had none."""
        return self.members[0].required_targets()


def statistics_of_batch(
    la: Any,
    batch: tuple[Any, torch.Tensor | None],
    device: torch.device | str,
    dtype: torch.dtype,
) -> PredictiveStatistics:
    """Pass over inputs, and targets if any, with a fitted `LowRankKronLoRALaplace`."""
    X, y = batch

    def of_part(part: Any, place: slice) -> PredictiveStatistics:
        projected: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by block, in any order

        def project(index: int, jacobian: torch.Tensor) -> None:
            block = la.H.blocks[index]
            leading, remainder = block.project(jacobian)
            remainder = remainder.transpose(1, 2)[:, : None if block.n_left_out else 0]
            projected[index] = leading.flatten(2), remainder @ remainder.mT

        with torch.autocast(la.blocks[0].device.type, enabled=False):
            f_mu = visit_jacobians(la.model, la.blocks, part, project)
        # All blocks together: each copy from an accelerator waits for the work there.
        in_order = zip(*(projected[index] for index in range(len(la.blocks))), strict=True)
        leading, products = (
            torch.cat([each.to(f_mu.device) for each in of_blocks], dim=dim).to(device, dtype)
            for of_blocks, dim in zip(in_order, (2, 1), strict=True)
        )
        check = la.trained_likelihood.check_targets
        targets = None if y is None else check(y[place], f_mu).to(device)
        fit = la.H.spectrum, la.curvature_scale.detach()
        return PredictiveStatistics(f_mu.to(device, dtype), leading, products, *fit, targets)

    n_examples = None if y is None else len(y)
    parts = in_parts(la.model, X, la.n_outputs, of_part, n_examples)
    return parts[0].of(stacked([part.columns for part in parts]))

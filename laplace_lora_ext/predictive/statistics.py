"""What to keep of a data set to try prior precisions without the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from laplace_lora_ext.curvature.matrix import LowRankKronDecomposed
from laplace_lora_ext.curvature.spectrum import Spectrum
from laplace_lora_ext.likelihoods import Likelihood
from laplace_lora_ext.models.locks import as_tensor, cpu_as_default
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.weights import Block
from laplace_lora_ext.numerics import without_autocast
from laplace_lora_ext.passes import visit_jacobians
from laplace_lora_ext.passes.derivatives import in_parts
from laplace_lora_ext.predictive.data_sets import Columns
from laplace_lora_ext.predictive.moments import Moments
from laplace_lora_ext.processes.shards import stacked

# How many projections to weight at once: moments need no more memory than a copy of these.
_CHUNK = 2**22


@dataclass(eq=False, repr=False)
class PredictiveStatistics:
    """Logits of a data set and their Jacobians in the eigenbasis of a fitted curvature.

    z are projections of the Jacobians on the eigenvectors that the curvature keeps, and R inner
    products of what remains of the Jacobians. The covariance of an example's logits is

        f_var = Σ_e z_e z_eᵀ / (e + λ) + Σ_f R_f / (f + λ)

    for any prior precision λ, with the eigenvalues e and f of the `Spectrum`. All terms are
    positive semi-definite, so nothing cancels.

    An example takes `C (1 + E) + F C (C + 1) / 2` numbers, where E is the sum of r k over the
    blocks and F that of r: 205 kB in float32 for 128 blocks of r 8, rank 10 and four classes.

    Parameters
    ----------
    f_mu : torch.Tensor
        `(N, C)` logits
    projections : torch.Tensor
        `(N, C, E)`
    inner_products : torch.Tensor
        `(N, F, C (C + 1) / 2)`, the upper triangles of the matrices R
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

    def check_fit(self, spectrum: Spectrum) -> None:
        """Refuse the statistics of another fit, by its eigenvalues."""
        if not torch.equal(self.spectrum.leading, spectrum.leading):
            raise ValueError("The statistics belong to another fit: compute them again.")

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
    def nbytes(self) -> int:
        """Size of the statistics of all examples, in bytes."""
        return self.f_mu.nbytes + self.projections.nbytes + self.inner_products.nbytes

    def __repr__(self) -> str:
        each = self.nbytes / max(len(self), 1)
        return (
            f"PredictiveStatistics({len(self)} examples, {self.f_mu.shape[1]} outputs, "
            f"{self.spectrum.n_blocks} blocks; {each / 1e3:.1f} kB an example, "
            f"{self.nbytes / 1e6:.1f} MB on {self.f_mu.device} in {self.f_mu.dtype})"
        )

    @property
    def _device(self) -> torch.device:
        return self.f_mu.device

    @cpu_as_default()
    @without_autocast
    def moments(
        self, prior_precision: float | torch.Tensor, scale: float | torch.Tensor | None = None
    ) -> Moments:
        """Mean and covariance of the logits under a prior precision.

        Parameters
        ----------
        prior_precision : float or torch.Tensor
            λ, a scalar, or `(blocks,)` with one for each block; the covariance is differentiable
            in it. `inf` holds a block at its MAP value: with `inf` for all blocks but those of the
            first k layers, you get the moments of a posterior over only these layers
        scale : float or torch.Tensor, optional
            factor of the curvature; by default that of the fit

        Returns
        -------
        Moments
            f_mu, `(N, C)`, and f_var, `(N, C, C)`

        Raises
        ------
        ValueError
            If a prior precision is not above 0, or their number is wrong.
        """
        leading, remaining = self._variances(prior_precision, scale)
        rows = max(1, _CHUNK // max(1, self.projections[:1].numel()))
        parts = zip(self.projections.split(rows), self.inner_products.split(rows), strict=True)
        f_var = torch.cat([self._covariance(*part, leading, remaining) for part in parts])
        return Moments(self.f_mu, f_var)

    @cpu_as_default()
    @without_autocast
    def variance_by_block(
        self, prior_precision: float | torch.Tensor, scale: float | torch.Tensor | None = None
    ) -> torch.Tensor:
        """What each block adds to the trace of an example's covariance.

        Parameters
        ----------
        prior_precision, scale
            as for `moments`

        Returns
        -------
        torch.Tensor
            `(N, blocks)`
        """
        leading, remaining = self._variances(prior_precision, scale)
        n_outputs = self.f_mu.shape[1]
        rows, columns = torch.triu_indices(n_outputs, n_outputs)
        diagonal = self.inner_products[..., rows == columns]  # ⟨G_i, G_i⟩ of each output i
        result = self.f_mu.new_zeros(len(self), self.spectrum.n_blocks)
        for block, values in (
            (self.spectrum.leading_block, self.projections.square().sum(1) * leading),
            (self.spectrum.remaining_block, diagonal.sum(-1) * remaining),
        ):
            result = result.index_add(1, block.to(result.device), values)
        return result

    def _variances(
        self, prior_precision: float | torch.Tensor, scale: float | torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Posterior variances `(E,)` and `(F,)`: the inverses of the eigenvalues."""
        deltas = as_tensor(prior_precision).to(self.spectrum.leading)
        n_blocks = self.spectrum.n_blocks
        if deltas.shape not in {(), (1,), (n_blocks,)}:
            raise ValueError(f"Give one prior precision, or one for each of {n_blocks} blocks.")
        if not (deltas > 0).all():
            raise ValueError("A prior precision must be above 0.")
        scale = self.scale if scale is None else as_tensor(scale).to(deltas)
        leading, remaining = self.spectrum.shifted(scale, deltas)
        return leading.reciprocal().to(self.f_mu), remaining.reciprocal().to(self.f_mu)

    def _covariance(
        self,
        projections: torch.Tensor,
        inner_products: torch.Tensor,
        leading: torch.Tensor,
        remaining: torch.Tensor,
    ) -> torch.Tensor:
        weighted = projections * leading.sqrt()
        triangles = (inner_products.mT @ remaining[:, None]).squeeze(-1)
        return weighted @ weighted.mT + from_triangle(triangles, self.f_mu.shape[1])


def statistics_of_batch(
    model: LogitsModel,
    blocks: Sequence[Block],
    likelihood: Likelihood,
    H: LowRankKronDecomposed,
    scale: torch.Tensor,
    n_outputs: int,
    batch: tuple[Any, torch.Tensor | None],
    device: torch.device | str,
    dtype: torch.dtype,
) -> PredictiveStatistics:
    """Pass over a batch of inputs, perhaps with targets.

    `H` is the curvature without a prior, and `scale`, `()`, its factor.
    """
    X, y = batch

    def of_part(part: Any, place: slice) -> PredictiveStatistics:
        f_mu, *projected = _projected(model, blocks, H, part)
        # All blocks together: each copy from an accelerator waits for the work there.
        leading, products = (
            torch.cat([each.to(f_mu.device) for each in of_blocks], dim=dim).to(device, dtype)
            for of_blocks, dim in zip(projected, (2, 1), strict=True)
        )
        targets = None if y is None else likelihood.check_targets(y[place], f_mu).to(device)
        logits = f_mu.to(device, dtype)
        return PredictiveStatistics(logits, leading, products, H.spectrum, scale, targets)

    n_examples = None if y is None else len(y)
    parts = in_parts(model, X, n_outputs, of_part, n_examples)
    return parts[0].of(stacked([part.columns for part in parts]))


def _projected(
    model: LogitsModel, blocks: Sequence[Block], H: LowRankKronDecomposed, X: Any
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Logits, and each block's projections and inner products, made as soon as it is there."""
    projections = [torch.empty(0)] * len(blocks)
    inner_products = [torch.empty(0)] * len(blocks)

    def project(index: int, jacobian: torch.Tensor) -> None:
        block = H.blocks[index]
        leading, remainder = block.project(jacobian)
        remainder = remainder.transpose(1, 2)[:, : None if block.n_left_out else 0]
        projections[index] = leading.flatten(2)
        inner_products[index] = upper_triangle(remainder @ remainder.mT)

    with torch.autocast(blocks[0].device.type, enabled=False):
        f_mu = visit_jacobians(model, blocks, X, project)
    return f_mu, projections, inner_products


def upper_triangle(matrices: torch.Tensor) -> torch.Tensor:
    """`(..., C, C)` symmetric matrices as `(..., C (C + 1) / 2)` numbers, row by row."""
    rows, columns = torch.triu_indices(*matrices.shape[-2:], device=matrices.device)
    return matrices[..., rows, columns]


def from_triangle(triangles: torch.Tensor, size: int) -> torch.Tensor:
    """`(..., C, C)` symmetric matrices from what `upper_triangle` returned."""
    place = triangles.device
    rows, columns = torch.triu_indices(size, size, device=place)
    position = torch.empty(size, size, dtype=torch.long, device=place)
    position[rows, columns] = position[columns, rows] = torch.arange(len(rows), device=place)
    return triangles[..., position]

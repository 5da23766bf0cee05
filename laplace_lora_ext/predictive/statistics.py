"""What to keep of a data set to try prior precisions without the model."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from laplace_lora_ext.curvature.decomposed import Spectrum
from laplace_lora_ext.curvature.kron import LinAlgError
from laplace_lora_ext.models.running import as_tensor
from laplace_lora_ext.passes.recorder import Directions
from laplace_lora_ext.predictive.moments import Contrasts, Moments, padded_to
from laplace_lora_ext.predictive.posterior import (
    Posterior,
    directions_of,
    sees_differences,
)
from laplace_lora_ext.processes.shards import Columns, join_batches

# Examples whose projections are weighted at once, which copies them.
_AT_ONCE = 64


class _Rows:
    """Tensors with a row for each of N examples, to be selected, joined and counted."""

    targets: Tensor | None

    @property
    def _known(self) -> dict[str, Tensor]:
        return {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and value.ndim  # a number is of all examples
        }

    @property
    def columns(self) -> Columns:
        """List all tensors with a row for each example."""
        return tuple(self._known.values())

    def of(self: Any, columns: Columns) -> Any:
        """Return `columns` of other examples of the same fit."""
        return replace(self, **dict(zip(self._known, columns, strict=True)))

    def required_targets(self) -> Tensor:
        """Return the targets; a `ValueError` if the data had none."""
        if self.targets is None:
            raise ValueError("Validation data need labels, but the loader gives none.")
        return self.targets

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: slice | Tensor) -> Any:
        return self.of(tuple(column[index] for column in self.columns))


@dataclass(eq=False, repr=False)
class PredictiveStatistics(_Rows):
    """Logits of a data set and their Jacobians in the eigenbasis of a fitted curvature.

    z are projections of the Jacobians on the eigenvectors that the curvature keeps, and
    R inner products of what remains of the Jacobians. The covariance of an example's
    logits is

        f_var = Σ_e z_e z_eᵀ / (e + λ) + Σ_f R_f / (f + λ)

    for any prior precision λ, with the eigenvalues e and f of the `Spectrum`. All terms
    are positive semi-definite, so nothing cancels.

    With more than nine classes they are, unless more are asked for, of at most 8
    contrasts: how far other logits are from the most probable one, `f_j - f_top`. The
    covariance is then completed (see `alike`), and tells of differences of logits
    alone.

    An example takes `C + D (E + F D)` numbers, where D is C or the number of contrasts,
    E the sum of r k over the blocks and F that of r: in float32, for 128 blocks of r 8
    and rank 10, 229 kB with four classes and 590 kB with ten or more.

    Parameters
    ----------
    f_mu : torch.Tensor
        `(N, C)` logits
    projections : torch.Tensor
        `(N, D, E)`
    inner_products : torch.Tensor
        `(N, F, D, D)`, the matrices R
    spectrum : Spectrum
        of the curvature, without a prior
    scale : torch.Tensor
        `()`, factor of the curvature: 1 / (sigma_noise² temperature)
    targets : torch.Tensor, optional
        `(N,)` labels or `(N, C)` numbers, if the data had any
    classes : torch.Tensor, optional
        `(N, 1 + D)`, which classes contrasts are of: the most probable one, and those
        that are compared with it, or -1 where an example needs fewer; None where all
        logits are known

    Notes
    -----
    `len(statistics)` is N, and `statistics[index]` selects examples.
    """

    f_mu: Tensor
    projections: Tensor
    inner_products: Tensor
    spectrum: Spectrum
    scale: Tensor
    targets: Tensor | None = None
    classes: Tensor | None = None

    def moments(self, prior_precision: float | Tensor) -> Moments:
        """Compute mean and covariance of the logits under a prior precision.

        Parameters
        ----------
        prior_precision : float or torch.Tensor
            λ, a scalar, or `(blocks,)` with one for each block; the covariance is
            differentiable in it. `inf` holds a block at its MAP value: with `inf` for
            all blocks but those of the first k layers, you get the moments of a
            posterior over only these layers

        Returns
        -------
        Moments
            f_mu, `(N, C)`, and f_var, `(N, C, C)`; of contrasts they serve the links
            "mean_field" and "mc"
        """
        deltas = as_tensor(prior_precision).to(self.spectrum.values)
        variances = self.spectrum.shifted(self.scale, deltas).reciprocal().to(self.f_mu)
        of_leading, of_remaining = variances.tensor_split([self.projections.shape[2]])
        covariances: list[Tensor] = []
        parts = self.projections.split(_AT_ONCE), self.inner_products.split(_AT_ONCE)
        with torch.autocast(self.f_mu.device.type, enabled=False):
            for z, R in zip(*parts, strict=True):
                weighted = z * of_leading.sqrt()
                remainders = torch.einsum("nfab,f->nab", R, of_remaining)
                covariances.append(weighted @ weighted.mT + remainders)
        return Moments(self.f_mu, torch.cat(covariances), self.classes)


@dataclass(eq=False, repr=False)
class TriedStatistics(_Rows):
    """Moments of a data set under the few prior precisions that they are made for.

    They stand in for `PredictiveStatistics` where a structure has no eigenvectors that
    are few: covariances at some priors take little memory, and Jacobians much.

    Attributes
    ----------
    f_mu : torch.Tensor
        `(N, C)` logits
    covariances : torch.Tensor
        `(N, T, D, D)`, nan where a prior leaves no covariance
    priors : sequence of torch.Tensor
        T prior precisions
    targets : torch.Tensor, optional
        as for `PredictiveStatistics`
    classes : torch.Tensor, optional
        as for `PredictiveStatistics`
    """

    f_mu: Tensor
    covariances: Tensor
    priors: Sequence[Tensor]
    targets: Tensor | None = None
    classes: Tensor | None = None

    def moments(self, prior_precision: Tensor) -> Moments:
        """Return the moments under one of the prior precisions.

        A `torch.linalg.LinAlgError` where it leaves no covariance.
        """
        is_this = [torch.equal(prior, prior_precision) for prior in self.priors]
        f_var = self.covariances[:, is_this.index(True)]
        if f_var.isnan().any():
            raise LinAlgError("no covariance under this prior precision")
        return Moments(self.f_mu, f_var, self.classes)


class MixtureStatistics(NamedTuple):
    """Each member's statistics of the same examples, to choose a mixture's prior."""

    members: Sequence[PredictiveStatistics]


def join_statistics(parts: Sequence[Any]) -> Any:
    """Join statistics of one kind, of several batches of a data set."""
    return parts[0].of(join_batches([part.columns for part in parts]))


# --- of a posterior -------------------------------------------------------------------


def has_statistics(la: Posterior) -> bool:
    """Tell whether a posterior's statistics serve any prior precision."""
    return hasattr(la, "predictive_statistics")


def of_present_fit(la: Posterior, given: Any, link_approx: str) -> PredictiveStatistics:
    """Take given statistics; refuse those of another fit, or for other links."""
    if not has_statistics(la) or not given.spectrum.equals(la.H.spectrum):
        raise ValueError("The statistics belong to another fit: compute them again.")
    if given.classes is not None and not sees_differences(la, link_approx):
        raise ValueError(
            f"These statistics tell of differences of logits alone, and the link "
            f"{link_approx!r} reads each by itself: compute them with "
            f"link_approx={link_approx!r}."
        )
    # `sigma_noise` and `temperature` may have changed since; the posterior may have
    # moved.
    return replace(given, scale=la._H_factor.detach().to(given.scale))


def contrasts_for(la: Posterior, link_approx: str) -> Contrasts | None:
    """Say which contrasts a link's statistics are of; None for all outputs."""
    contrasts = Contrasts(la.n_contrasts)
    are_some = contrasts.most(la.n_outputs) < la.n_outputs - 1
    return contrasts if are_some and sees_differences(la, link_approx) else None


def statistics_of_batch(
    la: Posterior,
    batch: Any,
    contrasts: Contrasts | None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    priors: Sequence[Tensor] = (),
) -> PredictiveStatistics | TriedStatistics:
    """Pass over a batch, with targets or without, to keep what prior precisions need.

    Without `contrasts` of all outputs. A structure whose statistics don't serve any
    prior needs to know the `priors`.
    """
    la.task.check_linearised()
    la.check_model()
    X, y = la.model.split_if_labelled(batch)
    directions, n_directions = directions_of(la, contrasts)

    def of_part(part: Any, place: slice) -> PredictiveStatistics | TriedStatistics:
        if has_statistics(la):
            kept = _project(la, part, directions, n_directions)
        else:
            kept = _try_priors(la, part, directions, n_directions, priors)
        f_mu = kept.f_mu
        kept = kept.of(tuple(column.to(device, dtype) for column in kept.columns))
        targets = classes = None
        if y is not None:
            labels = y[place]
            if la.task.has_tokens:  # a part may have some of a text's labels
                _, labels = la.model.split(part)
            targets = la.task.check_targets(labels, f_mu).to(device)
        if contrasts is not None:
            classes = contrasts.classes(f_mu).to(device)
        return replace(kept, targets=targets, classes=classes)

    n_examples = None if y is None else len(y)
    return join_statistics(la.recorder.predict(X, n_directions, of_part, n_examples))


def _project(
    la: Posterior, part: Any, directions: Directions, n_directions: int
) -> PredictiveStatistics:
    """Project Jacobians of a few examples on eigenvectors; multiply what remains."""
    by_block: dict[int, tuple[Tensor, Tensor]] = {}  # blocks come in any order

    def project(indices: list[int], jacobians: Tensor) -> None:
        for index, jacobian in zip(indices, jacobians, strict=True):
            leading, remainder = la.H.blocks[index].project(jacobian)
            if remainder is None:  # as the `Spectrum`, which has no eigenvalues for it
                remainder = jacobian[:, :, :0]
            by_row = remainder.transpose(1, 2)  # (B, r, C, d)
            by_block[index] = leading.flatten(2), by_row @ by_row.mT

    f_mu = la.recorder.visit_jacobians(part, project, directions)
    # All blocks together: each copy from an accelerator waits for the work there.
    leading, products = zip(
        *(by_block[index] for index in range(len(la.blocks))), strict=True
    )
    projections = torch.cat([each.to(f_mu.device) for each in leading], dim=2)
    inner_products = torch.cat([each.to(f_mu.device) for each in products], dim=1)
    # Batches need different numbers of contrasts: columns have places for all of them.
    n_missing = n_directions - projections.shape[1]
    return PredictiveStatistics(
        f_mu=f_mu,
        projections=pad(projections, (0, 0, 0, n_missing)),
        inner_products=padded_to(inner_products, n_directions),
        spectrum=la.H.spectrum,
        scale=la._H_factor.detach(),
    )


def _try_priors(
    la: Posterior,
    part: Any,
    directions: Directions,
    n_directions: int,
    priors: Sequence[Tensor],
) -> TriedStatistics:
    """Compute the covariances of a few examples' logits under each prior precision."""
    jacobians, f_mu = la.recorder.jacobians(part, directions)
    n_examples, n_used, _ = jacobians.shape
    under = copy(la)
    by_prior: list[Tensor] = []
    for prior in priors:
        under.prior_precision = prior
        try:
            with torch.autocast(jacobians.device.type, enabled=False):
                by_prior.append(under.functional_variance(jacobians))
        except LinAlgError:
            nothing = jacobians.new_full((n_examples, n_used, n_used), torch.nan)
            by_prior.append(nothing)
    covariances = padded_to(torch.stack(by_prior, dim=1), n_directions)
    return TriedStatistics(f_mu, covariances, priors)

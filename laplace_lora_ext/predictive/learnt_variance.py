"""A regression that has learnt variances of logits: no model, and no pass."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

PENALTIES = torch.logspace(-10, 1, 23, dtype=torch.float64)
"""Penalties to choose from, in units of the largest squared singular value of the
features."""

_MARGIN = math.log(2)  # how far a logarithm may lie beyond those learnt
_LITTLE = 1e-6  # beside 1, ten times the rounding of single precision
_SAME = 1e-5  # by how much of itself a number may change in a move
_COMPONENTS = 64  # all there are up to ten classes
# What moves with a model. What tells the posterior stays, to be compared with the
# present one.
_REGRESSION = ("mean", "scale", "weights", "components", "offset", "lowest", "highest")


@dataclass(frozen=True, eq=False, repr=False)
class LearntVariance:
    """Predicts variances of logits from features x `(B, p)` of a forward pass.

    Beside the C logits stands a last number f_0, which is always 0. For each two of
    them

        log Var(f_j - f_k) = b_jk + ((x - mean) / scale) W c_jk

    by ridge regression, at most a factor of 2 beyond the variances that it has learnt
    from. From these differences follows the covariance of the logits.

    Attributes
    ----------
    mean : torch.Tensor
        `(p,)`, of the features
    scale : torch.Tensor
        `(p,)`, standard deviations of the features
    weights : torch.Tensor
        `(p, q)`, W
    components : torch.Tensor
        `(q, P)`, the c: the at most 64 leading principal components of the P = C (C +
        1) / 2 pairs
    offset : torch.Tensor
        `(P,)`, b: the mean logarithm of each variance
    lowest : torch.Tensor
        `(P,)`, the lowest logarithm of those learnt
    highest : torch.Tensor
        `(P,)`, the highest logarithm of those learnt
    prior_precision : torch.Tensor
        of the posterior whose variances these are
    curvature_scale : torch.Tensor
        of the same posterior
    r_squared : float
        share of the variance of the logarithms that is explained when each example is
        left out
    mean_error : float
        mean absolute error of the logarithms when each example is left out
    n_examples : int
        learnt from, swapped and unlabelled ones included; those without doubt beside
        the others are left out
    """

    mean: Tensor
    scale: Tensor
    weights: Tensor
    components: Tensor
    offset: Tensor
    lowest: Tensor
    highest: Tensor
    prior_precision: Tensor
    curvature_scale: Tensor
    r_squared: float
    mean_error: float
    n_examples: int

    def __repr__(self) -> str:
        return (
            f"LearntVariance(r_squared={self.r_squared:.3f}, "
            f"n_examples={self.n_examples})"
        )

    @classmethod
    def of(
        cls,
        features: Tensor,
        log_variances: Tensor,
        prior_precision: Tensor,
        curvature_scale: Tensor,
        noise: float = 0.0,
    ) -> LearntVariance:
        """Learn from N examples, in float64 and on the CPU.

        Parameters
        ----------
        features : torch.Tensor
            `(N, p)`
        log_variances : torch.Tensor
            `(N, P)`, what the function of this name made
        prior_precision : torch.Tensor
            of the posterior whose variances these are
        curvature_scale : torch.Tensor
            of the same posterior
        noise : float, default=0.0
            variance of the independent errors that the logarithms have
        """
        X = features.cpu().double()
        Y = log_variances.cpu().double()
        X, Y = _with_doubt(X, Y)
        mean = X.mean(0)
        scale = X.std(0, correction=0)
        # What does not vary says nothing, and rounding makes no feature: divided by
        # infinity, it counts as 0 wherever it is met later.
        varies = scale > _LITTLE * X.abs().amax(0)
        scale = torch.where(varies, scale, torch.inf)
        features = (X - mean) / scale

        # Regress the leading principal components of the logarithms, in place of all
        # pairs.
        offset = Y.mean(0)
        centred = Y - offset
        U, s, components = torch.linalg.svd(centred, full_matrices=False)
        components = components[:_COMPONENTS]
        scores = U[:, :_COMPONENTS] * s[:_COMPONENTS]
        weights, residuals = ridge(features, scores)

        # The errors of each example when it is left out, from the components back to
        # all pairs.
        errors = centred - (scores - residuals) @ components
        # Logarithms that do not vary at all are explained perfectly, not 0 / 0.
        smallest = torch.finfo(X.dtype).tiny
        total = (centred.square().mean() - noise).clamp_min(smallest)
        mean_square = (errors.square().mean() - noise).clamp_min(0)
        mean_error = errors.abs().mean()
        in_range = Y
        if noise:
            # Draws scatter beyond the range of the variances, which what the features
            # explain has.
            in_range = offset + centred - errors
            # The mean of normal errors' absolute values, without those of the draws.
            mean_error = (2 / math.pi * mean_square).sqrt()
        return cls(
            mean=mean,
            scale=scale,
            weights=weights,
            components=components,
            offset=offset,
            lowest=in_range.amin(0),
            highest=in_range.amax(0),
            prior_precision=prior_precision.detach().cpu().clone(),
            curvature_scale=curvature_scale.detach().cpu().clone(),
            r_squared=1 - (mean_square / total).item(),
            mean_error=mean_error.item(),
            n_examples=len(X),
        )

    def to(self, device: torch.device, dtype: torch.dtype) -> LearntVariance:
        """Move the regression to a device and a precision.

        Parameters
        ----------
        device : torch.device
            where the copy is
        dtype : torch.dtype
            its precision
        """
        moved = {name: getattr(self, name).to(device, dtype) for name in _REGRESSION}
        return replace(self, **moved)

    def is_of(self, prior_precision: Tensor, curvature_scale: Tensor) -> bool:
        """Tell whether these are variances of a posterior with this prior and scale.

        Parameters
        ----------
        prior_precision : torch.Tensor
            the posterior's
        curvature_scale : torch.Tensor
            the posterior's
        """
        is_of_prior = _is_same(prior_precision, self.prior_precision)
        return is_of_prior and _is_same(curvature_scale, self.curvature_scale)

    def covariance(self, features: Tensor) -> Tensor:
        """Predict covariances `(B, C, C)` from features `(B, p)`.

        The variances of logits and of their differences are those learnt; as they need
        not fit together, the matrices may have negative eigenvalues.
        """
        standardised = (features - self.mean) / self.scale
        scores = standardised @ self.weights
        logs = self.offset + scores @ self.components
        # Of other texts a regression may say anything: it is believed near what it has
        # seen.
        logs = logs.clamp(self.lowest - _MARGIN, self.highest + _MARGIN)
        return covariances(logs.exp())


def _is_same(now: Tensor, then: Tensor) -> bool:
    """Compare numbers but for a model's move, which changes device and precision."""
    if now.shape != then.shape:
        return False
    return torch.allclose(now.cpu().double(), then.double(), rtol=_SAME, atol=0.0)


def _with_doubt(features: Tensor, log_variances: Tensor) -> tuple[Tensor, Tensor]:
    """Select the examples whose logits have any variance beside the others'.

    A `ValueError` if they are too few to learn from.
    """
    # The logarithm of no doubt at all, as of a text without aLoRA's invocation tokens,
    # would outweigh all others.
    least = log_variances.max() + math.log(_LITTLE)
    has_doubt = log_variances.amax(1) > least
    n_with_doubt = int(has_doubt.sum())
    if n_with_doubt < 3:
        raise ValueError(
            f"Variances can't be learnt from {n_with_doubt} examples that have some: "
            "give more."
        )
    return features[has_doubt], log_variances[has_doubt]


def ridge(X: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
    """Regress centred targets `(N, q)` on features `(N, p)`.

    The best of `PENALTIES` is chosen.

    Returns the weights `(p, q)`, and the errors `(N, q)` of examples that are left out.
    The penalty minimises the mean of their squares. With `X = U diag(s) Vᵀ` these
    errors follow from one fit: `(y_n - ŷ_n) / (1 - h_n)`, where `h_n = 1/N + Σ_k U_nk²
    s_k² / (s_k² + penalty)` is the leverage with a free intercept.
    """
    U, s, Vt = torch.linalg.svd(X, full_matrices=False)
    # Squares that should be 0 are, after rounding, far below the smallest penalty.
    squares = s.square()
    # The targets in the span of the features, and what no features explain.
    along = U.mT @ Y
    across = Y - U @ along
    leverages = U.square()
    free = 1 - 1 / len(X) - leverages.sum(1)  # 1 - h without a penalty

    def errors(penalty: Tensor) -> Tensor:
        shrunk_away = penalty / (squares + penalty)
        residuals = across + U @ (shrunk_away[:, None] * along)
        not_leverage = free + leverages @ shrunk_away
        return residuals / not_leverage[:, None]

    largest = squares[0] or 1.0  # where all features are constant
    best = min(PENALTIES * largest, key=lambda each: errors(each).square().mean())
    coefficients = s / (squares + best)
    weights = Vt.mT @ (coefficients[:, None] * along)
    return weights, errors(best)


def log_variances(f_var: Tensor) -> Tensor:
    """Take log-variances `(B, P)` of C logits and of their differences.

    These are the differences of C + 1 numbers, the first of which is 0. Of covariances
    `(B, C, C)`; a variance of 0 counts as the smallest that rounding leaves beside the
    others.
    """
    V = pad(f_var, (1, 0, 1, 0))  # with the number 0 in front
    n_numbers = V.shape[-1]
    own = V.diagonal(dim1=-2, dim2=-1)
    j, k = torch.triu_indices(n_numbers, n_numbers, offset=1, device=V.device)
    between = V[..., j, k]
    variances = own[..., j] + own[..., k] - 2 * between
    precision = torch.finfo(V.dtype)
    rounding = precision.eps * own.amax(-1, keepdim=True)
    smallest = rounding.clamp_min(precision.tiny)
    return variances.maximum(smallest).log()


def covariances(variances: Tensor) -> Tensor:
    """Turn variances `(B, P)`, ordered as by `log_variances`, into covariances.

    They are `(B, C, C)`.

    With D_j0 = Var(f_j) and D_jk = Var(f_j - f_k): `V_jk = (D_j0 + D_k0 - D_jk) / 2`.
    """
    n_examples, n_variances = variances.shape
    n_logits = (math.isqrt(1 + 8 * n_variances) - 1) // 2  # n (n + 1) / 2 of them
    own, between = variances[:, :n_logits], variances[:, n_logits:]
    j, k = torch.triu_indices(n_logits, n_logits, offset=1, device=variances.device)
    D = variances.new_zeros(n_examples, n_logits, n_logits)
    D[:, j, k] = between
    return (own[:, :, None] + own[:, None] - D - D.mT) / 2

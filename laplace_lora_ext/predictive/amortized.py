"""Variances of logits that are learnt, to predict at the price of one forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader

from laplace_lora_ext.likelihoods import Likelihood
from laplace_lora_ext.models.batches import named_batches
from laplace_lora_ext.models.logits_model import LogitsModel, logits_and_hidden_states
from laplace_lora_ext.models.running import exclusive
from laplace_lora_ext.models.swapping import Swapping
from laplace_lora_ext.models.weights import are_in_place, called_with
from laplace_lora_ext.predictive.data_sets import Columns, over_loader
from laplace_lora_ext.predictive.distributions import (
    Linearised,
    as_values,
    predictive_moments,
)
from laplace_lora_ext.predictive.moments import AnyMoments, Moments
from laplace_lora_ext.processes.exchange import together

PENALTIES = torch.logspace(-10, 1, 23, dtype=torch.float64)
"""Penalties to choose from, in units of the largest squared singular value of the
features."""

_MARGIN = math.log(2)  # how far a logarithm may lie beyond those learnt
_ROUNDING = 1e-6  # ten times that of single precision
_COMPONENTS = 64  # all there are up to ten classes
_SWAPPED = "swapped"
# For each example, where there are too many outputs for a backward pass each.
_DRAWS = 8

# The logarithm of a variance that is estimated from k draws is off by digamma(k / 2) -
# log(k / 2) on average, and its variance is trigamma(k / 2) (Bartlett & Kendall, 1946).
_HALF_OF_DRAWS = torch.tensor(_DRAWS / 2, dtype=torch.float64)
_BIAS_OF_DRAWS = (torch.digamma(_HALF_OF_DRAWS) - _HALF_OF_DRAWS.log()).item()
_NOISE_OF_DRAWS = torch.polygamma(1, _HALF_OF_DRAWS).item()
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
        varies = scale > 1e-6 * X.abs().amax(0)
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

    def to(
        self,
        device: torch.device,
        dtype: torch.dtype,
    ) -> LearntVariance:
        """Move the regression to a device and a precision.

        Parameters
        ----------
        device : torch.device
        dtype : torch.dtype
        """
        moved: dict[str, Tensor] = {}
        for name in _REGRESSION:
            moved[name] = getattr(self, name).to(device, dtype)
        return replace(self, **moved)

    def is_of(
        self,
        prior_precision: Tensor,
        curvature_scale: Tensor,
    ) -> bool:
        """Tell whether these are variances of a posterior with this prior and scale.

        Parameters
        ----------
        prior_precision : torch.Tensor
            the posterior's
        curvature_scale : torch.Tensor
            the posterior's
        """
        same_prior = _alike(prior_precision, self.prior_precision)
        return same_prior and _alike(curvature_scale, self.curvature_scale)

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


def _with_doubt(
    features: Tensor,
    log_variances: Tensor,
) -> tuple[Tensor, Tensor]:
    """Select the examples whose logits have any variance beside the others'.

    A `ValueError` if they are too few to learn from.
    """
    # The logarithm of no doubt at all, as of a text without aLoRA's invocation tokens,
    # would outweigh all others.
    least = log_variances.max() + math.log(_ROUNDING)
    has_doubt = log_variances.amax(1) > least
    n_with_doubt = int(has_doubt.sum())
    if n_with_doubt < 3:
        raise ValueError(
            f"Variances can't be learnt from {n_with_doubt} examples that have some: "
            "give more."
        )
    return features[has_doubt], log_variances[has_doubt]


def _alike(
    now: Tensor,
    then: Tensor,
) -> bool:
    """Tell whether numbers are the same, but for a model's move.

    Moves change device and precision.
    """
    now = now.detach().cpu().double()
    then = then.cpu().double()
    if now.shape != then.shape:
        return False
    return torch.allclose(now, then, rtol=_ROUNDING, atol=0.0)


def ridge(
    X: Tensor,
    Y: Tensor,
) -> tuple[Tensor, Tensor]:
    """Regress centred targets `(N, q)` on features `(N, p)`.

    The best of `PENALTIES` is chosen.

    Returns the weights `(p, q)`, and the errors `(N, q)` of examples that are left out.
    The penalty minimises the mean of their squares. With `X = U diag(s) Vᵀ` these
    errors follow from one fit: `(y_n - ŷ_n) / (1 - h_n)`, where `h_n = 1/N + Σ_k U_nk²
    s_k² / (s_k² + penalty)` is the leverage with a free intercept.
    """
    U, s, Vt = torch.linalg.svd(X, full_matrices=False)
    # As numpy's `matrix_rank`: what is smaller is rounding.
    rounding = max(X.shape) * torch.finfo(s.dtype).eps
    is_kept = s > rounding * s[:1]
    s = s[is_kept]
    U = U[:, is_kept]
    Vt = Vt[is_kept]
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

    def mean_square(penalty: Tensor) -> float:
        return errors(penalty).square().mean().item()

    largest = 1.0
    if len(squares):  # none, where all features are constant
        largest = squares[0]
    best = min(PENALTIES * largest, key=mean_square)
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
    j, k = torch.triu_indices(
        n_numbers,
        n_numbers,
        offset=1,
        device=V.device,
    )
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
    # P pairs are of n numbers, where n (n - 1) / 2 = P.
    *batch, n_pairs = variances.shape
    n_numbers = (1 + math.isqrt(1 + 8 * n_pairs)) // 2
    j, k = torch.triu_indices(
        n_numbers,
        n_numbers,
        offset=1,
        device=variances.device,
    )
    D = variances.new_zeros(*batch, n_numbers, n_numbers)
    D[..., j, k] = variances
    D[..., k, j] = variances
    own = D[..., 0, 1:]
    of_differences = D[..., 1:, 1:]
    sums = own[..., :, None] + own[..., None, :]
    return (sums - of_differences) / 2


class Amortizable(Linearised, Protocol):
    """A posterior whose variances can be learnt."""

    trained_likelihood: Likelihood
    learnt_variance: LearntVariance | None
    mean: Tensor

    def sample(
        self, n_samples: int = 100, generator: torch.Generator | None = None
    ) -> Tensor: ...

    @property
    def likelihood(self) -> str: ...

    @property
    def prior_precision(self) -> Tensor: ...

    @property
    def sigma_noise(self) -> Tensor: ...

    @property
    def curvature_scale(self) -> Tensor: ...


@exclusive
@torch.inference_mode(False)
@torch.no_grad()
@together()
def amortize(
    la: Amortizable,
    loader: DataLoader | Iterable[Any],
    unlabelled: str | DataLoader | Iterable[Any] | None = _SWAPPED,
    progress_bar: bool = False,
    generator: torch.Generator | None = None,
) -> LearntVariance:
    """Learn the variances of the logits, so that predictions take one forward pass.

    Parameters, result and errors are those of `LoRALaplace.amortize`.
    """
    if la.predicted_likelihood is not la.trained_likelihood:
        raise ValueError(
            f"amortize is for classification and regression, not {la.likelihood}."
        )
    if isinstance(unlabelled, str) and unlabelled != _SWAPPED:
        raise ValueError(
            f'unlabelled must be "swapped", data or None, not {unlabelled!r}.'
        )
    la.check_model()
    generator = generator or torch.Generator()
    # Weights are drawn where the model is, by a generator of that place.
    draws = torch.Generator(la.model.device)
    draws.manual_seed(generator.initial_seed())
    swapped = None
    if unlabelled == _SWAPPED:
        swapped = _swapping(la, loader, generator)

    def versions(batch: Any) -> Columns:
        """Learn from K versions of each example: features and log-variances."""
        pairs = [_learnt_from(la, batch, draws)]
        text = la.model.text(batch)
        if swapped is not None and text is not None:
            pairs.append(_learnt_from(la, swapped(text), draws))
        features, logs = zip(*pairs, strict=True)
        return torch.stack(features, dim=1), torch.stack(logs, dim=1)

    features, logs = over_loader(
        loader, versions, "[Variances]", progress_bar, owners=la.model.owners
    )
    # All examples, then all their copies.
    features = features.transpose(0, 1).flatten(0, 1)
    logs = logs.transpose(0, 1).flatten(0, 1)
    if unlabelled is not None and not isinstance(unlabelled, str):
        more_features, more_logs = over_loader(
            unlabelled,
            lambda batch: _learnt_from(la, batch, draws),
            "[Variances, unlabelled]",
            progress_bar,
            owners=la.model.owners,
        )
        features = torch.cat([features, more_features])
        logs = torch.cat([logs, more_logs])
    learnt = LearntVariance.of(
        features,
        logs,
        prior_precision=la.prior_precision,
        curvature_scale=la.curvature_scale,
        noise=_NOISE_OF_DRAWS if _draws(la) else 0.0,
    )
    la.learnt_variance = learnt.to(la.model.device, la.blocks[0].statistics_dtype)
    return la.learnt_variance


def _swapping(
    la: Amortizable,
    loader: Iterable[Any],
    generator: torch.Generator,
) -> Swapping | None:
    """Read a loader for tokens to swap; None where it holds no texts."""
    texts: list[Any] = []
    for _, batch in named_batches(loader):
        text = la.model.text(batch)
        if text is not None:
            texts.append(text)
    if not texts:
        return None
    return Swapping(texts, la.model.transformer, generator)


def _learnt_from(
    la: Amortizable,
    batch: Any,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Compute features `(B, p)` and logarithms of variances `(B, P)`, on the CPU.

    They are exact, or from draws and right on average.
    """
    inputs = la.model.inputs(batch)
    _, features = _features(la, inputs)
    if not _draws(la):
        _, f_var = predictive_moments(la, inputs)
        logs = log_variances(f_var.detach())
        return features.cpu(), logs.cpu()
    drawn = la.sample(_DRAWS, generator)
    changes = changes_of_logits(la, inputs, drawn)
    f_var = torch.einsum("sbj,sbk->bjk", changes, changes) / _DRAWS
    logs = log_variances(f_var) - _BIAS_OF_DRAWS
    return features.cpu(), logs.cpu()


def _draws(la: Amortizable) -> bool:
    """Tell whether to learn from draws of the weights, rather than exact variances.

    They take two forward passes a draw, where exact ones take a backward pass an
    output, and need weights that can be replaced.
    """
    return la.n_outputs > 2 * _DRAWS and are_in_place(la.blocks)


def changes_of_logits(
    la: Amortizable,
    inputs: Any,
    drawn: Tensor,
) -> Tensor:
    """Compute how drawn weights `(S, parameters)` change the linearised model's logits.

    They are J (θ - θ*), `(S, B, C)`: central differences, by two forward passes a draw.
    The step is the one that rounding and curvature leave the smallest error with, the
    cube root of the precision of the model's numbers.
    """
    step = _precision(la.model) ** (1 / 3)

    def logits_at(weights: Tensor) -> Tensor:
        values = as_values(la.blocks, weights)
        with la.model.forward_passes():
            return called_with(la.model, la.blocks, values, inputs)

    changes: list[Tensor] = []
    for each in drawn:
        change = step * (each - la.mean)
        difference = logits_at(la.mean + change) - logits_at(la.mean - change)
        changes.append(difference / (2 * step))
    return torch.stack(changes)


def _precision(model: LogitsModel) -> float:
    """Find the precision of the coarsest numbers that a model computes with."""
    dtypes = set()
    for parameter in model.parameters():
        is_quantised = (
            not parameter.is_floating_point() or parameter.dtype.itemsize == 1
        )
        dtypes.add(torch.bfloat16 if is_quantised else parameter.dtype)
    # What autocast computes in, if it is on, shows in a product alone.
    one = torch.ones(
        1,
        1,
        device=model.device,
        dtype=torch.float32,
    )
    of_product = (one @ one).dtype
    if of_product != torch.float32:
        dtypes.add(of_product)
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def amortized_moments(la: Amortizable, x: Any) -> Moments:
    """Predict mean and learnt covariance of a batch's logits, by one forward pass.

    A `ValueError` if nothing was learnt, or the fit or the prior precision has changed
    since.
    """
    if isinstance(x, AnyMoments):
        raise ValueError(
            'Moments hold no inputs: pass a batch for pred_type="amortized".'
        )
    la.check_model()
    learnt = la.learnt_variance
    if learnt is None:
        raise ValueError(
            "No variance is learnt for this fit: call la.amortize(loader) first."
        )
    if not learnt.is_of(la.prior_precision, la.curvature_scale):
        raise ValueError(
            "The prior has changed since la.amortize(loader): call it again."
        )
    with la.model.forward_passes(la.enable_backprop):
        f_mu, features = _features(la, x)
        with torch.autocast(la.model.device.type, enabled=False):
            return Moments(f_mu, learnt.covariance(features))


def _features(
    la: Amortizable,
    inputs: Any,
) -> tuple[Tensor, Tensor]:
    """Compute logits `(B, C)`, and features `(B, p)` to learn variances from."""
    with la.model.running():
        logits, hidden = logits_and_hidden_states(la.model, inputs)
    likelihood = la.predicted_likelihood
    features = logits
    if not likelihood.is_gaussian:
        features = likelihood.class_logits(logits).log_softmax(-1).flatten(1)
    if hidden is not None:
        features = torch.cat([hidden, features], dim=-1)
    return logits, features.to(la.blocks[0].statistics_dtype)

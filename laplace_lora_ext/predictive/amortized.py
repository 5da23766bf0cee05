"""Variances of logits that are learnt, to predict at the price of one forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import pad
from torch.utils.data import DataLoader

from laplace_lora_ext.models.batches import named_batches
from laplace_lora_ext.models.locks import exclusive
from laplace_lora_ext.models.logits_model import logits_and_hidden_states
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.models.swapping import Swapping
from laplace_lora_ext.predictive.data_sets import Columns, over_loader
from laplace_lora_ext.predictive.distributions import predictive_distribution
from laplace_lora_ext.predictive.moments import Moments
from laplace_lora_ext.processes.exchange import together

PENALTIES = torch.logspace(-10, 1, 23, dtype=torch.float64)
"""Penalties to choose from, in units of the largest squared singular value of the features."""

_MARGIN = math.log(2)
_ROUNDING = 1e-6  # ten times that of single precision
_COMPONENTS = 64  # all there are up to ten classes
_OF_POSTERIOR = {"prior_precision", "curvature_scale"}
_SWAPPED = "swapped"


@dataclass(frozen=True, eq=False, repr=False)
class LearntVariance:
    """Variances of a posterior's logits as a function of features x `(B, p)`, one forward pass's.

    Beside the C logits stands a last number f_0, which is always 0. For each two of them

        log Var(f_j - f_k) = b_jk + ((x - mean) / scale) W c_jk

    by ridge regression, at most a factor of 2 beyond the variances that it has learnt from. From
    these differences follows the covariance of the logits.

    Attributes
    ----------
    mean, scale : torch.Tensor
        `(p,)` mean and standard deviation of the features
    weights : torch.Tensor
        `(p, q)`, W
    components : torch.Tensor
        `(q, P)`, the c: the at most 64 leading principal components of the P = C (C + 1) / 2 pairs
    offset, lowest, highest : torch.Tensor
        `(P,)` mean logarithm of each variance (b), and the lowest and the highest of those learnt
    prior_precision, curvature_scale : torch.Tensor
        of the posterior whose variances these are
    r_squared : float
        share of the variance of the logarithms that is explained when each example is left out
    mean_error : float
        mean absolute error of the logarithms when each example is left out
    n_examples : int
        learnt from, swapped and unlabelled ones included
    """

    mean: torch.Tensor
    scale: torch.Tensor
    weights: torch.Tensor
    components: torch.Tensor
    offset: torch.Tensor
    lowest: torch.Tensor
    highest: torch.Tensor
    prior_precision: torch.Tensor
    curvature_scale: torch.Tensor
    r_squared: float
    mean_error: float
    n_examples: int

    def __repr__(self) -> str:
        return f"LearntVariance(r_squared={self.r_squared:.3f}, n_examples={self.n_examples})"

    @classmethod
    def of(
        cls,
        features: torch.Tensor,
        log_variances: torch.Tensor,
        prior_precision: torch.Tensor,
        curvature_scale: torch.Tensor,
    ) -> LearntVariance:
        """Learn from N examples: features `(N, p)`, and what `log_variances` made, `(N, P)`.

        All is computed in float64, and kept on the CPU.
        """
        X, Y = features.cpu().double(), log_variances.cpu().double()
        if len(X) < 3:
            raise ValueError(f"Variances can't be learnt from {len(X)} examples: give more.")
        mean, scale, offset = X.mean(0), X.std(0, correction=0), Y.mean(0)
        # What does not vary says nothing, and rounding makes no feature.
        varies = scale > 1e-6 * X.abs().amax(0)
        scale = torch.where(varies, scale, torch.inf)
        U, s, components = torch.linalg.svd(Y - offset, full_matrices=False)
        scores = (U * s)[:, :_COMPONENTS]
        components = components[:_COMPONENTS]
        weights, residuals = ridge((X - mean) / scale, scores)
        errors = Y - offset - (scores - residuals) @ components
        total = (Y - offset).square().sum()
        return cls(
            *(mean, scale, weights, components, offset, Y.amin(0), Y.amax(0)),
            *(prior_precision.detach().cpu().clone(), curvature_scale.detach().cpu().clone()),
            1 - (errors.square().sum() / total.clamp_min(torch.finfo(X.dtype).tiny)).item(),
            errors.abs().mean().item(),
            len(X),
        )

    def to(self, device: torch.device, dtype: torch.dtype) -> LearntVariance:
        """The same elsewhere or in another precision."""
        tensors = {k: v for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        kept = {k: v.to(device, dtype) for k, v in tensors.items() if k not in _OF_POSTERIOR}
        return replace(self, **kept)

    def is_of(self, prior_precision: torch.Tensor, curvature_scale: torch.Tensor) -> bool:
        """Whether these are the variances of a posterior with this prior and scale."""
        return _alike(prior_precision, self.prior_precision) and _alike(
            curvature_scale, self.curvature_scale
        )

    def covariance(self, features: torch.Tensor) -> torch.Tensor:
        """Covariances `(B, C, C)` for features `(B, p)`.

        The variances of logits and of their differences are those learnt; as they need not fit
        together, the matrices may have negative eigenvalues.
        """
        scores = ((features - self.mean) / self.scale) @ self.weights
        logs = self.offset + scores @ self.components
        return covariances(logs.clamp(self.lowest - _MARGIN, self.highest + _MARGIN).exp())


def _alike(now: torch.Tensor, then: torch.Tensor) -> bool:
    """Whether numbers are the same, but for a model's move into another precision and place."""
    now, then = now.detach().cpu().double(), then.cpu().double()
    return now.shape == then.shape and torch.allclose(now, then, rtol=_ROUNDING, atol=0.0)


def ridge(X: torch.Tensor, Y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Regress centred targets `(N, q)` on centred features `(N, p)`, by the best of `PENALTIES`.

    Returns the weights `(p, q)`, and the errors `(N, q)` of examples that are left out. The penalty
    minimises the mean of their squares. With `X = U diag(s) Vᵀ` these errors follow from one fit:
    `(y_n - ŷ_n) / (1 - h_n)`, where
    `h_n = 1/N + Σ_k U_nk² s_k² / (s_k² + penalty)` is the leverage with a free intercept.
    """
    U, s, Vt = torch.linalg.svd(X, full_matrices=False)
    kept = s > s[:1] * max(X.shape) * torch.finfo(s.dtype).eps
    U, s, Vt = U[:, kept], s[kept], Vt[kept]
    along, squares = U.mT @ Y, s.square()
    across = Y - U @ along
    free = 1 - 1 / len(X) - U.square().sum(1)  # 1 - h without a penalty

    def errors(penalty: torch.Tensor) -> torch.Tensor:
        left = penalty / (squares + penalty)
        return (across + U @ (left[:, None] * along)) / (free + U.square() @ left)[:, None]

    penalties = PENALTIES * (squares[0] if len(squares) else 1)
    best = min(penalties, key=lambda penalty: errors(penalty).square().mean().item())
    return Vt.mT @ ((s / (squares + best))[:, None] * along), errors(best)


def log_variances(f_var: torch.Tensor) -> torch.Tensor:
    """Logarithms of the variances of C logits and of all their differences, `(B, P)`.

    These are the differences of C + 1 numbers, the first of which is 0. Of covariances
    `(B, C, C)`; a variance of 0 counts as the smallest that rounding leaves beside the others.
    """
    V = pad(f_var, (1, 0, 1, 0))
    own = V.diagonal(dim1=-2, dim2=-1)
    j, k = torch.triu_indices(*V.shape[-2:], offset=1, device=V.device)
    variances = own[..., j] + own[..., k] - 2 * V[..., j, k]
    precision = torch.finfo(V.dtype)
    least = (precision.eps * own.amax(-1, keepdim=True)).clamp_min(precision.tiny)
    return variances.maximum(least).log()


def covariances(variances: torch.Tensor) -> torch.Tensor:
    """Covariances `(B, C, C)` from variances `(B, P)` in the order of `log_variances`.

    With D_j0 = Var(f_j) and D_jk = Var(f_j - f_k): `V_jk = (D_j0 + D_k0 - D_jk) / 2`.
    """
    n_numbers = (1 + math.isqrt(1 + 8 * variances.shape[-1])) // 2
    j, k = torch.triu_indices(n_numbers, n_numbers, offset=1, device=variances.device)
    D = variances.new_zeros(*variances.shape[:-1], n_numbers, n_numbers)
    D[..., j, k] = D[..., k, j] = variances
    own = D[..., 0, 1:]
    return (own[..., :, None] + own[..., None, :] - D[..., 1:, 1:]) / 2


@exclusive
@torch.inference_mode(False)
@torch.no_grad()
@together()
def amortize(
    la: Posterior,
    loader: DataLoader | Iterable[Any],
    unlabelled: str | DataLoader | Iterable[Any] | None = _SWAPPED,
    progress_bar: bool = False,
    generator: torch.Generator | None = None,
) -> LearntVariance:
    """Learn the variances of the logits, so that predictions take one forward pass.

    A ridge regression finds the logarithms of the variances, at the present prior precision, in
    what the output layer reads and in the log-probabilities (outputs, where they are numbers). No
    label goes in. With `pred_type="amortized"`, `la(batch)`, `la.predict(...)` and
    `la.predict_proba(...)` then use these variances, with every link. They are saved with the
    posterior, and refused when its fit or its prior precision changes.

    Parameters
    ----------
    loader : DataLoader or iterable
        training data, with or without labels; read twice
    unlabelled : "swapped", DataLoader, iterable or None, default="swapped"
        more examples, such as predictions will meet. "swapped" adds a copy of each text in which 30
        % of the tokens are those of other texts; to images and sounds it adds nothing
    progress_bar : bool, default=False
    generator : torch.Generator, optional
        of the CPU, for swapped tokens; by default the same in every call

    Returns
    -------
    LearntVariance
        with `r_squared` and `mean_error`, which say how good it is; also in `la.learnt_variance`

    Raises
    ------
    ValueError
        If there are fewer than three examples, or the likelihood is "reward_modeling".
    """
    if la.predicted_likelihood is not la.trained_likelihood:
        raise ValueError(f"amortize is for classification and regression, not {la.likelihood}.")
    la.check_model()
    texts = []
    if unlabelled == _SWAPPED:
        batches = (la.model.text(batch) for _, batch in named_batches(loader))
        texts = [text for text in batches if text is not None]
    generator = generator or torch.Generator()
    swapped = Swapping(texts, la.model.transformer, generator) if texts else None

    def learnt_from(batch: Any) -> Columns:
        inputs = la.model.inputs(batch)
        f_var = predictive_distribution(la, inputs)[1].detach()
        return _features(la, inputs)[1].cpu(), log_variances(f_var).cpu()

    def with_copy(batch: Any) -> Columns:
        text = la.model.text(batch)
        if swapped is None or text is None:
            return learnt_from(batch)
        return *learnt_from(batch), *learnt_from(swapped(text))

    columns = over_loader(loader, with_copy, "[Variances]", progress_bar)
    if unlabelled not in (None, _SWAPPED):
        more: Any = unlabelled
        columns += over_loader(more, learnt_from, "[Variances, unlabelled]", progress_bar)
    features, logs = torch.cat(columns[::2]), torch.cat(columns[1::2])
    learnt = LearntVariance.of(features, logs, la.prior_precision, la.curvature_scale)
    la.learnt_variance = learnt.to(la.model.device, la.blocks[0].statistics_dtype)
    return la.learnt_variance


def amortized_moments(la: Posterior, x: Any) -> Moments:
    """Mean and learnt covariance of a batch's logits, from one forward pass.

    A `ValueError` if nothing was learnt, or the fit or the prior precision has changed since.
    """
    if isinstance(x, Moments):
        raise ValueError('Moments hold no inputs: pass a batch for pred_type="amortized".')
    la.check_model()
    learnt = la.learnt_variance
    if learnt is None:
        raise ValueError("No variance is learnt for this fit: call la.amortize(loader) first.")
    if not learnt.is_of(la.prior_precision, la.curvature_scale):
        raise ValueError("The prior has changed since la.amortize(loader): call it again.")
    with torch.set_grad_enabled(la.enable_backprop):
        f_mu, features = _features(la, x)
        with torch.autocast(la.model.device.type, enabled=False):
            return Moments(f_mu, learnt.covariance(features))


def _features(la: Posterior, inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `(B, C)`, and features `(B, p)` that their variances are learnt from."""
    with la.model.prepared():
        logits, hidden = logits_and_hidden_states(la.model, inputs)
    outputs = logits if la.predicted_likelihood.is_gaussian else logits.log_softmax(-1)
    features = outputs if hidden is None else torch.cat([hidden, outputs], dim=-1)
    return logits, features.to(la.blocks[0].statistics_dtype)

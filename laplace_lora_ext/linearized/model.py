"""The model that is linear in the LoRA weights: its mode, evidence and cross-validation."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from laplace_lora_ext.likelihoods import LIKELIHOODS, Seeds
from laplace_lora_ext.predictive.moments import Moments

_MOST_ITERATIONS = 1000  # of L-BFGS for a mode
_CURVATURE_PAIRS = 20  # that L-BFGS remembers
_CHUNK = 128  # examples whose features are in double precision at once


class EvidenceAtMode(NamedTuple):
    """What a prior precision comes to in a linearised model.

    Attributes
    ----------
    log_marginal_likelihood : float
        in nats
    effective_dimension : torch.Tensor
        `(blocks,)`, float64: how many directions of each block the data determine, γ
    scatter : torch.Tensor
        `(blocks,)`, float64: squared distance of the mode from the prior mean, `‖u‖²`
    error : float
        bound on what the log marginal likelihood lacks because the mode is not exact, in nats
    """

    log_marginal_likelihood: float
    effective_dimension: torch.Tensor
    scatter: torch.Tensor
    error: float


class LinearizedModel:
    """Logits of a training set, linear in features of the LoRA weights: `f = offset + Φ u`.

    With Φ the Jacobians at the trained weights θ*, u is the weights' distance from the prior mean
    θ₀, and the offset is `f(θ*) - Φ (θ* - θ₀)`. With Φ a random sketch of the Jacobians whose inner
    products have the right expectation, u has fewer coordinates and the same prior `N(0, I / λ)`.

    Training rarely ends in a mode of the posterior: it knows no prior, and stops early or goes on
    until the loss is near 0. An evidence taken there charges the prior for all that the weights
    have moved, and favours small prior precisions. The linearised model is convex, and has a mode
    for each prior precision, at which the loss and the distance are taken instead. The evidence
    keeps the curvature at the trained weights, cross-validation takes that at the mode.

    Parameters
    ----------
    f_mu : torch.Tensor
        `(N, C)` logits at the trained weights
    features : torch.Tensor
        `(N, C, F)`, Φ
    feature_block : torch.Tensor
        `(F,)`, index of the block that each feature belongs to
    offset : torch.Tensor
        `(N, C)` logits at the prior mean
    targets : torch.Tensor
        `(N,)` labels or `(N, C)` numbers
    likelihood : {"classification", "regression"}

    Attributes
    ----------
    n_blocks : int
    targets : torch.Tensor
    loss : float
        of the training set at the trained weights

    References
    ----------
    Antorán et al., "Adapting the linearised Laplace model evidence for modern deep learning",
    ICML 2022, for the evidence.
    Vehtari et al., "Bayesian leave-one-out cross-validation approximations for Gaussian latent
    variable models", JMLR 17 (2016), for cross-validation (Laplace-LOO).
    """

    def __init__(
        self,
        f_mu: torch.Tensor,
        features: torch.Tensor,
        feature_block: torch.Tensor,
        offset: torch.Tensor,
        targets: torch.Tensor,
        likelihood: str,
    ) -> None:
        self.n_blocks = int(feature_block.max()) + 1
        self._features = features
        self._block = feature_block
        self._offset = offset
        self.targets = targets
        self._likelihood = LIKELIHOODS[likelihood]
        self.loss = self._likelihood.loss(f_mu, targets).item()
        self._root = self._curvature_root(self._likelihood.exact_seeds(f_mu))
        self._start = features.new_zeros(features.shape[-1])

    def __len__(self) -> int:
        return len(self.targets)

    def evidence(
        self, prior_precision: torch.Tensor, scale: float = 1.0, constant: float = 0.0
    ) -> EvidenceAtMode:
        """Find the mode under a prior precision, and take the evidence there.

        Parameters
        ----------
        prior_precision : torch.Tensor
            λ, `(1,)` or `(blocks,)`
        scale : float, default=1.0
            what loss and curvature are multiplied with: 1 / (sigma_noise² temperature)
        constant : float, default=0.0
            what the log-likelihood has beside the loss: regression's normalisation
        """
        by_feature = self._by_feature(prior_precision)
        mode, loss, error = self._mode(by_feature, scale)
        rows = self._root * (scale / by_feature).sqrt()
        cholesky = _cholesky_with_identity(rows)
        determined = torch.linalg.solve_triangular(cholesky, rows, upper=False).square().sum(0)
        squares = mode.double().square()
        penalty = by_feature @ squares / 2 + cholesky.diagonal().log().sum()
        evidence = constant - scale * loss - penalty
        return EvidenceAtMode(
            evidence.item(), self._by_block(determined), self._by_block(squares), error
        )

    def check_training_data(self, n_data: int, loss: float) -> None:
        """Refuse a posterior whose data are others in number or loss."""
        # The same texts in other batches differ a little, in half precision above all.
        if len(self) == n_data and abs(self.loss - loss) <= 0.1 * (self.loss + loss):
            return
        raise ValueError(
            f"The posterior was fitted on {n_data} examples with a loss of {loss:.4g}; these "
            f"are {len(self)} with {self.loss:.4g}: pass the training data of this fit."
        )

    def leave_one_out(self, prior_precision: torch.Tensor, scale: float = 1.0) -> Moments:
        """Gaussian logits of each example under the posterior of all the others.

        The posterior at the mode is Gaussian, and so is what an example's likelihood contributes to
        it: a factor of precision H and slope g in its logits, divided out of their covariance V and
        mean f. What remains, the cavity, has

            V₋ = V (I - H V)⁻¹,    f₋ = f + V₋ g

        with g the gradient of the example's loss. Exact in regression.

        Parameters
        ----------
        prior_precision : torch.Tensor
            λ, `(1,)` or `(blocks,)`
        scale : float, default=1.0
            what loss and curvature are multiplied with: 1 / (sigma_noise² temperature)

        Returns
        -------
        Moments
            `(N, C)` and `(N, C, C)`, in float64
        """
        by_feature = self._by_feature(prior_precision)
        f_mu = self._logits(self._mode(by_feature, scale)[0])
        seeds = self._likelihood.exact_seeds(f_mu.double())
        rows = self._curvature_root(seeds) * (scale / by_feature).sqrt()
        cholesky = _cholesky_with_identity(rows)
        columns = seeds.dense()
        curvature = scale * torch.einsum("sbc,sbd->bcd", columns, columns)
        slope = scale * self._likelihood.slope(f_mu.double(), self.targets)
        parts = []
        for features, H in zip(self._features.split(_CHUNK), curvature.split(_CHUNK), strict=True):
            whitened = features.double() / by_feature.sqrt()
            solved = rows @ whitened.flatten(0, 1).mT
            solved = torch.linalg.solve_triangular(cholesky, solved, upper=False)
            explained = solved.mT.unflatten(0, whitened.shape[:2])
            variance = whitened @ whitened.mT - explained @ explained.mT
            identity = torch.eye(variance.shape[-1]).to(variance)
            cavity = torch.linalg.solve(identity - variance @ H, variance)
            parts.append((cavity + cavity.mT) / 2)
        f_var = torch.cat(parts)
        return Moments(f_mu.double() + (f_var @ slope[..., None]).squeeze(-1), f_var)

    @torch.enable_grad()
    def _mode(
        self, precision: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        """The most probable u, its loss, and a bound on the log-density that it lacks."""
        # In v = √λ u the prior is a standard normal, and the log-density is concave by 1 at least:
        # where its gradient is g, it is within ‖g‖² / 2 of its maximum.
        deviation = precision.rsqrt().to(self._features)
        v = (self._start / deviation).requires_grad_()
        optimizer = torch.optim.LBFGS(
            [v],
            max_iter=_MOST_ITERATIONS,
            max_eval=2 * _MOST_ITERATIONS,
            history_size=_CURVATURE_PAIRS,
            tolerance_grad=1e-2 / math.sqrt(len(v)),
            tolerance_change=0,
            line_search_fn="strong_wolfe",
        )

        def objective() -> torch.Tensor:
            optimizer.zero_grad()
            value = scale * self._loss(v * deviation) + v.square().sum() / 2
            value.backward()
            return value

        optimizer.step(objective)
        objective()
        assert v.grad is not None
        error = v.grad.double().square().sum().item() / 2
        self._start = mode = (v * deviation).detach()  # nearby for the next prior precision
        return mode, self._loss(mode).double(), error

    def _curvature_root(self, seeds: Seeds) -> torch.Tensor:
        """R, `(rows, F)` in float64, with no more rows than features: `RᵀR = Φᵀ H Φ`."""
        vectors = seeds.dense().to(self._features)
        rows = torch.einsum("sbc,bcf->sbf", vectors, self._features).flatten(0, 1).double()
        return torch.linalg.qr(rows, mode="r").R if len(rows) > rows.shape[1] else rows

    def _logits(self, u: torch.Tensor) -> torch.Tensor:
        return self._offset + self._features @ u

    def _loss(self, u: torch.Tensor) -> torch.Tensor:
        return self._likelihood.loss(self._logits(u), self.targets)

    def _by_feature(self, prior_precision: torch.Tensor) -> torch.Tensor:
        return prior_precision.detach().double().expand(self.n_blocks)[self._block]

    def _by_block(self, values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(self.n_blocks).index_add(0, self._block, values)


def _cholesky_with_identity(rows: torch.Tensor) -> torch.Tensor:
    """Lower factor of `I + R Rᵀ`."""
    return torch.linalg.cholesky(torch.eye(len(rows)).to(rows) + rows @ rows.mT)

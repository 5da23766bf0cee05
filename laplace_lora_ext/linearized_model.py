"""The model that is linear in the LoRA weights, and its evidence at its own mode."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy

from laplace_lora_ext.curvature.fisher import exact_seeds

_MOST_ITERATIONS = 1000  # of L-BFGS for a mode
_CURVATURE_PAIRS = 20  # that L-BFGS remembers


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
    for each prior precision, at which the loss and the distance are taken instead. The curvature
    is that at the trained weights.

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
    loss : float
        of the training set at the trained weights

    References
    ----------
    Antorán et al., "Adapting the linearised Laplace model evidence for modern deep learning",
    ICML 2022.
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
        self._targets = targets
        self._likelihood = likelihood
        self.loss = self._loss(f_mu).item()
        vectors, weights = exact_seeds(f_mu, likelihood)
        rows = torch.einsum("sbc,bcf->sbf", vectors, features) * weights[..., None]
        # Its rows give the curvature: RᵀR = Φᵀ H Φ, with no more rows than features.
        self._root = torch.linalg.qr(rows.flatten(0, 1).double(), mode="r").R
        self._start = features.new_zeros(features.shape[-1])

    def __len__(self) -> int:
        return len(self._targets)

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
        by_feature = prior_precision.detach().double().expand(self.n_blocks)[self._block]
        mode, loss, error = self._mode(by_feature, scale)
        rows = self._root * (scale / by_feature).sqrt()
        identity = torch.eye(len(rows)).to(rows)
        cholesky = torch.linalg.cholesky(identity + rows @ rows.mT)
        determined = torch.linalg.solve_triangular(cholesky, rows, upper=False).square().sum(0)
        squares = mode.double().square()
        penalty = by_feature @ squares / 2 + cholesky.diagonal().log().sum()
        evidence = constant - scale * loss - penalty
        return EvidenceAtMode(
            evidence.item(), self._by_block(determined), self._by_block(squares), error
        )

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
            value = scale * self._loss(self._logits(v * deviation)) + v.square().sum() / 2
            value.backward()
            return value

        optimizer.step(objective)
        objective()
        assert v.grad is not None
        error = v.grad.double().square().sum().item() / 2
        self._start = mode = (v * deviation).detach()  # nearby for the next prior precision
        return mode, self._loss(self._logits(mode)).double(), error

    def _logits(self, u: torch.Tensor) -> torch.Tensor:
        return self._offset + self._features @ u

    def _loss(self, f: torch.Tensor) -> torch.Tensor:
        """Of the training set, as the posterior's fit counts it."""
        if self._likelihood == "regression":
            return (f - self._targets).square().sum() / 2
        return cross_entropy(f, self._targets, reduction="sum")

    def _by_block(self, values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(self.n_blocks).index_add(0, self._block, values)

"""The model that is linear in the LoRA weights: its mode, evidence and cross-validation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from laplace_lora_ext.likelihoods import LIKELIHOODS
from laplace_lora_ext.linearized.gram import Gram
from laplace_lora_ext.predictive.moments import Moments
from laplace_lora_ext.predictive.sampling import square_root
from laplace_lora_ext.predictive.statistics import from_triangle

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


class _Mode(NamedTuple):
    """Most probable logits and weights under a prior precision.

    Attributes
    ----------
    f_mu : torch.Tensor
        `(N, C)`
    coordinates : torch.Tensor
        `(F,)`, of the features' weights, standard normal under the prior
    own : torch.Tensor
        `(N C,)`, of what each example adds itself, likewise
    loss : torch.Tensor
    error : float
        bound on the log-density that the mode lacks
    """

    f_mu: torch.Tensor
    coordinates: torch.Tensor
    own: torch.Tensor
    loss: torch.Tensor
    error: float


class LinearizedModel:
    """Logits of a training set, linear in the LoRA weights: `f = offset + J u`.

    J are the Jacobians at the trained weights θ*, u is the weights' distance from the prior mean
    θ₀, and the offset is `f(θ*) - J (θ* - θ₀)`. Examples meet through the features Φ of their
    Jacobians, along a few directions of the weights. What an example has outside of these is taken
    to be its own: its inner products with itself are exact, those with other examples 0,

        J_n J_mᵀ ≈ Φ_n Φ_mᵀ + [n = m] R_n

    as in the FITC approximation of a Gaussian process. A low-rank posterior does the same, since
    the directions that its rank leaves out keep their prior.

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
    own : torch.Tensor, optional
        `(N, blocks, C (C + 1) / 2)`, upper triangles of R, of each block; 0 if omitted

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
    Snelson & Ghahramani, "Sparse Gaussian processes using pseudo-inputs", NeurIPS 2005, and
    Quiñonero-Candela & Rasmussen, JMLR 6 (2005), for FITC.
    """

    def __init__(
        self,
        f_mu: torch.Tensor,
        features: torch.Tensor,
        feature_block: torch.Tensor,
        offset: torch.Tensor,
        targets: torch.Tensor,
        likelihood: str,
        own: torch.Tensor | None = None,
    ) -> None:
        self.n_blocks = int(feature_block.max()) + 1
        self._f_mu = f_mu
        self._features = features
        self._block = feature_block
        self._offset = offset
        self.targets = targets
        self._likelihood = LIKELIHOODS[likelihood]
        n_pairs = f_mu.shape[1] * (f_mu.shape[1] + 1) // 2
        self._own = features.new_zeros(len(f_mu), self.n_blocks, n_pairs) if own is None else own
        self.loss = self._likelihood.loss(f_mu, targets).item()
        self._start = features.new_zeros(features.shape[-1]), torch.zeros_like(offset)

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
        by_block = self._by_block(prior_precision)
        own = self._own_covariance(by_block)
        mode = self._mode(by_block, own, scale)
        root, half_logdet = self._whitener(self._f_mu, own, scale)
        gram = self._gram(root, by_block)
        evidence = constant - scale * mode.loss - gram.half_logdet() - half_logdet
        evidence = evidence - (mode.coordinates.square().sum() + mode.own.square().sum()) / 2
        dimension = self._sum_by_block(gram.determined())
        scatter = self._sum_by_block(mode.coordinates.square()) / by_block
        # At the mode the prior's pull on what an example adds itself is the slope of its loss.
        slope = scale * self._likelihood.slope(mode.f_mu, self.targets)
        for part, whitened in self._whitened(root, by_block):
            identity = torch.eye(whitened.shape[1]).to(whitened)
            sensitivity = root[part].mT @ (identity - gram.quadratic(whitened)) @ root[part]
            own_blocks = from_triangle(self._own[part].double(), self._offset.shape[1])
            dimension += torch.einsum("ncd,nbcd->b", sensitivity, own_blocks) / by_block
            pull = torch.einsum("nc,nbcd,nd->b", slope[part], own_blocks, slope[part])
            scatter += pull / by_block.square()
        return EvidenceAtMode(evidence.item(), dimension, scatter, mode.error)

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
        by_block = self._by_block(prior_precision)
        own = self._own_covariance(by_block)
        f_mu = self._mode(by_block, own, scale).f_mu
        root, _ = self._whitener(f_mu, own, scale)
        gram = self._gram(root, by_block)
        identity = torch.eye(f_mu.shape[1]).to(f_mu)
        cavities = []
        for start in range(0, len(self), _CHUNK):
            part = slice(start, start + _CHUNK)
            # Of the features alone: an example's own part is left out with it, and adds its prior.
            V = gram.quadratic(self._scaled_features(part, by_block))
            cavity = torch.linalg.solve(identity - V @ (root[part].mT @ root[part]), V)
            cavities.append((cavity + cavity.mT) / 2 + own[part])
        f_var = torch.cat(cavities)
        slope = scale * self._likelihood.slope(f_mu, self.targets)
        return Moments(f_mu + (f_var @ slope[..., None]).squeeze(-1), f_var)

    @torch.enable_grad()
    def _mode(self, by_block: torch.Tensor, own: torch.Tensor, scale: float) -> _Mode:
        """The most probable u."""
        # In coordinates that are standard normal under the prior, the log-density is concave by 1
        # at least: where its gradient is g, it is within ‖g‖² / 2 of its maximum.
        deviation = by_block[self._block].rsqrt().to(self._features)
        own_root = square_root(own).to(self._features)
        u, e = self._start
        x = torch.cat([u / deviation, e.flatten()]).requires_grad_()
        optimizer = torch.optim.LBFGS(
            [x],
            max_iter=_MOST_ITERATIONS,
            max_eval=2 * _MOST_ITERATIONS,
            history_size=_CURVATURE_PAIRS,
            tolerance_grad=1e-2 / math.sqrt(len(x)),
            tolerance_change=0,
            line_search_fn="strong_wolfe",
        )

        def logits() -> torch.Tensor:
            v, e = x[: len(deviation)], x[len(deviation) :].view_as(self._offset)
            return (
                self._offset + self._features @ (v * deviation) + (own_root @ e[..., None])[..., 0]
            )

        def objective() -> torch.Tensor:
            optimizer.zero_grad()
            loss = self._likelihood.loss(logits(), self.targets)
            value = scale * loss + x.square().sum() / 2
            value.backward()
            return value

        optimizer.step(objective)
        objective()
        assert x.grad is not None
        error = x.grad.double().square().sum().item() / 2
        v, e = x.detach().split([len(deviation), self._offset.numel()])
        self._start = v * deviation, e.view_as(self._offset)  # near the next mode
        f_mu = logits().detach().double()
        loss = self._likelihood.loss(f_mu, self.targets)
        return _Mode(f_mu, v.double(), e.double(), loss, error)

    def _whitener(
        self, f_mu: torch.Tensor, own: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Roots A `(N, S, C)` of what the logits' own parts leave of the curvature, `AᵀA`.

        With the curvature `H = R Rᵀ` and the own covariance D that is `R (I + Rᵀ D R)⁻¹ Rᵀ`. Also
        half of the log-determinants of `I + Rᵀ D R`, summed.
        """
        R = scale**0.5 * self._likelihood.exact_seeds(f_mu.double()).dense().permute(1, 2, 0)
        cholesky = torch.linalg.cholesky(torch.eye(R.shape[2]).to(R) + R.mT @ own @ R)
        root = torch.linalg.solve_triangular(cholesky, R.mT, upper=False)
        return root, cholesky.diagonal(dim1=1, dim2=2).log().sum()

    def _gram(self, root: torch.Tensor, by_block: torch.Tensor) -> Gram:
        """Precision of the features' weights, in coordinates that have prior precision 1."""
        n_rows, n_features = root.shape[0] * root.shape[1], len(self._block)

        def parts() -> Iterator[torch.Tensor]:
            return (whitened.flatten(0, 1) for _, whitened in self._whitened(root, by_block))

        return Gram(parts, n_rows, n_features)

    def _whitened(
        self, root: torch.Tensor, by_block: torch.Tensor
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """`A Φ / √λ` of some examples at a time, `(b, S, F)`."""
        for start in range(0, len(self), _CHUNK):
            part = slice(start, start + _CHUNK)
            yield part, root[part] @ self._scaled_features(part, by_block)

    def _scaled_features(self, part: slice, by_block: torch.Tensor) -> torch.Tensor:
        return self._features[part].double() * by_block[self._block].rsqrt()

    def _own_covariance(self, by_block: torch.Tensor) -> torch.Tensor:
        """`Σ R / λ` over the blocks, `(N, C, C)`."""
        triangles = torch.einsum("nbt,b->nt", self._own.double(), by_block.reciprocal())
        return from_triangle(triangles, self._offset.shape[1])

    def _by_block(self, prior_precision: torch.Tensor) -> torch.Tensor:
        return prior_precision.detach().double().cpu().expand(self.n_blocks)

    def _sum_by_block(self, values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(self.n_blocks).index_add(0, self._block, values)

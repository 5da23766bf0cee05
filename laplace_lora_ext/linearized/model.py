"""The model that is linear in the LoRA weights: its mode, evidence and cross-validation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from laplace_lora_ext.likelihoods import LIKELIHOODS
from laplace_lora_ext.linearized.features import Features
from laplace_lora_ext.linearized.mode import ModeFinder, whitener
from laplace_lora_ext.linearized.storage import Stored
from laplace_lora_ext.models.default_device import as_tensor
from laplace_lora_ext.predictive.moments import Moments
from laplace_lora_ext.predictive.statistics import from_triangle


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
    prior_mean : float or torch.Tensor, default=0.0
        θ₀, a number for all weights or `(parameters,)`

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
        features: Stored,
        feature_block: torch.Tensor,
        offset: torch.Tensor,
        targets: torch.Tensor,
        likelihood: str,
        own: Stored | None = None,
        prior_mean: float | torch.Tensor = 0.0,
    ) -> None:
        self.n_blocks = int(feature_block.max()) + 1
        self._f_mu = f_mu
        self._features = Features(features)
        self._block = feature_block
        self._n_outputs = f_mu.shape[1]
        self.targets = targets
        self._likelihood = LIKELIHOODS[likelihood]
        n_pairs = self._n_outputs * (self._n_outputs + 1) // 2
        none = torch.zeros(self.n_blocks, n_pairs).expand(len(f_mu), -1, -1)
        self._own = none if own is None else own
        self.loss = self._likelihood.loss(f_mu, targets).item()
        self._prior_mean = as_tensor(prior_mean).detach().cpu().double()
        self._mode = ModeFinder(self._features, offset.double(), targets, self._likelihood)

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
        by_block, deviation, own = self._prior(prior_precision)
        whitened = self._whitened(self._f_mu, own, scale)
        gram = self._features.gram(lambda part: whitened(part)[0])
        self._mode.precondition(gram)
        precision = gram.precision(deviation)
        mode = self._mode(deviation, own, scale)
        evidence = constant - scale * mode.loss - mode.energy - precision.half_logdet()
        dimension = self._sum_by_block(precision.determined())
        scatter = self._sum_by_block(mode.coordinates.square()) / by_block
        # At the mode the prior's pull on what an example adds itself is the slope of its loss.
        slope = scale * self._likelihood.slope(mode.f_mu, self.targets)
        for part, features in self._features.parts():
            root, half_logdet = whitened(part)
            evidence -= half_logdet
            rows = (root.to(features) @ features).double() * deviation
            left = torch.eye(rows.shape[1]).to(rows) - precision.quadratic(rows)
            sensitivity = root.mT @ left @ root
            own_blocks = from_triangle(self._own[part].double(), self._n_outputs)
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

    def check_prior_mean(self, prior_mean: float | torch.Tensor) -> None:
        """Refuse another prior mean than that of the offset."""
        if (as_tensor(prior_mean).detach().cpu().double() - self._prior_mean).any():
            raise ValueError(
                "The linearised model was made with another prior_mean: call linearize again."
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
        _, deviation, own = self._prior(prior_precision)
        f_mu = self._mode(deviation, own, scale).f_mu
        whitened = self._whitened(f_mu, own, scale)
        gram = self._features.gram(lambda part: whitened(part)[0])
        self._mode.precondition(gram)
        precision = gram.precision(deviation)
        identity = torch.eye(f_mu.shape[1]).to(f_mu)
        f_var = torch.empty_like(own)
        for part, features in self._features.parts():
            # Of the features alone: an example's own part is left out with it, and adds its prior.
            V = precision.quadratic(features.double() * deviation)
            root, _ = whitened(part)
            cavity = torch.linalg.solve(identity - V @ root.mT @ root, V)
            f_var[part] = (cavity + cavity.mT) / 2 + own[part]
        slope = scale * self._likelihood.slope(f_mu, self.targets)
        return Moments(f_mu + (f_var @ slope[..., None]).squeeze(-1), f_var)

    def _prior(
        self, prior_precision: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """λ of each block, deviations `(F,)` of the features' weights, own covariance `Σ R / λ`."""
        by_block = prior_precision.detach().double().cpu().expand(self.n_blocks)
        weights = by_block.reciprocal()
        own = torch.empty(len(self), self._n_outputs, self._n_outputs, dtype=torch.float64)
        for part in self._features.some_at_a_time():
            sums = torch.einsum("nbt,b->nt", self._own[part].double(), weights)
            own[part] = from_triangle(sums, self._n_outputs)
        return by_block, by_block[self._block].rsqrt(), own

    def _whitened(
        self, f_mu: torch.Tensor, own: torch.Tensor, scale: float
    ) -> Callable[[slice], tuple[torch.Tensor, torch.Tensor]]:
        """`whitener` of some examples: made again where needed, for all together are large."""
        return lambda part: whitener(self._likelihood, f_mu[part], own[part], scale)

    def _sum_by_block(self, values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(self.n_blocks).index_add(0, self._block, values)

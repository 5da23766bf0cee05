"""Most probable logits of the linearised model, one prior precision after the other."""

from __future__ import annotations

from typing import NamedTuple

import torch

from laplace_lora_ext.likelihoods import Likelihood
from laplace_lora_ext.linearized.features import Features
from laplace_lora_ext.linearized.gram import Gram

_MOST_STEPS = 100
_SUFFICIENT_GAIN = 1e-7  # nats that a Newton step is expected to gain, after which no other follows
_MOST_PRODUCTS = 30  # of conjugate gradients: about as long as a new factorisation takes
_RESIDUAL = 1e-2  # of conjugate gradients, relative
_SMALLEST_STEP = 1e-6
_ARMIJO = 1e-4  # share of the expected gain that a step must have


class Mode(NamedTuple):
    """Most probable logits and weights under a prior precision.

    Attributes
    ----------
    f_mu : torch.Tensor
        `(N, C)`
    coordinates : torch.Tensor
        `(F,)`, of the features' weights, standard normal under the prior
    energy : torch.Tensor
        half of the squared distance from the prior mean, in units of the prior
    loss : torch.Tensor
    error : float
        bound on the log-density that the mode lacks
    """

    f_mu: torch.Tensor
    coordinates: torch.Tensor
    energy: torch.Tensor
    loss: torch.Tensor
    error: float


def whitener(
    likelihood: Likelihood, f_mu: torch.Tensor, own: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Roots A `(N, S, C)` of what the logits' own parts leave of the curvature, `B = AᵀA`.

    With the curvature `H = R Rᵀ` and the own covariance K that is `R (I + Rᵀ K R)⁻¹ Rᵀ`, or
    `(I + H K)⁻¹ H`. Also half of the log-determinants of `I + Rᵀ K R`, summed.
    """
    R = scale**0.5 * likelihood.exact_seeds(f_mu.double()).dense().permute(1, 2, 0)
    cholesky = torch.linalg.cholesky(torch.eye(R.shape[2]).to(R) + R.mT @ own @ R)
    root = torch.linalg.solve_triangular(cholesky, R.mT, upper=False)
    return root, cholesky.diagonal(dim1=1, dim2=2).log().sum()


class ModeFinder:
    """Newton's method, each time from the last mode.

    Newton's equations are solved by conjugate gradients, which take but products with the features.
    Their preconditioner is the curvature at a mode before, under the new prior precision: a new
    one is summed only where that has become too different.

    The logits are `f = offset + Φ D v + K α`, where v are the features' weights in units of the
    prior, K the covariance of what each example adds itself, and α its dual coordinates: in a mode
    the negative slopes of the loss.

    Parameters
    ----------
    features : Features
    offset : torch.Tensor
        `(N, C)`, float64
    targets : torch.Tensor
    likelihood : Likelihood
    """

    def __init__(
        self,
        features: Features,
        offset: torch.Tensor,
        targets: torch.Tensor,
        likelihood: Likelihood,
    ) -> None:
        self._features = features
        self._offset = offset
        self._targets = targets
        self._likelihood = likelihood
        self._weights = torch.zeros(features.n_features, dtype=torch.float64)
        self._dual = torch.zeros_like(offset)
        self._gram: Gram | None = None

    def precondition(self, gram: Gram) -> None:
        """Use a curvature for the modes to come."""
        self._gram = gram

    def __call__(self, deviation: torch.Tensor, own: torch.Tensor, scale: float) -> Mode:
        """The mode under a prior.

        Parameters
        ----------
        deviation : torch.Tensor
            `(F,)`, of the features' weights under the prior
        own : torch.Tensor
            `(N, C, C)`, K
        scale : float
            of the loss
        """
        solver = _Solver(self._features, deviation, self._gram)
        v, dual = self._weights / deviation, self._dual
        added = _times(own, dual)
        f = self._offset + self._features.times(deviation * v) + added
        gain = torch.inf
        for step in range(_MOST_STEPS + 1):
            slope = scale * self._likelihood.slope(f, self._targets)
            pull = dual + slope
            root, _ = whitener(self._likelihood, f, own, scale)
            B = root.mT @ root
            left = _times(B, _times(own, pull))
            of_slope, of_left = deviation * self._features.transposed_times(
                torch.stack([slope, left])
            )
            gradient = v + of_slope
            error = (gradient.square().sum() + (pull * _times(own, pull)).sum()) / 2
            if gain < _SUFFICIENT_GAIN or step == _MOST_STEPS:
                break
            to_v = solver.solve(root, B, of_left - gradient)
            along = self._features.times(deviation * to_v)
            to_dual = left - pull - _times(B, along)
            to_added = _times(own, to_dual)
            to_f = along + to_added
            gain = -(gradient @ to_v + (pull * to_added).sum()).item() / 2
            quadratic = (v @ v + (dual * added).sum()) / 2
            linear = v @ to_v + (dual * to_added).sum()
            curved = (to_v @ to_v + (to_dual * to_added).sum()) / 2
            here = scale * self._likelihood.loss(f, self._targets) + quadratic
            size = 1.0
            while size > _SMALLEST_STEP:
                there = scale * self._likelihood.loss(f + size * to_f, self._targets)
                there = there + quadratic + size * linear + size**2 * curved
                if here - there >= _ARMIJO * size * gain:
                    break
                size /= 2
            else:
                gain = 0.0
                continue
            v, dual, added = v + size * to_v, dual + size * to_dual, added + size * to_added
            f = f + size * to_f
        self._weights, self._dual, self._gram = v * deviation, dual, solver.gram
        loss = self._likelihood.loss(f, self._targets)
        energy = (v @ v + (dual * added).sum()) / 2
        return Mode(f, v, energy, loss, error.item())


class _Solver:
    """Of systems with `I + D Φᵀ B Φ D`."""

    def __init__(self, features: Features, deviation: torch.Tensor, gram: Gram | None) -> None:
        self.gram = gram
        self._features = features
        self._deviation = deviation
        self._precision = None if gram is None else gram.precision(deviation)

    def solve(self, root: torch.Tensor, B: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self._precision is not None:
            solution = self._conjugate_gradients(B, x)
            if solution is not None:
                return solution
        self.gram = self._features.gram(root)
        self._precision = self.gram.precision(self._deviation)
        return self._precision.solve(x)

    def _conjugate_gradients(self, B, x):
        solution, residual = torch.zeros_like(x), x
        nearer = self._precision.solve(residual)
        direction, size = nearer, residual @ nearer
        goal = _RESIDUAL**2 * size
        for _ in range(_MOST_PRODUCTS):
            product = self._features.normal_product(B, self._deviation * direction)
            product = direction + self._deviation * product
            step = size / (direction @ product)
            solution = solution + step * direction
            residual = residual - step * product
            nearer = self._precision.solve(residual)
            before, size = size, residual @ nearer
            if size <= goal:
                return solution
            direction = nearer + size / before * direction
        return None


def _times(matrices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Of `(N, C, C)` and `(N, C)`."""
    return (matrices @ values[..., None]).squeeze(-1)

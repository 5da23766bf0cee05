"""Most probable logits of the linearised model, one prior precision after the other."""

from __future__ import annotations

from typing import NamedTuple

import torch

from laplace_lora_ext.likelihoods import Likelihood
from laplace_lora_ext.linearized.features import Features
from laplace_lora_ext.linearized.gram import Gram, Precision

_MOST_STEPS = 100
_SUFFICIENT_GAIN = 1e-7  # nats that a step is expected to gain, after which no other follows
_SUFFICIENT_SHARE = 1e-4  # of the expected gain, which a step must have
_SMALLEST_SIZE = 1e-6  # of a step
_MOST_PRODUCTS = 30  # of conjugate gradients: about as long as another factorisation takes
_RESIDUAL = 1e-2  # of conjugate gradients, relative


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
    half_logdet = cholesky.diagonal(dim1=1, dim2=2).log().sum()
    return torch.linalg.solve_triangular(cholesky, R.mT, upper=False), half_logdet


class ModeFinder:
    """Newton's method, each time from the last mode.

    Newton's equations are solved by conjugate gradients, which take but products with the features.
    Their preconditioner is the curvature at a mode before, under the new prior precision: another
    one is summed only where that has become too different.

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
        here = self._last_mode(deviation, own)
        for _ in range(_MOST_STEPS):
            step, gain = self._step(here, own, scale, solver)
            size = self._size(here, step, gain, scale)
            if size is None:
                break
            here = here.moved(step, size)
            if gain < _SUFFICIENT_GAIN:
                break
        self._weights, self._dual, self._gram = here.v * deviation, here.dual, solver.gram
        slope = scale * self._likelihood.slope(here.f_mu, self._targets)
        gradient = here.v + deviation * self._features.transposed_times(slope)
        pull = here.dual + slope
        error = (gradient.square().sum() + (pull * _times(own, pull)).sum()) / 2
        loss = self._likelihood.loss(here.f_mu, self._targets)
        return Mode(here.f_mu, here.v, here.energy(), loss, error.item())

    def _last_mode(self, deviation: torch.Tensor, own: torch.Tensor) -> _Point:
        added = _times(own, self._dual)
        f_mu = self._features.times(self._weights).add_(self._offset).add_(added)
        return _Point(f_mu, self._weights / deviation, self._dual, added)

    def _step(
        self, here: _Point, own: torch.Tensor, scale: float, solver: _Solver
    ) -> tuple[_Point, float]:
        """Newton's, and what it gains if the density's logarithm is a parabola.

        The equations for the examples' own parts are solved for the features' weights, which
        leaves `I + D Φᵀ B Φ D` for these.
        """
        deviation = solver.deviation
        roots = self._roots(here.f_mu, own, scale)
        # In place, since each of these is as large as all logits.
        both = torch.empty(2, *here.f_mu.shape, dtype=torch.float64)
        slope, left = both
        torch.mul(self._likelihood.slope(here.f_mu, self._targets), scale, out=slope)
        pull = here.dual + slope
        left.copy_(_normal(roots, _times(own, pull)))
        of_slope, of_left = deviation * self._features.transposed_times(both)
        gradient = here.v + of_slope
        v = solver.solve(roots, of_left - gradient)
        along = self._features.times(deviation * v)
        dual = left.sub_(pull).sub_(_normal(roots, along))
        added = _times(own, dual)
        gain = -(gradient @ v + (pull * added).sum()).item() / 2
        return _Point(along.add_(added), v, dual, added), gain

    def _roots(self, f_mu: torch.Tensor, own: torch.Tensor, scale: float) -> torch.Tensor:
        """Of all examples, in one piece: joining parts would hold all of them twice."""
        roots = torch.empty(0)
        for part in self._features.some_at_a_time():
            found, _ = whitener(self._likelihood, f_mu[part], own[part], scale)
            if not len(roots):
                roots = found.new_empty(len(f_mu), *found.shape[1:])
            roots[part] = found
        return roots

    def _size(self, here: _Point, step: _Point, gain: float, scale: float) -> float | None:
        """What share of a step is made, so that it gains; None if none does."""

        def objective(point: _Point) -> float:
            loss = scale * self._likelihood.loss(point.f_mu, self._targets)
            return (loss + point.energy()).item()

        before, size = objective(here), 1.0
        while size > _SMALLEST_SIZE:
            if before - objective(here.moved(step, size)) >= _SUFFICIENT_SHARE * size * gain:
                return size
            size /= 2
        return None


class _Point(NamedTuple):
    """Logits `f = offset + Φ D v + K α`, or a step from one such point to another.

    v are the features' weights in units of the prior, K is the covariance of what each example
    adds itself, and α are its dual coordinates: in a mode the negative slopes of the loss.

    Attributes
    ----------
    f_mu : torch.Tensor
        `(N, C)`
    v : torch.Tensor
        `(F,)`
    dual : torch.Tensor
        `(N, C)`, α
    added : torch.Tensor
        `(N, C)`, K α
    """

    f_mu: torch.Tensor
    v: torch.Tensor
    dual: torch.Tensor
    added: torch.Tensor

    def moved(self, step: _Point, size: float) -> _Point:
        return _Point(*(own + size * other for own, other in zip(self, step, strict=True)))

    def energy(self) -> torch.Tensor:
        return (self.v @ self.v + (self.dual * self.added).sum()) / 2


class _Solver:
    """Of systems with `I + D Φᵀ B Φ D`."""

    def __init__(self, features: Features, deviation: torch.Tensor, gram: Gram | None) -> None:
        self.gram = gram
        self.deviation = deviation
        self._features = features

    def solve(self, root: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """For roots A `(N, S, C)` of B."""
        if self.gram is not None:
            near = self.gram.precision(self.deviation)
            solution = self._conjugate_gradients(root, x, near)
            if solution is not None:
                return solution
        self.gram = self._features.gram(root.__getitem__)
        return self.gram.precision(self.deviation).solve(x)

    def _conjugate_gradients(
        self, root: torch.Tensor, x: torch.Tensor, near: Precision
    ) -> torch.Tensor | None:
        """Preconditioned by a precision that is near; None where it is not near enough."""
        solution, residual = torch.zeros_like(x), x
        direction = nearer = near.solve(residual)
        size = residual @ nearer
        goal = _RESIDUAL**2 * size
        for _ in range(_MOST_PRODUCTS):
            if size <= goal:
                return solution
            along = self._features.normal_product(root, self.deviation * direction)
            product = direction + self.deviation * along
            length = size / (direction @ product)
            solution = solution + length * direction
            residual = residual - length * product
            nearer = near.solve(residual)
            before, size = size, residual @ nearer
            direction = nearer + size / before * direction
        return None


def _times(matrices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Of `(N, S, C)` and `(N, C)`: `(N, S)`."""
    return (matrices @ values[..., None]).squeeze(-1)


def _normal(root: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`Aᵀ A x` of `(N, S, C)` and `(N, C)`."""
    return _times(root.mT, _times(root, values))

"""Laplace with the exact GGN of one output, by kernels between few examples."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.fine_tuning import Pretrained
from benchmarks.models import AdaptedModel
from benchmarks.training import Records
from laplace_lora_ext.predictive.moments import Moments
from laplace_lora_ext.predictive.numbers import NumberPrediction


@dataclass
class ExactGGN:
    """What every approximation of the curvature of one output approximates.

    With N examples the GGN has rank N at most: its determinant and its inverse are
    those of matrices `(N, N)`, so that nothing of P parameters is left out.

    Attributes
    ----------
    outputs : torch.Tensor
        `(N,)` of the known examples
    gradients : torch.Tensor
        `(N, P)` of these outputs
    targets : torch.Tensor
        `(N,)`
    squared_norm : torch.Tensor
        of the P parameters, whose prior has the mean 0
    """

    outputs: Tensor
    gradients: Tensor
    targets: Tensor
    squared_norm: Tensor
    prior_precision: Tensor = field(default_factory=lambda: torch.ones(()))
    sigma_noise: Tensor = field(default_factory=lambda: torch.ones(()))

    def __post_init__(self) -> None:
        self.kernel = self.gradients @ self.gradients.T

    def log_marginal_likelihood(
        self, prior_precision: Tensor, sigma_noise: Tensor
    ) -> Tensor:
        """Compute the evidence that Laplace approximates, differentiably."""
        n = len(self.targets)
        variance = sigma_noise**2
        errors = self.targets - self.outputs
        misfit = errors.square().sum() / variance
        normaliser = n * torch.log(2 * math.pi * variance)
        from_prior = prior_precision * self.squared_norm
        # Sylvester: this matrix (N, N) has the determinant of the posterior's
        # precision over that of the prior's.
        scaled = self.kernel / (prior_precision * variance)
        volume = torch.logdet(self._identity + scaled)
        return -0.5 * (misfit + normaliser + from_prior + volume)

    def predict(
        self,
        outputs: Tensor,
        gradients: Tensor,
    ) -> NumberPrediction:
        """Predict by outputs `(M,)` and their gradients `(M, P)`."""
        to_known = gradients @ self.gradients.T
        ridge = self.prior_precision * self.sigma_noise**2
        ridged = self.kernel + ridge * self._identity
        weights = torch.linalg.solve(ridged, to_known.T).T
        # Woodbury: the prior's variance, less what the known examples tell.
        told = (to_known * weights).sum(1)
        untold = gradients.square().sum(1) - told
        variance = untold / self.prior_precision
        moments = Moments(
            f_mu=outputs[:, None],
            f_var=variance[:, None, None],
        )
        return NumberPrediction.of([moments], [float(self.sigma_noise)])

    @property
    def _identity(self) -> Tensor:
        """Return the identity `(N, N)`."""
        return torch.eye(len(self.targets), dtype=self.kernel.dtype)


def outputs_and_gradients(
    pretrained: Pretrained,
    model: AdaptedModel,
    records: Records,
) -> tuple[Tensor, Tensor]:
    """Compute outputs `(N,)` and their gradients `(N, P)` in float64, one by one."""
    parameters = model.trained_weights
    outputs = []
    gradients = []
    for batch in pretrained.prediction_loader(records):
        logits = model.logits_model(batch)
        for output in logits[:, 0]:
            # The examples of a batch share one graph.
            slopes = torch.autograd.grad(output, parameters, retain_graph=True)
            gradient = torch.cat([slope.flatten() for slope in slopes])
            # The kernel sums over all P of them, and its determinant feels rounding.
            gradients.append(gradient.double())
            outputs.append(output.detach().double())
    return torch.stack(outputs).cpu(), torch.stack(gradients).cpu()


def exact_ggn(
    pretrained: Pretrained,
    model: AdaptedModel,
    records: Records,
    targets: Tensor,
) -> ExactGGN:
    """Compute the exact GGN of a model's outputs for records and targets `(N, 1)`."""
    outputs, gradients = outputs_and_gradients(pretrained, model, records)
    weights = [weight.detach().double() for weight in model.trained_weights]
    squares = [weight.square().sum() for weight in weights]
    squared_norm = sum(squares, start=torch.zeros(()))
    return ExactGGN(
        outputs=outputs,
        gradients=gradients,
        targets=targets[:, 0].double(),
        squared_norm=squared_norm.cpu(),
    )

"""Laplace with the exact GGN of one output, by kernels between few examples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

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

    outputs: torch.Tensor
    gradients: torch.Tensor
    targets: torch.Tensor
    squared_norm: torch.Tensor
    prior_precision: torch.Tensor = field(default_factory=lambda: torch.ones(()))
    sigma_noise: torch.Tensor = field(default_factory=lambda: torch.ones(()))

    def __post_init__(self) -> None:
        self.kernel = self.gradients @ self.gradients.T

    def log_marginal_likelihood(
        self, prior_precision: torch.Tensor, sigma_noise: torch.Tensor
    ) -> torch.Tensor:
        """Compute the evidence that Laplace approximates, differentiably."""
        n = len(self.targets)
        errors = (self.targets - self.outputs).square().sum()
        fit = errors / sigma_noise**2 + n * torch.log(2 * math.pi * sigma_noise**2)
        scaled = self.kernel / (prior_precision * sigma_noise**2)
        volume = torch.logdet(torch.eye(n, dtype=scaled.dtype) + scaled)
        return -0.5 * (fit + prior_precision * self.squared_norm + volume)

    def predict(
        self, outputs: torch.Tensor, gradients: torch.Tensor
    ) -> NumberPrediction:
        """Predict by outputs `(M,)` and their gradients `(M, P)`."""
        n = len(self.targets)
        to_known = gradients @ self.gradients.T
        ridge = self.prior_precision * self.sigma_noise**2
        regularised = self.kernel + ridge * torch.eye(n, dtype=self.kernel.dtype)
        # Woodbury: the prior's variance, less what the known examples tell.
        told = (to_known * torch.linalg.solve(regularised, to_known.T).T).sum(1)
        variance = (gradients.square().sum(1) - told) / self.prior_precision
        moments = Moments(outputs[:, None], variance[:, None, None])
        return NumberPrediction.of([moments], [float(self.sigma_noise)])


def outputs_and_gradients(
    pretrained: Pretrained, model: AdaptedModel, records: Records
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute outputs `(N,)` and their gradients `(N, P)` in float64, one by one."""
    parameters = trained_parameters(model)
    outputs, gradients = [], []
    for batch in pretrained.prediction_loader(records):
        for output in model.logits_model(batch)[:, 0]:
            slopes = torch.autograd.grad(output, parameters, retain_graph=True)
            gradients.append(torch.cat([slope.flatten() for slope in slopes]).double())
            outputs.append(output.detach().double())
    return torch.stack(outputs).cpu(), torch.stack(gradients).cpu()


def trained_parameters(model: AdaptedModel) -> Sequence[torch.nn.Parameter]:
    """List the weights of LoRA layers and head."""
    return [weight for weight in model.model.parameters() if weight.requires_grad]


def exact_ggn(
    pretrained: Pretrained,
    model: AdaptedModel,
    records: Records,
    targets: torch.Tensor,
) -> ExactGGN:
    """Compute the exact GGN of a model's outputs for records and targets `(N, 1)`."""
    outputs, gradients = outputs_and_gradients(pretrained, model, records)
    weights = [weight.detach().double() for weight in trained_parameters(model)]
    squared_norm = sum((weight.square().sum() for weight in weights), torch.zeros(()))
    return ExactGGN(
        outputs=outputs,
        gradients=gradients,
        targets=targets[:, 0].double(),
        squared_norm=squared_norm.cpu(),
    )

"""What a decision needs: class probabilities, labels, and how much of the doubt more data cures."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from laplace_lora_ext.predictive.moments import Moments
from laplace_lora_ext.predictive.sampling import gaussian_samples


@dataclass(frozen=True)
class Prediction:
    """Predictions for B examples with C classes; entropies are in nats.

    Attributes
    ----------
    probabilities : torch.Tensor
        `(B, C)`
    labels : torch.Tensor
        `(B,)`, the most probable class
    total_entropy : torch.Tensor
        `(B,)`, of the mean probabilities of the posterior's draws
    aleatoric_entropy : torch.Tensor
        `(B,)`, the mean of the draws' entropies: doubt that every draw shares
    epistemic_entropy : torch.Tensor
        `(B,)`, the difference: mutual information between the label and the weights, which is
        doubt that more training data would lessen
    label_variance : torch.Tensor
        `(B,)`, variance over the draws of the probability of `labels`

    References
    ----------
    Depeweg et al., "Decomposition of uncertainty in Bayesian deep learning for efficient and
    risk-sensitive learning", ICML 2018.
    """

    probabilities: torch.Tensor
    labels: torch.Tensor
    total_entropy: torch.Tensor
    aleatoric_entropy: torch.Tensor
    epistemic_entropy: torch.Tensor
    label_variance: torch.Tensor

    @classmethod
    def of(cls, moments: Moments, probabilities: torch.Tensor, noise: torch.Tensor) -> Prediction:
        """From a link's probabilities, and draws of the logits with `(S, 1, C)` normal noise."""
        labels = probabilities.argmax(-1)
        drawn = gaussian_samples(*moments, noise).softmax(-1)
        total = torch.special.entr(drawn.mean(0)).sum(-1)
        aleatoric = torch.special.entr(drawn).sum(-1).mean(0)
        of_label = drawn.take_along_dim(labels[None, :, None], dim=-1)[..., 0]
        # Concavity makes the difference positive; rounding may not.
        epistemic = (total - aleatoric).clamp_min(0)
        return cls(
            probabilities, labels, total, aleatoric, epistemic, of_label.var(0, correction=0)
        )

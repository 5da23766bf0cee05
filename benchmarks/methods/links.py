"""From Gaussian logits to probabilities, and Gaussian logits under any prior precision."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from laplace_lora_ext import Moments, PredictiveStatistics
from laplace_lora_ext.curvature.passes import jacobians


@dataclass(frozen=True)
class Link:
    """A link approximation in the host's words."""

    name: str
    link_approx: str
    diagonal_output: bool = False


MC = Link("mc", "mc")
PROBIT = Link("probit", "probit")
MEAN_FIELD = Link("mean field", "mean_field")
LINKS = {
    link.name: link
    for link in (
        MC,
        Link("mc, diagonal", "mc", diagonal_output=True),
        PROBIT,
        MEAN_FIELD,
        Link("bridge", "bridge"),
    )
}


class Beliefs:
    """Gaussian logits of a data set under any prior precision of a fitted approximation.

    A low-rank one sees the data once, another one once for every call of `moments`.
    """

    def __init__(self, la: Any, loader: DataLoader) -> None:
        self._la = la
        self._loader = loader
        self.statistics: PredictiveStatistics | None = None
        if hasattr(la, "predictive_statistics"):
            self.statistics = la.predictive_statistics(loader)

    def moments(self, prior_precisions: Sequence[torch.Tensor]) -> list[Moments]:
        """Mean and covariance of the logits under each prior precision."""
        if self.statistics is not None:
            return [self.statistics.moments(value) for value in prior_precisions]
        la = self._la
        before = la.prior_precision
        parts: list[list[Moments]] = []
        for batch in self._loader:
            Js, f_mu = jacobians(la.model, la.blocks, batch)
            of_batch = []
            for value in prior_precisions:
                la.prior_precision = value
                of_batch.append(Moments(f_mu, la.functional_variance(Js)).to("cpu"))
            parts.append(of_batch)
        la.prior_precision = before
        return [
            Moments(*(torch.cat(part) for part in zip(*of_prior, strict=True)))
            for of_prior in zip(*parts, strict=True)
        ]


def probabilities(la: Any, moments: Any, link: Link, samples: int) -> torch.Tensor:
    """Class probabilities (texts, classes), on the CPU, of a batch or of its Gaussian logits."""
    return la(
        moments,
        pred_type="glm",
        link_approx=link.link_approx,
        diagonal_output=link.diagonal_output,
        n_samples=samples,
    ).cpu()

"""Laplace approximations of a benchmark: how they are made, tuned, and turned into predictions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

import laplace_lora_ext
from benchmarks.calibration.fine_tuned import FineTuned, Pretrained, Records
from laplace_lora_ext import Moments, PredictiveStatistics
from laplace_lora_ext.curvature.passes import jacobians

PREDICTION_BATCH_SIZE = 8
# What chooses prior precisions without validation data, in the words of a table and as keywords of
# `optimize_prior_precision`.
EVIDENCES: dict[str, dict[str, Any]] = {
    "evidence, scalar": {"method": "marglik"},
    "evidence, layerwise": {"method": "marglik", "prior_structure": "layerwise"},
}
LINEARIZED: dict[str, dict[str, Any]] = {
    "leave-one-out, scalar": {"method": "linearized_loo"},
    "leave-one-out, layerwise": {"method": "linearized_loo", "prior_structure": "layerwise"},
    "linearized evidence, scalar": {"method": "linearized_marglik"},
    "linearized evidence, layerwise": {
        "method": "linearized_marglik",
        "prior_structure": "layerwise",
    },
}
GRID = torch.logspace(-2, 4, 49)
COARSE_GRID = GRID[::4]
FACTORS = torch.logspace(-2, 2, 33)


@dataclass(frozen=True)
class Link:
    """From Gaussian logits to probabilities, in the host's words."""

    name: str
    link_approx: str
    diagonal_output: bool = False


MC = Link("mc", "mc")
PROBIT = Link("probit", "probit")
MEAN_FIELD = Link("mean field", "mean_field")
LINKS = (
    MC,
    Link("mc, diagonal", "mc", diagonal_output=True),
    PROBIT,
    MEAN_FIELD,
    Link("bridge", "bridge"),
)


@dataclass(frozen=True)
class Posterior:
    """A Laplace approximation over some or all LoRA weights.

    Attributes
    ----------
    name : str
        What tables call it.
    hessian_structure : str
        Structure of the curvature.
    options : dict
        Further keywords of `laplace_lora_ext.Laplace`.
    linearized : bool
        Whether its prior precision is chosen in the linearised model too.
    mean_at_start : bool
        Whether the prior's mean is the LoRA weights before training, and not 0.
    """

    name: str
    hessian_structure: str = "lowrank_kron"
    options: dict[str, Any] = field(default_factory=dict)
    linearized: bool = False
    mean_at_start: bool = False

    def fit(self, pretrained: Pretrained, fine_tuned: FineTuned, records: Records) -> Any:
        """Fit it on the batches that the model was trained on.

        Parameters
        ----------
        pretrained : Pretrained
            Knows how to make batches.
        fine_tuned : FineTuned
            The model.
        records : list of dict
            Training set.

        Returns
        -------
        la : LoRALaplace
            The fitted approximation.
        """
        la: Any = laplace_lora_ext.Laplace(
            fine_tuned.model,
            "classification",
            subset_of_weights="lora",
            hessian_structure=self.hessian_structure,
            class_token_ids=pretrained.class_token_ids,
            **self.options,
        )
        if self.mean_at_start:
            names = {id(p): name for name, p in fine_tuned.model.named_parameters()}
            start = (fine_tuned.initial[names[id(block.weight)]] for block in la.blocks)
            la.prior_mean = torch.cat([weight.flatten() for weight in start])
        loader = pretrained.loader(records, pretrained.hyperparameters.batch_size)
        la.fit(loader, progress_bar=pretrained.show_progress)
        return la


def posteriors(number_of_layers: int, is_prompt: bool) -> list[Posterior]:
    """List the Laplace approximations that are compared.

    Parameters
    ----------
    number_of_layers : int
        Transformer layers of the model.
    is_prompt : bool
        Whether it is a causal language model, with LoRA weights at the output layer.

    Returns
    -------
    posteriors : list of Posterior
        From the smallest to the library's.
    """
    last: dict[str, Any] = (
        {"target_modules": ["lm_head"]}
        if is_prompt
        else {"layers_to_transform": [number_of_layers - 1]}
    )
    first = list(range(number_of_layers // 2))
    return [
        Posterior("Last layer (LLLA)", options=last),
        Posterior("First half of the layers", options={"layers_to_transform": first}),
        Posterior("Stock diag", "diag"),
        Posterior("Stock Kron", "kron"),
        Posterior(
            "lowrank_kron (paper)", options={"backend_kwargs": laplace_lora_ext.PAPER_SETTINGS}
        ),
        Posterior("lowrank_kron", linearized=True),
        Posterior("lowrank_kron, prior mean at start", linearized=True, mean_at_start=True),
    ]


class Beliefs:
    """Gaussian logits of a data set under any prior precision.

    Parameters
    ----------
    la : LoRALaplace
        Fitted. A low-rank one sees the data once, another one once for every `moments`.
    loader : DataLoader
        The data.
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


def probabilities(la: Any, moments: Moments, link: Link, samples: int) -> torch.Tensor:
    """Class probabilities of Gaussian logits.

    Parameters
    ----------
    la : LoRALaplace
        Makes predictions.
    moments : Moments
        Mean and covariance of the logits (texts, classes) and (texts, classes, classes).
    link : Link
        The link approximation.
    samples : int
        Samples of the logits with Monte-Carlo links.

    Returns
    -------
    probabilities : torch.Tensor
        Probabilities (texts, classes) on the CPU.
    """
    return la(
        moments,
        link_approx=link.link_approx,
        diagonal_output=link.diagonal_output,
        n_samples=samples,
    ).cpu()

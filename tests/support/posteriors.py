"""Posteriors of the small models, and what many tests ask of them."""

from collections.abc import Iterable, Sequence
from typing import Any

import laplace
import pytest
import torch
from laplace.utils.metrics import RunningNLLMetric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_lora_ext.models.logits_model import LogitsModel
from tests.support.models import (
    CLASS_TOKEN_IDS,
    RAGGED,
    Batch,
    head_of,
    lora_model,
    normal,
    plain_model,
    ragged_batches,
)

# Where many tests look for it.
from tests.support.models import generator as generator

HOSTS_STRUCTURES = ["kron", "diag", "full"]
STRUCTURES = ["lowrank_kron", *HOSTS_STRUCTURES]
# Where what is tested does not look into the curvature.
OURS_AND_A_HOSTS = ["lowrank_kron", "kron"]
# So few that each can be computed by hand.
GRID = {"log_prior_prec_min": -2, "log_prior_prec_max": 2, "grid_size": 7}
PRIORS_ALONE = GRID | {"optimize_scale": False}


def make(
    model: nn.Module,
    structure: str = "lowrank_kron",
    likelihood: str = "classification",
    **keywords: Any,
):
    """Build a posterior by the stock factory."""
    return laplace.Laplace(
        model,
        likelihood,
        subset_of_weights="lora",
        hessian_structure=structure,
        **keywords,
    )


def fitted(
    kind: str = "bert",
    batches: Iterable[Any] | None = None,
    structure: str = "lowrank_kron",
    *,
    model: nn.Module | None = None,
    dtype: torch.dtype = torch.float64,
    rank: int = 3,
    tail: bool = True,
    kfac_approx: str = "gradient",
    **keywords: Any,
):
    """Fit a posterior of a classifier, by default on `ragged_batches()`."""
    # The host's structures have no such settings.
    if structure == "lowrank_kron":
        settings = {"rank": rank, "tail": tail, "kfac_approx": kfac_approx}
        keywords["backend_kwargs"] = settings | keywords.get("backend_kwargs", {})
    if model is None:
        model = lora_model(kind, dtype)
    if kind != "bert":
        keywords.setdefault("class_token_ids", CLASS_TOKEN_IDS)
    la = make(model, structure, **keywords)
    la.fit(ragged_batches() if batches is None else batches)
    return la


def plain_regression(n_outputs: int = 2, structure: str = "lowrank_kron"):
    """Fit a plain module's posterior to twelve examples; return inputs too."""
    model = plain_model(n_outputs).requires_grad_(False)
    X = normal(12, 5)
    y = normal(12, n_outputs, seed=1)
    data = TensorDataset(X, y)
    # Another noise than 1, which divides nothing.
    la = make(model, structure, "regression", sigma_noise=0.5)
    # Batches of two sizes.
    la.fit(DataLoader(data, batch_size=5))
    return la, X


def overconfident(**keywords: Any):
    """Fit a posterior, and make texts of which three in four are right."""
    la = fitted(**keywords)
    head = head_of(la.model.model)
    # With logits of twenty times the size it is as sure of what is wrong.
    head.weight.data *= 20
    la.fit(ragged_batches())
    # Other texts than it was fitted to, three times as many.
    texts = ragged_batches(RAGGED * 3, seed=7)
    for index, batch in enumerate(texts):
        logits = la.model(batch)
        labels = logits.argmax(-1)
        # One text in a batch at most keeps a label that may be wrong, and every fourth
        # batch none.
        row = index % 4
        labels[row : row + 1] = batch["labels"][row : row + 1]
        batch["labels"] = labels
    return la, texts


def another_training(kind: str = "bert") -> nn.Module:
    """Make what a training of `lora_model(kind)` on other texts might end with."""
    model = lora_model(kind)
    for name, weight in model.named_parameters():
        # Little enough that both trainings' predictions have much in common.
        if "lora_B" in name:
            weight.data += 0.2 * normal(*weight.shape)
    return model


def priors_of_blocks(la) -> Tensor:
    """Make another prior precision for each block, so that none passes for another."""
    return torch.linspace(0.3, 2.0, len(la.blocks)).double()


def count_forward_passes(la) -> list[int]:
    """Make a list that gets an entry at each forward pass."""
    calls: list[int] = []
    la.model.register_forward_hook(lambda *_: calls.append(1))
    return calls


def count_backward_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make a list that gets an entry at each backward pass."""
    calls: list[int] = []
    grad = torch.autograd.grad

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return grad(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counting)
    return calls


def validation_loss(la, prior_precision, batches, **predictions: Any) -> float:
    """Compute the loss at a prior precision, by predictions from inputs."""
    la.prior_precision = prior_precision
    metric = RunningNLLMetric()
    for batch in batches:
        inputs, labels = la.members[0].model.split(batch)
        metric.update(la(inputs, **predictions), labels)
    return metric.compute().item()


class HostLoader(list[Batch]):
    """What the host needs of a DataLoader: nothing but the length of its data."""

    @property
    def dataset(self) -> range:
        return range(sum(len(batch["labels"]) for batch in self))


def stock(
    model: nn.Module,
    batches: list[Batch],
    parts: Sequence[str] = ("lora_",),
    likelihood: str = "classification",
    dict_key_x: str = "input_ids",
):
    """Fit the host's Kron over weights with these parts in their names.

    It reads a batch's size off `dict_key_x`.
    """
    for name, parameter in model.named_parameters():
        takes_part = any(part in name for part in parts)
        parameter.requires_grad_(takes_part)
    wrapper = LogitsModel(model)
    la = laplace.Laplace(wrapper, likelihood, "all", "kron", dict_key_x=dict_key_x)
    la.fit(HostLoader(batches))
    return la


def sizes(la) -> list[int]:
    """Count the weights of each block."""
    return [block.weight.numel() for block in la.blocks]

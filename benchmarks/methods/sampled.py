"""Rivals that predict with sampled weights: the sampling, and TFB."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils.data import DataLoader

from benchmarks.methods.method import LogitsOf, Members
from benchmarks.models import AdaptedModel
from benchmarks.training import Weights

SAMPLES = 10  # as in the tables of these rivals' papers

Noise = Callable[[torch.Generator], Weights]


def sampled(model: AdaptedModel, noise: Noise) -> Members:
    """Draw noise on the model's weights, and predict with each draw."""

    def drawn() -> Iterator[LogitsOf]:
        # Every data set, and every size of noise, gets the same draws.
        generator = torch.Generator().manual_seed(0)
        weights = dict(model.model.named_parameters())
        for _ in range(SAMPLES):
            moved = {}
            for name, shift in noise(generator).items():
                # The model that gives logits has the user's model as its `model`.
                moved[f"model.{name}"] = weights[name] + shift
            yield partial(functional_call, model.logits_model, moved)

    return Members(drawn)


# --- Training-Free Bayesianization (Shi et al., arXiv:2412.05723) ---------------------

MOST_CHANGED = 0.01  # share of the training texts whose class may change
REACH_OF_NOISE = (1e-4, 10.0)
# Halved ten times, five decades leave a size that is right to about 1 %.
BISECTIONS = 10
MOST_TEXTS = 500  # to look for changes in: each size of noise predicts all of them


@dataclass(frozen=True)
class NoiseOfLoraA:
    """Draws noise of lora_A: a basis of each layer times standard normal numbers."""

    bases: Weights
    widths: dict[str, int]  # of each lora_A
    sigma: float = 1.0

    def __call__(self, generator: torch.Generator) -> Weights:
        """Draw the noise of all layers."""
        noise = {}
        for name, basis in self.bases.items():
            _, rank = basis.shape
            standard = torch.randn(rank, self.widths[name], generator=generator)
            noise[name] = self.sigma * basis @ standard.to(basis)
        return noise


def training_free(model: AdaptedModel, train: DataLoader) -> Members:
    """Predict by TFB: as much noise as changes next to no predicted class."""
    noise = _noise_for(model)
    texts = _first_batches(train)
    classes = _predicted_classes(Members.of([model]), texts)
    # Noise changes by orders of magnitude, so its logarithm is halved.
    lower, upper = (math.log(end) for end in REACH_OF_NOISE)
    for _ in range(BISECTIONS):
        middle = (lower + upper) / 2
        noise_tried = replace(noise, sigma=math.exp(middle))
        tried = sampled(model, noise_tried)
        is_changed = _predicted_classes(tried, texts) != classes
        if is_changed.double().mean() <= MOST_CHANGED:
            lower = middle
        else:
            upper = middle
    # The upper end is a size that changes too many.
    noise_found = replace(noise, sigma=math.exp(lower))
    return sampled(model, noise_found)


def _noise_for(model: AdaptedModel) -> NoiseOfLoraA:
    """Find the bases of all layers."""
    weights = dict(model.model.named_parameters())
    bases = {}
    widths = {}
    for name, A in weights.items():
        if "lora_A" in name:
            B = weights[name.replace("lora_A", "lora_B")]
            bases[name] = noise_basis(B.detach())
            widths[name] = A.shape[1]
    return NoiseOfLoraA(bases, widths)


def _first_batches(train: Iterable[Any]) -> list[Any]:
    """Take as many batches as have 500 texts; a batch of unknown size counts as one."""
    batch_size = 1
    if isinstance(train, DataLoader) and train.batch_size is not None:
        batch_size = train.batch_size
    n_batches = MOST_TEXTS // batch_size
    return list(islice(train, n_batches))


def _predicted_classes(members: Members, texts: list[Any]) -> Tensor:
    probabilities = members.predict({"train": texts})["train"]
    return probabilities.argmax(-1)


def noise_basis(B: Tensor) -> Tensor:
    """Find the basis in which noise of lora_A gives B @ lora_A noise along U.

    With the lora_B `U diag(d) Vᵀ` it is `V diag(1 / d)`; where d is 0, noise would
    change nothing.
    """
    _, d, Vh = torch.linalg.svd(B, full_matrices=False)
    # A singular value this small is 0 but for rounding.
    precision = torch.finfo(B.dtype).eps
    rounding = max(B.shape) * precision * d.amax()
    reciprocal = torch.where(d > rounding, 1 / d, 0)
    return Vh.mT * reciprocal

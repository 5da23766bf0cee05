"""Several labels of an example, and how they are told as classes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models import without_labels
from tests.support.posteriors import generator

LABELS = torch.tensor([[0, 1, 1], [0, 0, 0], [1, 1, 1], [1, 0, 0]])
"""Three labels of each of four examples."""


class InTwoColumns(nn.Module):
    """Makes rows `[0, f]` of each logit f, whose softmax is f's sigmoid."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        f = self.model(**batch).logits
        rows = torch.stack([torch.zeros_like(f), f], dim=-1)
        # Each label of each text is an example.
        return rows.flatten(0, 1)


def bernoulli_fisher(logits: Tensor) -> Tensor:
    """Compute `diag(p (1 - p))` of `(..., K)` logits in float64."""
    f = logits.double()
    # 1 - p cancels where p is near 1: the sigmoid of -f does not.
    return torch.diag_embed(f.sigmoid() * torch.sigmoid(-f))


def several_labels(batch: Mapping[str, Tensor], n_labels: int) -> Tensor:
    """Draw `(B, C)` numbers 0 and 1."""
    shape = (len(batch["input_ids"]), n_labels)
    return torch.randint(0, 2, shape, generator=generator(4)).double()


def in_two_classes(batches: Sequence[Mapping[str, Tensor]]) -> list[tuple[Any, Tensor]]:
    """Make pairs for `InTwoColumns`: each label of each text is an example."""
    return [
        (without_labels(batch), batch["labels"].long().flatten()) for batch in batches
    ]

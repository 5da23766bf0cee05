"""Kinds of weights, each of which may have a prior precision of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laplace_lora_ext.models.weights import Block


def kinds_of(blocks: Sequence[Block]) -> Tensor:
    """Number the kind of each block (LoRA, heads, others), `(blocks,)`, from 0."""
    names = [block.kind for block in blocks]
    in_order = list(dict.fromkeys(names))
    return torch.tensor([in_order.index(name) for name in names])


def number_of(kinds: Tensor) -> int:
    """Count the kinds of blocks."""
    return int(kinds.max()) + 1

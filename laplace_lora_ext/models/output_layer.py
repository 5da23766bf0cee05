"""The layer that turns hidden states into logits of a vocabulary, run for few positions alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel


@contextmanager
def selecting(
    transformer: PreTrainedModel, index: torch.Tensor, n_positions: int
) -> Iterator[list[torch.Size]]:
    """Within, the output layer sees only the `(B, K)` places of an index among a text's positions.

    The list that is yielded gets an entry whenever it did. A hook does this: not every model and
    version has an option for it, that option wants the index on the hidden states' device, and the
    layer may have LoRA, whose rows must still lie by text.
    """

    def select(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        # An output layer that is also the embedding sees tokens as well.
        if not args or args[0].shape[:-1] != (len(index), n_positions):
            return None
        calls.append(args[0].shape)
        return args[0].take_along_dim(index.to(args[0].device)[..., None], dim=1), *args[1:]

    calls: list[torch.Size] = []
    layer = transformer.get_output_embeddings()
    with ExitStack() as hooks:
        if isinstance(layer, nn.Module):
            hooks.callback(layer.register_forward_pre_hook(select).remove)
        yield calls

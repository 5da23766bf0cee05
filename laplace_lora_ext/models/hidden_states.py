"""What the layer reads that makes the logits."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from laplace_lora_ext.models.logits_model import LogitsModel

_LAST = 8  # calls of layers to search for the logits, so that few activations are kept


def logits_and_hidden_states(
    model: LogitsModel, batch: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits `(B, C)` of one forward pass, and what the layer that made them was given, `(B, d)`.

    That layer is a language model's output layer, or else the linear layer whose outputs are the
    logits, at the positions where they are read: in a head of several layers the last one. Where
    there is none, as where a model changes its logits afterwards, there is only None.

    Call it within `model.prepared()`.
    """
    calls: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=_LAST)
    weights = [(module, getattr(module, "weight", None)) for module in model.modules()]
    # With a matrix for a weight, and LoRA around them.
    layers: list[Any] = [m for m, w in weights if isinstance(w, torch.Tensor) and w.ndim == 2]
    output_layer: Any = None
    if model.transformer is not None and model.class_token_ids is not None:
        output_layer = model.transformer.get_output_embeddings()
        layers = layers if output_layer is None else [output_layer]

    def note(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        calls.append((args[0], output))

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_hook(note).remove)
        logits = model(batch)
    for inputs, outputs in calls:
        if inputs.shape[:-1] != outputs.shape[:-1] or len(outputs) != len(logits):
            continue
        read, made = (rows.reshape(len(logits), -1, rows.shape[-1]) for rows in (inputs, outputs))
        if output_layer is not None and made.shape[1] == 1:  # its logits may be capped or scaled
            return logits, read[:, 0].to(logits)
        if made.shape[-1] == logits.shape[-1]:
            is_made = (made.to(logits) == logits[:, None]).all(-1)
            if is_made.any(1).all():
                place = is_made.int().argmax(1)[:, None, None].to(read.device)
                return logits, read.take_along_dim(place, dim=1)[:, 0].to(logits)
    return logits, None

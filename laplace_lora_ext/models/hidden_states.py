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

    def note(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        rows = [x for x in (*args[:1], output) if isinstance(x, torch.Tensor) and x.ndim > 1]
        if len(rows) == 2 and rows[0].shape[:-1] == rows[1].shape[:-1]:
            calls.append((rows[0], rows[1]))

    with ExitStack() as hooks:
        for layer in _watched(model):
            hooks.callback(layer.register_forward_hook(note).remove)
        logits = model(batch)
    for inputs, outputs in calls:
        place = _place(model, outputs, logits)
        if place is not None:
            rows = inputs.reshape(len(logits), -1, inputs.shape[-1])
            place = place.to(rows.device)[:, None, None]
            return logits, rows.take_along_dim(place, dim=1)[:, 0].to(logits)
    return logits, None


def _watched(model: LogitsModel) -> list[nn.Module]:
    """The layers that could make the logits."""
    if _writes(model):
        assert model.transformer is not None
        layer = model.transformer.get_output_embeddings()
        return [layer] if isinstance(layer, nn.Module) else []
    n_outputs = model.output_size  # 0 before the first pass
    weights = ((module, getattr(module, "weight", None)) for module in model.modules())
    matrices = [(m, w) for m, w in weights if isinstance(w, torch.Tensor) and w.ndim == 2]
    return [module for module, weight in matrices if n_outputs in (0, len(weight))]


def _place(model: LogitsModel, outputs: torch.Tensor, logits: torch.Tensor) -> torch.Tensor | None:
    """`(B,)` index of the row of each example's outputs that holds its logits, if they all do."""
    n_examples, n_classes = logits.shape
    if outputs.shape[0] != n_examples:
        return None
    rows = outputs.reshape(n_examples, -1, outputs.shape[-1])
    if _writes(model) and rows.shape[1] == 1:  # its logits may be capped or scaled
        return torch.zeros(n_examples, dtype=torch.long)
    ids = model.class_token_ids
    rows = rows if ids is None or rows.shape[-1] <= max(ids) else rows[..., ids]
    if rows.shape[-1] != n_classes:
        return None
    equal = (rows.to(logits) == logits[:, None]).all(-1)
    return equal.int().argmax(1) if equal.any(1).all() else None


def _writes(model: LogitsModel) -> bool:
    """Whether it is a language model that answers, whose output layer is known."""
    return model.transformer is not None and model.class_token_ids is not None

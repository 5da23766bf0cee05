"""PEFT's attention module in our passes: it has its exact gradient, and stays as it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from peft.tuners import lora
from torch import nn

ATTENTION = getattr(lora.layer, "MultiheadAttention", None)
"""PEFT's LoRA of `nn.MultiheadAttention`; None in versions that have none."""


@contextmanager
def exact_attention(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within, let those of PEFT's attention modules compute their gradients in full.

    In each pass PEFT adds `B A` to the weights of the base model, and subtracts it again, which
    rounds them: here they are put back. To those of the output projection it adds `B A` twice, and
    the second time outside of the graph, so that gradients are half of what they should be.
    """
    layers: list[Any] = []
    for module in modules:
        if ATTENTION is None or not isinstance(module, ATTENTION):
            continue
        layer: Any = module
        if "merge" not in vars(layer.get_base_layer().out_proj):  # not within a pass that has this
            layers.append(layer)
    before: list[tuple[nn.Module, str, nn.Parameter]] = []
    for layer in layers:
        attention = layer.get_base_layer()
        output = attention.out_proj.get_base_layer()
        before.append((attention, "in_proj_weight", attention.in_proj_weight))
        before.append((output, "weight", output.weight))
        attention.out_proj.merge = partial(_merged_in_graph, attention.out_proj)
    try:
        yield
    finally:
        for layer in layers:
            del layer.get_base_layer().out_proj.merge
        for module, name, parameter in before:
            vars(module).pop(name, None)  # where an error has left a merged weight
            module._parameters[name] = parameter


def _merged_in_graph(
    layer: Any,
    safe_merge: bool = False,
    adapter_names: Sequence[str] | None = None,
) -> None:
    """Merge as `peft.tuners.lora.Linear.merge` does, with a gradient."""
    base = layer.get_base_layer()
    for adapter in layer.active_adapters if adapter_names is None else adapter_names:
        if adapter in layer.lora_A:
            base.weight = base.weight + layer.get_delta_weight(adapter).to(base.weight.dtype)
            layer.merged_adapters.append(adapter)

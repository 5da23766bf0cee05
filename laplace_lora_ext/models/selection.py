"""Which of a model's LoRA layers take part, and with which adapter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from peft import LoraConfig
from peft.tuners import lora
from peft.tuners.tuners_utils import check_target_module_exists

from laplace_lora_ext.messages import listed


def adapters_of(layer: lora.LoraLayer) -> set[str]:
    """Names of all adapters that have weights in the layer."""
    return {name for part in layer.adapter_layer_names for name in getattr(layer, part, ())}


def active_adapter(layers: dict[str, lora.LoraLayer]) -> str:
    """The one adapter that runs in a forward pass.

    `peft.get_layer_status` says as much of a model, from PEFT 0.12 on only.

    Raises
    ------
    ValueError
        If a layer is merged or disabled, or not just one adapter is active.
    """
    merged = [name for name, layer in layers.items() if layer.merged]
    if merged:
        raise ValueError(
            f"Adapters are merged into {listed(merged)}: call model.unmerge_adapter() first."
        )
    disabled = [name for name, layer in layers.items() if layer.disable_adapters]
    if disabled:
        raise ValueError(
            f"Adapters are disabled in {listed(disabled)}: call model.enable_adapter_layers()."
        )
    active = {
        adapter
        for layer in layers.values()
        for adapter in layer.active_adapters
        if adapter in adapters_of(layer)
    }
    if len(active) != 1:
        state = f"Several adapters are active ({', '.join(sorted(active))})"
        raise ValueError(
            f"{state if active else 'No adapter is active'}: call model.set_adapter(name)."
        )
    return active.pop()


def select(
    layers: dict[str, lora.LoraLayer],
    target_modules: str | Sequence[str] | None,
    layers_to_transform: int | Iterable[int] | None,
) -> dict[str, lora.LoraLayer]:
    """Those of some layers that `peft.LoraConfig` would choose, by name; an error if none."""
    if target_modules is None and layers_to_transform is None:
        return layers
    if layers_to_transform is not None and not isinstance(layers_to_transform, int):
        layers_to_transform = list(layers_to_transform)
    if isinstance(target_modules, str):
        targets: str | list[str] = target_modules
    elif target_modules is not None:
        targets = list(target_modules)
    else:  # PEFT reads layer indices only beside names of modules
        targets = sorted({name.rpartition(".")[2] for name in layers})
    config = LoraConfig(
        target_modules=targets,
        layers_to_transform=layers_to_transform,
    )
    # Before a name in full, PEFT would pass over the layer's index: let it see but ends of names.
    dot = "" if isinstance(targets, str) else "."
    selected = {
        name: layer
        for name, layer in layers.items()
        if check_target_module_exists(config, dot + name) and layers_to_transform != []
    }
    if not selected:
        raise ValueError(
            f"No LoRA layer matches target_modules={target_modules!r}, "
            f"layers_to_transform={layers_to_transform!r}; there are {listed(list(layers))}."
        )
    return selected

"""Weights that a posterior is over: found in a model, selected, or refused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import cast

from peft import LoraConfig
from peft.tuners import lora
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn

from laplace_lora_ext.messages import listed, warn
from laplace_lora_ext.models.heads import Selection, head_weights, select_heads
from laplace_lora_ext.models.weights import Block, LinearRows, bare_name, strip_wrappers

Layers = Mapping[str, lora.LoraLayer]
"""PEFT's layers by their names."""

_NAME = re.compile(r".*\.lora_[AB]\.[^.]+\.weight")

# It scales what a layer returns by a magnitude over a norm, which is no part of the derivative:
# PEFT detaches it, as the DoRA paper does (section 4.3).
_DORA = "DoraLinearVariant"

# Linear `lora_A` and `lora_B` by type, yet not applied as `B(A(x))`.
_NOT_PLAIN = tuple(
    getattr(lora.layer, name)
    for name in ("MultiheadAttention", "ParamWrapper")
    if hasattr(lora.layer, name)
)


def find_blocks(
    model: nn.Module,
    target_modules: str | Sequence[str] | None = None,
    layers_to_transform: int | Iterable[int] | None = None,
    weight_names: Collection[str] | None = None,
    modules_to_save: Selection = False,
) -> list[Block]:
    """Find the weights of the active adapter to be treated, in the order of the model's parameters.

    They are those of its LoRA layers and, with `modules_to_save`, weights and biases of its heads.

    Of a layer that was trained with one of its weights frozen, as LoRA-FA freezes `lora_A`, the
    other one takes part alone. An adapter that was loaded for inference has both frozen, and both
    take part, since a loaded adapter does not say which of its weights were frozen in training.
    With `weight_names`, those of `Block.known_as`, these weights take part alone, frozen or not.
    `target_modules` and `layers_to_transform` select LoRA layers as in `peft.LoraConfig`, and
    `modules_to_save` selects heads, or all if it is True.

    A `ValueError` if there is no LoRA layer, if the adapter is merged, disabled or not the only
    active one, or if nothing matches a selection. A `NotImplementedError` if layers do not add
    `B(A(x))` with weights of their own, if a head is not linear or too large, and for FSDP1 and
    DeepSpeed ZeRO-3.
    """
    adapter = active_adapter(model)
    layers = {
        name: layer for name, layer in lora_layers(model).items() if adapter in _adapters_of(layer)
    }
    if weight_names is not None:
        blocks = _named(model, layers, adapter, weight_names)
    else:
        blocks = _trained(_selected(layers, target_modules, layers_to_transform), adapter)
        blocks += [each.block() for each in select_heads(model, adapter, modules_to_save)]
    _check_own(model, blocks)
    return _in_order(model, blocks)


def lora_layers(model: nn.Module) -> dict[str, lora.LoraLayer]:
    """Find PEFT's LoRA layers in a model, by their names without wrappers'."""
    return {
        strip_wrappers(name): module
        for name, module in model.named_modules()
        if isinstance(module, lora.LoraLayer)
    }


def active_adapter(model: nn.Module) -> str:
    """Return the one LoRA adapter that runs in passes; errors are those of `find_blocks`."""
    _check_reachable(model)
    layers = lora_layers(model)
    _check_any(model, layers)
    idle = find_idle(layers)
    if idle is not None:
        raise ValueError(idle)
    active: set[str] = set()
    for layer in layers.values():
        # An adapter may be active in layers where it has no weights.
        active |= set(layer.active_adapters) & _adapters_of(layer)
    if not active:
        raise ValueError("No adapter is active: call model.set_adapter(name).")
    if len(active) > 1:
        names = ", ".join(sorted(active))
        raise ValueError(f"Several adapters are active ({names}): call model.set_adapter(name).")
    return active.pop()


def _halves(name: str, layer: lora.LoraLayer, adapter: str) -> list[Block]:
    """Make the blocks of a layer's `lora_A` and `lora_B`, whichever of them take part."""
    blocks = []
    for matrix, modules in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
        linear = cast(nn.Linear, modules[adapter])  # other kinds have been refused
        blocks.append(
            Block(
                name=_weight_name(name, matrix, adapter),
                adapter=adapter,
                module=linear,
                small_output=matrix == "lora_A",
                rows=LinearRows(linear, site=name),
                owner=layer,
            )
        )
    return blocks


def _weight_name(layer: str, matrix: str, adapter: str) -> str:
    return f"{layer}.{matrix}.{adapter}.weight"


def check_known_to_host(blocks: Sequence[Block]) -> None:
    """Refuse DoRA for the host's backends, which take every call of a layer for an input."""
    with_dora = [
        block.name
        for block in blocks
        if block.owner is not None and _variant(block.owner, block.adapter) == _DORA
    ]
    if with_dora:
        raise NotImplementedError(
            "laplace-torch's backends don't support DoRA, which calls LoRA layers with more than "
            f'their inputs: {listed(with_dora)}. Use the structures "lowrank_kron", "diag" or '
            '"full", without `backend`.'
        )


def is_untrained(blocks: Sequence[Block]) -> bool:
    """Tell whether all `lora_B` are 0, as PEFT initialises them."""
    of_b = [block for block in blocks if ".lora_B." in block.name]
    return bool(of_b) and not any(block.values.any() for block in of_b)


def warn_of_other_trainable(model: nn.Module) -> None:
    """Warn of trainable parameters that are neither LoRA weights nor a head, and so stay fixed."""
    trainable = [strip_wrappers(n) for n, p in model.named_parameters() if p.requires_grad]
    others = [
        name for name in trainable if not _NAME.fullmatch(name) and ".modules_to_save." not in name
    ]
    if others:
        warn(
            "The posterior is over lora_A and lora_B weights alone. Other trainable weights stay "
            f"at their MAP values: {listed(others)}."
        )


def find_idle(layers: Layers) -> str | None:
    """Find a LoRA layer that takes no part in passes, and say why; None if there is none."""
    for name, layer in layers.items():
        if layer.merged:
            return (
                f"LoRA layer {name} is merged into the base model: call model.unmerge_adapter() "
                "first."
            )
        if layer.disable_adapters:
            return f"LoRA layer {name} is disabled: call model.enable_adapter_layers()."
    return None


def _adapters_of(layer: lora.LoraLayer) -> set[str]:
    """List the adapters that have weights in the layer."""
    return {name for part in layer.adapter_layer_names for name in getattr(layer, part, ())}


def _check_reachable(model: nn.Module) -> None:
    """Refuse FSDP1 and ZeRO-3, which hide weights from their modules (`NotImplementedError`)."""
    is_fsdp1 = any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules())
    is_zero3 = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    if is_fsdp1 or is_zero3:
        raise NotImplementedError(
            "FSDP1 and DeepSpeed ZeRO-3 hide LoRA weights from their layers: shard with "
            "fully_shard (FSDP2), or load the adapter without them."
        )


def _check_any(model: nn.Module, layers: Layers) -> None:
    """Refuse a model without LoRA layers, and name the adapters that it has instead."""
    if layers:
        return
    configs = getattr(model, "peft_config", {}).values()
    # An enumeration's members print with their class; in older PEFT they may be text.
    kinds = [str(getattr(c.peft_type, "value", c.peft_type)) for c in configs]
    raise ValueError(
        f"No LoRA layer in the model (found {listed(kinds) or 'no adapter'}). Add one, or load one "
        "not merged."
    )


def _selected(
    layers: Layers,
    target_modules: str | Sequence[str] | None,
    layers_to_transform: int | Iterable[int] | None,
) -> Layers:
    """Select the layers that `peft.LoraConfig` would choose by name; an error if none."""
    if target_modules is None and layers_to_transform is None:
        return layers
    if target_modules is None:  # PEFT reads layer indices only beside names of modules
        targets = sorted({name.rpartition(".")[2] for name in layers})
    elif isinstance(target_modules, str):
        targets = target_modules
    else:
        targets = list(target_modules)
    if layers_to_transform is None or isinstance(layers_to_transform, int):
        indices = layers_to_transform
    else:
        indices = list(layers_to_transform)
    config = LoraConfig(target_modules=targets, layers_to_transform=indices)
    # Before a name in full, PEFT would pass over the layer's index: let it see but ends of names.
    dot = "" if isinstance(targets, str) else "."
    selected = {
        name: layer
        for name, layer in layers.items()
        if check_target_module_exists(config, dot + name)
    }
    if not selected:
        raise ValueError(
            f"No LoRA layer matches target_modules={target_modules!r}, "
            f"layers_to_transform={layers_to_transform!r}; there are {listed(list(layers))}."
        )
    return selected


def _trained(layers: Layers, adapter: str) -> list[Block]:
    """Make the blocks of some layers' trained weights; see `find_blocks`."""
    _check_plain(layers, adapter)
    blocks: list[Block] = []
    for name, layer in layers.items():
        halves = _halves(name, layer, adapter)
        blocks += [half for half in halves if half.weight.requires_grad] or halves
    return blocks


def _named(
    model: nn.Module, layers: Layers, adapter: str, weight_names: Collection[str]
) -> list[Block]:
    """Make the blocks of some weights, trained or not; an error if there is none of them."""
    holding = {
        name: layer
        for name, layer in layers.items()
        if any(
            bare_name(_weight_name(name, matrix, adapter)) in weight_names
            for matrix in ("lora_A", "lora_B")
        )
    }
    _check_plain(holding, adapter)
    blocks: list[Block] = []
    for name, layer in holding.items():
        blocks += _halves(name, layer, adapter)
    blocks = [block for block in blocks if block.known_as in weight_names]
    for weight in head_weights(model, adapter):
        if bare_name(weight.name) in weight_names:
            blocks.append(weight.block())
    if not blocks:
        raise ValueError(
            f"The model has none of the weights {listed(sorted(weight_names))}; there are the "
            f"LoRA layers {listed(list(layers))}."
        )
    return blocks


def _check_own(model: nn.Module, blocks: Sequence[Block]) -> None:
    """Refuse weights that several layers share: a hook on one of them does not see all."""
    holders: Counter[int] = Counter()
    for module in model.modules():
        holders.update(id(weight) for weight in module._parameters.values())
    shared = [block.name for block in blocks if holders[id(block.weight)] > 1]
    if shared:
        raise NotImplementedError(
            f"Layers share weights: give each its own parameters, or leave out {listed(shared)}."
        )


def _in_order(model: nn.Module, blocks: Sequence[Block]) -> list[Block]:
    """Sort blocks as the model's parameters, whose order the host keeps to."""
    places = {id(weight): place for place, weight in enumerate(model.parameters())}
    return sorted(blocks, key=lambda block: places[id(block.weight)])


def _check_plain(layers: Layers, adapter: str) -> None:
    """Refuse layers that do not add `B(A(x))` with linear A and B of their own."""
    unsupported = []
    for name, layer in layers.items():
        if not _is_plain(layer, adapter):
            kind = f"{type(layer).__name__} {_variant(layer, adapter)}".rstrip()
            unsupported.append(f"{name} ({kind})")
    if unsupported:
        raise NotImplementedError(
            "LoRA layers must add B(A(x)), where A and B are linear and their weights parameters. "
            f"These do not: {listed(unsupported)}. Leave them out with target_modules."
        )


def _is_plain(layer: lora.LoraLayer, adapter: str) -> bool:
    if isinstance(layer, _NOT_PLAIN):
        return False
    if adapter not in layer.lora_A or adapter not in layer.lora_B:
        return False
    for half in (layer.lora_A[adapter], layer.lora_B[adapter]):
        # Pruning, among others, computes weights from parameters.
        if type(half) is not nn.Linear or not isinstance(half.weight, nn.Parameter):
            return False
    return _variant(layer, adapter) in ("", _DORA)


def _variant(layer: lora.LoraLayer, adapter: str) -> str:
    """Name the kind of LoRA, such as "AloraLinearVariant"; "" for plain LoRA."""
    variant = getattr(layer, "lora_variant", {}).get(adapter)
    if variant is not None:
        return type(variant).__name__
    # Older PEFT has no variants, but a flag.
    has_dora = getattr(layer, "use_dora", {}).get(adapter)
    return _DORA if has_dora else ""

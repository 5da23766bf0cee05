"""Weights that a posterior is over: found in a model, selected, or refused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from peft import LoraConfig
from peft.tuners import lora
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from laplace_lora_ext.messages import listed
from laplace_lora_ext.models.weights import Block, View, strip_wrappers

Layers = Mapping[str, BaseTunerLayer]
"""PEFT's layers by their names."""

Selection = bool | str | Collection[str]
"""All heads, none, or those of some names as in `peft.LoraConfig`."""

# AdaLoRA has a factor between the two, its singular values.
_OF_LORA = ("lora_A", "lora_B", "lora_E", "lora_embedding_A", "lora_embedding_B")

# It scales what a layer returns by a magnitude over a norm, which is no part of the
# derivative: PEFT detaches it, as the DoRA paper does (section 4.3).
_DORA = "DoraLinearVariant"
_MAGNITUDE = "lora_magnitude_vector"

# Initialisations after which `lora_B` is 0.
_START_AT_ZERO = (True, "gaussian", "eva")

# It adds `B A` to a parameter, and never calls its linear halves.
_OF_PARAMETER = lora.layer.ParamWrapper


def find_blocks(
    model: nn.Module,
    target_modules: str | Sequence[str] | None = None,
    layers_to_transform: int | Iterable[int] | None = None,
    weight_names: Collection[str] | None = None,
    modules_to_save: Selection = False,
) -> list[Block]:
    """Find the active adapter's weights, in the order of the model's parameters.

    They are those of its LoRA layers and, with `modules_to_save`, weights and biases of
    its heads.

    Of a layer that was trained with one of its weights frozen, as LoRA-FA freezes
    `lora_A`, the other one takes part alone. An adapter that was loaded for inference
    has both frozen, and both take part, since a loaded adapter does not say which of
    its weights were frozen in training. With `weight_names`, those of `Block.known_as`,
    these weights take part alone, frozen or not; DoRA's magnitudes do so only then.
    `target_modules` and `layers_to_transform` select layers as in `peft.LoraConfig`,
    and `modules_to_save` selects heads, or all if it is True.

    Besides LoRA of linear layers there is LoRA of embeddings, convolutions and
    parameters, with a block for each expert in these, and PEFT's trainable tokens.

    A `ValueError` if there is no such layer, if the adapter is merged, disabled or not
    the only active one, or if a selection matches nothing. A
    `NotImplementedError` if layers share weights, if a head is not linear, and for LoRA
    of `nn.MultiheadAttention`, FSDP1 and DeepSpeed ZeRO-3.
    """
    adapter = active_adapter(model)
    layers = {
        name: layer
        for name, layer in adapter_layers(model).items()
        if adapter in _adapters_of(layer)
    }
    if weight_names is not None:
        selects = target_modules is not None or layers_to_transform is not None
        if selects or modules_to_save:
            raise ValueError(
                "weight_names name all weights that take part: leave out "
                "target_modules, layers_to_transform and modules_to_save."
            )
        blocks = _named(model, layers, adapter, weight_names)
    else:
        selected = _selected(layers, target_modules, layers_to_transform)
        blocks = _trained(selected, adapter)
        blocks += _select_heads(model, adapter, modules_to_save)
    _check_linear([block for block in blocks if block.kind == "head"])
    _check_own(model, blocks)
    # As the model's parameters, whose order the host keeps to.
    places = {id(weight): place for place, weight in enumerate(model.parameters())}
    return sorted(blocks, key=lambda block: places[id(block.weight)])


def adapter_layers(model: nn.Module) -> dict[str, BaseTunerLayer]:
    """Find PEFT's layers of LoRA and trainable tokens by name, without wrappers."""
    kinds = (lora.LoraLayer, TrainableTokensLayer)
    return {
        strip_wrappers(name): module
        for name, module in model.named_modules()
        # Not those that are tied to a layer with its weights.
        if isinstance(module, kinds) and getattr(module, "tied_adapter", None) is None
    }


def active_adapter(model: nn.Module) -> str:
    """Return the one adapter that runs in passes; errors are those of `find_blocks`."""
    _check_reachable(model)
    layers = adapter_layers(model)
    if not layers:
        configs = getattr(model, "peft_config", {}).values()
        # An enumeration's members print with their class.
        kinds = listed([c.peft_type.value for c in configs]) or "no adapter"
        raise ValueError(
            f"No LoRA layer in the model (found {kinds}). Add one, or load one not "
            "merged. Of some other adapters peft.save_as_lora makes LoRA."
        )
    idle = find_idle(layers)
    if idle is not None:
        raise ValueError(idle)
    active: set[str] = set()
    for layer in layers.values():
        # An adapter may be active in layers where it has no weights.
        active |= set(layer.active_adapters) & _adapters_of(layer)
    if len(active) != 1:
        raise ValueError(
            f"One adapter must be active, and not {listed(sorted(active)) or 'none'}: "
            "call model.set_adapter(name)."
        )
    return active.pop()


def _matrices(name: str, layer: BaseTunerLayer, adapter: str) -> Iterator[Block]:
    """Make the blocks of a layer's matrices, whichever of them take part."""
    # DoRA adds its part to the names a second time.
    for part in dict.fromkeys(layer.adapter_layer_names):
        holder: Any = getattr(layer, part, {})
        if adapter not in holder:
            continue
        weight_name = f"{_adapted(name, layer)}.{part}.{adapter}"
        if isinstance(holder, nn.ParameterDict):
            module: nn.Module = holder
            parameter = adapter
        else:
            module = holder[adapter]
            parameter = "weight"
            weight_name += ".weight"
        weight = module._parameters.get(parameter)
        if weight is None:
            raise NotImplementedError(
                f"{name} has a {type(module).__name__} among its weights, as of "
                "MonteCLoRA, and not matrices alone: leave it out of the adapter."
            )
        # A layer of LoRA then adds `B(A(x))`.
        calls_halves = not isinstance(layer, _OF_PARAMETER)
        calls_halves &= _variant(layer, adapter) in ("", _DORA)
        for suffix, view in _views(layer, part, weight):
            shape = weight.shape if view is None else view.matrix_shape
            yield Block(
                name=weight_name + suffix,
                adapter=adapter,
                module=module,
                small_output=part.endswith("_A")
                or (not part.endswith("_B") and shape[0] <= shape[1]),
                has_rows=type(module) is nn.Linear and calls_halves,
                site=name,
                owner=layer,
                parameter=parameter,
                view=view,
                kind="lora" if part in _OF_LORA else "other",
            )


def _adapted(name: str, layer: BaseTunerLayer) -> str:
    """Name a layer by what it adapts: of a parameter, one module may have several."""
    is_of_parameter = isinstance(layer, _OF_PARAMETER)
    return f"{_module_of(name)}.{layer.parameter_name}" if is_of_parameter else name


def _module_of(name: str) -> str:
    """Name the module that PEFT puts a layer, or several, around."""
    return re.sub(r"(\.token_adapter|(\.base_layer)+)$", "", name)


def _views(
    layer: BaseTunerLayer, part: str, weight: Tensor
) -> Iterator[tuple[str, View | None]]:
    """Say how a parameter holds matrices, with what their names end in."""
    n_experts = layer.num_experts if isinstance(layer, _OF_PARAMETER) else 1
    if n_experts > 1:
        m, n = weight.shape
        for place in range(n_experts):
            # In PEFT's own order: of B, the experts' columns alternate; of A, each
            # expert's rows follow each other.
            if part == "lora_B":
                view = View((m, n // n_experts, n_experts), -1, place)
            else:
                view = View((n_experts, m // n_experts, n), -3, place)
            yield f"[{place}]", view
    elif weight.ndim == 2:
        yield "", None
    else:  # the magnitudes of a layer, or the kernels of a convolution
        m = weight.numel() if part == _MAGNITUDE else len(weight)
        yield "", View((m, weight.numel() // m))


def check_known_to_host(blocks: Sequence[Block]) -> None:
    """Refuse what curvlinops can't see, and DoRA, whose calls lack a weight's input."""
    unseen = [
        block.name
        for block in blocks
        if not block.has_rows
        or (block.owner and _variant(block.owner, block.adapter) == _DORA)
    ]
    if unseen:
        raise NotImplementedError(
            'hessian_structure="kron" sees LoRA of linear layers alone, without DoRA, '
            f"and heads with their biases, and not {listed(unseen)}: leave these out, "
            'or use the structures "lowrank_kron", "diag" or "full".'
        )


def is_untrained(blocks: Sequence[Block]) -> bool:
    """Tell whether the matrices that start at 0 are still there.

    `lora_B`, or A of embeddings.
    """
    at_first = [
        b for b in blocks if ".lora_B." in b.name or ".lora_embedding_A." in b.name
    ]
    return bool(at_first) and not any(block.values.any() for block in at_first)


def looks_trained(model: nn.Module, blocks: Sequence[Block]) -> bool:
    """Tell whether an adapter whose `lora_B` starts at 0 is not there any more."""
    adapter = blocks[0].adapter
    configs = [getattr(m, "peft_config", {}).get(adapter) for m in model.modules()]
    # Others start anywhere: orthogonal, OLoRA, PiSSA, MiCA and so on.
    starts_at_zero = all(
        getattr(each, "init_lora_weights", True) in _START_AT_ZERO for each in configs
    )
    return starts_at_zero and not is_untrained(blocks)


def find_idle(layers: Layers) -> str | None:
    """Find a LoRA layer that takes no part in passes, and say why; None if all do."""
    for name, layer in layers.items():
        if layer.merged:
            return (
                f"LoRA layer {name} is merged into the base model: call "
                "model.unmerge_adapter() first."
            )
        if layer.disable_adapters:
            return f"LoRA layer {name} is disabled: call model.enable_adapter_layers()."
    return None


def _adapters_of(layer: BaseTunerLayer) -> set[str]:
    """List the adapters that have weights in the layer."""
    return {
        name for part in layer.adapter_layer_names for name in getattr(layer, part, ())
    }


def _check_reachable(model: nn.Module) -> None:
    """Refuse what hides weights, or their gradients (`NotImplementedError`)."""
    is_fsdp1 = any(
        type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()
    )
    is_zero3 = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    if is_fsdp1 or is_zero3:
        raise NotImplementedError(
            "FSDP1 and DeepSpeed ZeRO-3 hide LoRA weights from their layers: shard "
            "with fully_shard (FSDP2), or load the adapter without them."
        )
    attentions = [
        name
        for name, layer in adapter_layers(model).items()
        if isinstance(layer.get_base_layer(), nn.MultiheadAttention)
    ]
    if attentions:
        # In each pass PEFT adds `B A` to the base weights and subtracts it again, which
        # rounds them, and part of it is added outside of the graph.
        raise NotImplementedError(
            "PEFT's gradients for LoRA of nn.MultiheadAttention are not those of its "
            f"outputs: {listed(attentions)}. Adapt other layers."
        )


def _selected(
    layers: Layers,
    target_modules: str | Sequence[str] | None,
    layers_to_transform: int | Iterable[int] | None,
) -> Layers:
    """Select layers as `peft.LoraConfig` does by name; an error if it matches none."""
    if target_modules is None and layers_to_transform is None:
        return layers
    indices, names = layers_to_transform, target_modules
    if names is None:  # PEFT reads layer indices only beside names of modules
        names = [name.rpartition(".")[2] for name in layers]
    config = LoraConfig(
        target_modules=names if isinstance(names, str) else list(names),
        layers_to_transform=list(indices) if isinstance(indices, Iterable) else indices,
    )
    selected = {
        name: layer
        for name, layer in layers.items()
        # By its module, or by the parameter of it that it adapts.
        if any(
            check_target_module_exists(config, each)
            for each in (_module_of(name), _adapted(name, layer))
        )
    }
    if not selected:
        raise ValueError(
            f"No LoRA layer matches target_modules={target_modules!r} and "
            f"layers_to_transform={config.layers_to_transform!r}; there are "
            f"{listed(list(layers))}."
        )
    return selected


def _trained(layers: Layers, adapter: str) -> list[Block]:
    """Make the blocks of some layers' trained matrices; see `find_blocks`."""
    blocks: list[Block] = []
    for name, layer in layers.items():
        # DoRA's magnitudes scale what a layer returns, which few want to be uncertain.
        of_layer = [
            block
            for block in _matrices(name, layer, adapter)
            if f".{_MAGNITUDE}." not in block.name
        ]
        trained = [block for block in of_layer if block.weight.requires_grad]
        blocks += trained or of_layer
    return blocks


def _named(
    model: nn.Module, layers: Layers, adapter: str, weight_names: Collection[str]
) -> list[Block]:
    """Make blocks of weights, trained or not; an error if one is not there."""
    names = {weight_names} if isinstance(weight_names, str) else set(weight_names)
    there = _head_blocks(model, adapter)
    for name, layer in layers.items():
        there += _matrices(name, layer, adapter)
    blocks = [block for block in there if block.known_as in names]
    missing = sorted(names - {block.known_as for block in blocks})
    if missing:
        raise ValueError(
            f"The model has none of the weights {listed(missing)}; there are "
            f"the LoRA layers {listed(list(layers))}."
        )
    return blocks


def _check_own(model: nn.Module, blocks: Sequence[Block]) -> None:
    """Refuse weights that several layers share: a hook sees only one layer."""
    holders: Counter[int] = Counter()
    for module in model.modules():
        own = module._parameters.values()
        holders.update(_memory_of(weight) for weight in own if weight is not None)
    shared = [block.name for block in blocks if holders[_memory_of(block.weight)] > 1]
    if shared:
        raise NotImplementedError(
            "Layers share weights: give each its own parameters, or leave out "
            f"{listed(shared)}."
        )


def _memory_of(weight: Tensor) -> int:
    """Number the memory of a weight: PEFT ties some as transposed views of others."""
    # A weight that is sharded or offloaded has no address.
    return weight.data_ptr() or id(weight)


def _variant(layer: BaseTunerLayer, adapter: str) -> str:
    """Name the kind of LoRA, such as "AloraLinearVariant"; "" for plain LoRA."""
    variant = getattr(layer, "lora_variant", {}).get(adapter)
    return "" if variant is None else type(variant).__name__


# --- heads that were trained beside LoRA weights: PEFT's `modules_to_save` ------------


def _head_blocks(model: nn.Module, adapter: str) -> list[Block]:
    """Make the blocks of all weights and biases of an adapter's heads."""
    heads = {
        f"{name}.modules_to_save.{adapter}": wrapper.modules_to_save[adapter]
        for name, wrapper in model.named_modules()
        if isinstance(wrapper, ModulesToSaveWrapper)
        and adapter in wrapper.modules_to_save
    }
    layers = {
        strip_wrappers(site): layer
        for name, head in heads.items()
        for site, layer in head.named_modules(prefix=name)
    }
    return [
        _head_block(site, adapter, layer, parameter)
        for site, layer in layers.items()
        for parameter, weight in layer._parameters.items()
        if weight is not None
    ]


def _head_block(site: str, adapter: str, layer: Any, parameter: str) -> Block:
    """Make the block of a weight, or of a bias: that of an input which is always 1."""
    is_bias = parameter == "bias"
    shape = layer._parameters[parameter].shape
    return Block(
        name=f"{site}.{parameter}",
        adapter=adapter,
        module=layer,
        small_output=not is_bias and shape[:1] <= shape[-1:],
        has_rows=True,
        site=site,
        parameter=parameter,
        view=View((*shape, 1)) if is_bias else None,
        kind="head",
    )


def _select_heads(model: nn.Module, adapter: str, selection: Selection) -> list[Block]:
    """Select weights and biases of an adapter's heads, all or by name.

    Frozen ones are left out, unless all are frozen, as in adapters that were loaded for
    inference. A `ValueError` if there is no head of such a name.
    """
    if not selection:
        return []
    blocks = _head_blocks(model, adapter)
    blocks = [block for block in blocks if block.weight.requires_grad] or blocks
    if selection is True:
        selection = {_known_layer(block) for block in blocks}
    names = {selection} if isinstance(selection, str) else set(selection)

    def is_named(block: Block, name: str) -> bool:
        # PEFT compares the ends of names, too, of a layer or of its module.
        return f"{name}." in f"{_known_layer(block)}."

    missing = [n for n in names if not any(is_named(block, n) for block in blocks)]
    if missing or not blocks:
        there = listed(sorted({_known_layer(block) for block in blocks}))
        wanted = listed(sorted(missing)) or "at all"
        raise ValueError(
            f"The adapter {adapter!r} has no modules_to_save {wanted}: it was trained "
            f"with {there or 'none'}."
        )
    return [block for block in blocks if any(is_named(block, n) for n in names)]


def _known_layer(block: Block) -> str:
    """Name the layer as users know it, without PEFT's wrapper."""
    return block.site.replace(f".modules_to_save.{block.adapter}", "")


def _check_linear(heads: Sequence[Block]) -> None:
    """Refuse weights of heads whose rows no hook sees."""
    for block in heads:
        kind = type(block.module)
        if kind is not nn.Linear:
            raise NotImplementedError(
                f"{_known_layer(block)}.{block.parameter} is a weight of "
                f"{kind.__name__}, and a head has a "
                "posterior over its linear layers alone: name these in "
                "modules_to_save, such as 'classifier.out_proj', and the rest stays at "
                "its MAP value."
            )

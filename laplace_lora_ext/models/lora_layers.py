"""Finds the LoRA weights of a model, and refuses those that are not two plain linear maps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, tuners
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from torch import nn

from laplace_lora_ext.messages import warn
from laplace_lora_ext.models.convolutions import channels_last, is_convolution, patches
from laplace_lora_ext.models.placement import (
    check_reachable,
    device_of,
    is_absent,
    is_elsewhere,
    values_of,
)

_LISTED = 8

# Linear `lora_A` and `lora_B` by type, yet not applied as `B(A(x))`.
_NOT_PLAIN = tuple(
    getattr(lora.layer, name)
    for name in ("MultiheadAttention", "ParamWrapper")
    if hasattr(lora.layer, name)
)

_X_LORA = getattr(tuners, "XLoraModel", ())  # from PEFT 0.12 on


@dataclass(frozen=True)
class Block:
    """One LoRA weight matrix.

    Attributes
    ----------
    name : str
        of the weight, without the prefixes that wrappers add
    layer : torch.nn.Linear, torch.nn.Conv1d or torch.nn.Conv2d
        `lora_A` or `lora_B`, whose weight `(m, n)` the block is; n are the numbers of a patch where
        it is a convolution
    small_output : bool
        whether the LoRA rank is the size of the layer's output (`lora_A`) or of its input
    owner : peft.tuners.lora.LoraLayer or None
        PEFT's layer that it is part of
    """

    name: str
    layer: nn.Linear | nn.Conv1d | nn.Conv2d
    small_output: bool
    owner: Any = None

    @property
    def weight(self) -> torch.Tensor:
        return self.layer.weight

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n)."""
        return self.weight.shape[0], self.weight.shape[1:].numel()

    @property
    def values(self) -> torch.Tensor:
        """The weight without a graph, wherever it is."""
        return values_of(self.layer)

    @property
    def device(self) -> torch.device:
        """Where the layer computes."""
        return device_of(self.layer)

    def input_rows(self, inputs: torch.Tensor) -> torch.Tensor:
        """What the layer was given as rows `(..., n)`."""
        return inputs if isinstance(self.layer, nn.Linear) else patches(self.layer, inputs)

    def output_rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """What it returns, or gradients of that, as rows `(..., m)`."""
        return outputs if isinstance(self.layer, nn.Linear) else channels_last(self.layer, outputs)

    @property
    def adapter(self) -> str:
        """Name of the adapter that the weight belongs to."""
        return self.name.split(".")[-2]

    @property
    def matrix(self) -> str:
        """Which of the two it is: "lora_A" or "lora_B"."""
        return self.name.split(".")[-3]

    @property
    def lora_layer(self) -> str:
        """Name of the LoRA layer that it is part of."""
        return self.name.rsplit(".", 3)[0]

    @property
    def transformer_layer(self) -> str:
        """Name up to the layer's number, such as "model.layers.3"; else the module's name."""
        name = re.sub(r"^(base_model\.model\.)?", "", self.name)
        numbered = re.match(r".*?\.\d+(?=\.)", name)
        return numbered.group() if numbered else re.sub(r"\.lora_[AB]\..*", "", name)

    def small_side_first(self, weights: torch.Tensor) -> torch.Tensor:
        """`(..., m, n)` weights as `(..., r, d)`, and back."""
        return weights if self.small_output else weights.mT

    @property
    def statistics_dtype(self) -> torch.dtype:
        """What the block's statistics and posterior are held in: float32 or better."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    @property
    def place(self) -> tuple[torch.device, torch.dtype]:
        """Where its statistics and posterior belong, and their precision."""
        return self.device, self.statistics_dtype


def find_blocks(
    model: nn.Module,
    target_modules: str | Sequence[str] | None = None,
    layers_to_transform: int | Iterable[int] | None = None,
) -> list[Block]:
    """LoRA weights of the active adapter, in the order of the model's parameters.

    Selection is by structure, not by `requires_grad`: an adapter that was loaded for inference
    counts as well.

    Parameters
    ----------
    model : torch.nn.Module
        a `PeftModel`, or any module that holds LoRA layers
    target_modules, layers_to_transform
        as in `peft.LoraConfig`: which LoRA layers take part; all if omitted

    Returns
    -------
    list of Block
        `lora_A`, then `lora_B` of each layer

    Raises
    ------
    ValueError
        If there is no LoRA layer, if the adapter is merged, disabled or not the only active
        one, if its weights are on the meta device, or if nothing matches the selection.
    NotImplementedError
        If LoRA layers of the adapter are not two linear maps of their own.
    """
    if any(isinstance(module, _X_LORA) for module in model.modules()):
        raise NotImplementedError(
            "X-LoRA weighs several adapters anew for every token, so that none is a linear map: "
            "take one of them as a plain LoRA adapter."
        )
    check_reachable(model)
    layers = _by_stripped_name(
        {n: m for n, m in model.named_modules() if isinstance(m, lora.LoraLayer)}
    )
    if not layers:
        raise ValueError(_no_lora_message(model))
    adapter = _active_adapter(layers)
    layers = {name: layer for name, layer in layers.items() if adapter in _adapters(layer)}
    layers = _select(layers, target_modules, layers_to_transform)
    _refuse_unsupported(layers, adapter)
    blocks = [
        Block(
            f"{name}.{part}.{adapter}.weight",
            getattr(layer, part)[adapter],
            part == "lora_A",
            layer,
        )
        for name, layer in layers.items()
        for part in ("lora_A", "lora_B")
    ]
    on_meta = [block.name for block in blocks if is_absent(block.layer)]
    if on_meta:
        raise ValueError(f"Load the weights first: on the meta device are {_listed(on_meta)}.")
    return blocks


def check_without_dora(blocks: Sequence[Block]) -> None:
    """Refuse DoRA, for backends that take all that a layer is called with for inputs.

    Raises
    ------
    NotImplementedError
        If a layer has DoRA.
    """
    with_dora = [b.name for b in blocks if b.owner is not None and _has_dora(b.owner, b.adapter)]
    if with_dora:
        raise NotImplementedError(
            "The host's backends don't know DoRA, which calls LoRA layers with more than their "
            f'inputs: {_listed(with_dora)}. Without `backend`, the structures "lowrank_kron", '
            '"diag" and "full" do.'
        )


def warn_if_untrained(blocks: Sequence[Block]) -> None:
    """Warn where every `lora_B` is 0, as PEFT initialises it."""
    if not any(block.values.any() for block in blocks if block.matrix == "lora_B"):
        warn(
            "Every lora_B weight is 0: the adapter looks untrained, and the curvature of every "
            "lora_A is 0."
        )


def warn_of_other_trainable(model: nn.Module) -> None:
    """Warn once of trainable parameters that are not LoRA weights, and so are held fixed."""
    names = [
        strip_wrappers(name)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not re.search(r"\.lora_[AB]\..*\.weight$", name)
    ]
    if names:
        warn(
            "The posterior is over lora_A and lora_B weights alone. Held at their MAP value, "
            f"though trainable: {_listed(names)}."
        )


def strip_wrappers(name: str) -> str:
    """Drop the names that DistributedDataParallel and torch.compile put in front."""
    return re.sub(r"(^|\.)((module|_orig_mod)\.)+", r"\1", name)


def _by_stripped_name(layers: dict[str, lora.LoraLayer]) -> dict[str, lora.LoraLayer]:
    stripped = {strip_wrappers(name): layer for name, layer in layers.items()}
    return stripped if len(stripped) == len(layers) else layers


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _no_lora_message(model: nn.Module) -> str:
    tuners = {type(m).__name__ for m in model.modules() if isinstance(m, BaseTunerLayer)}
    for config in getattr(model, "peft_config", {}).values():
        tuners.add(str(getattr(config.peft_type, "value", config.peft_type)))
    found = f"found {', '.join(sorted(tuners))}" if tuners else "found no adapter at all"
    return f"No LoRA layer in the model ({found}). Add one with peft.get_peft_model."


def _adapters(layer: lora.LoraLayer) -> set[str]:
    """Names of all adapters that have weights in the layer."""
    return {name for part in layer.adapter_layer_names for name in getattr(layer, part, ())}


def _active_adapter(layers: dict[str, lora.LoraLayer]) -> str:
    """The one adapter that runs in a forward pass.

    `peft.get_layer_status` says as much of a model, from PEFT 0.12 on only.
    """
    merged = [name for name, layer in layers.items() if layer.merged]
    if merged:
        raise ValueError(f"Merged into {_listed(merged)}: call model.unmerge_adapter() first.")
    disabled = [name for name, layer in layers.items() if layer.disable_adapters]
    if disabled:
        raise ValueError(
            f"Adapters are disabled in {_listed(disabled)}: call model.enable_adapter_layers()."
        )
    active = {
        adapter
        for layer in layers.values()
        for adapter in layer.active_adapters
        if adapter in _adapters(layer)
    }
    if len(active) != 1:
        state = f"Several adapters are active ({', '.join(sorted(active))})"
        raise ValueError(
            f"{state if active else 'No adapter is active'}: call model.set_adapter(name)."
        )
    return active.pop()


def _select(
    layers: dict[str, lora.LoraLayer],
    target_modules: str | Sequence[str] | None,
    layers_to_transform: int | Iterable[int] | None,
) -> dict[str, lora.LoraLayer]:
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
            f"layers_to_transform={layers_to_transform!r}; there are {_listed(list(layers))}."
        )
    return selected


def _refuse_unsupported(layers: dict[str, lora.LoraLayer], adapter: str) -> None:
    unsupported = [
        f"{name} ({type(layer).__name__}{_variant(layer, adapter)})"
        for name, layer in layers.items()
        if isinstance(layer, _NOT_PLAIN)
        or _variant(layer, adapter)
        or any(
            adapter not in getattr(layer, part) or not _is_linear_map(getattr(layer, part)[adapter])
            for part in ("lora_A", "lora_B")
        )
    ]
    if unsupported:
        raise NotImplementedError(
            "Only LoRA layers that add B(A(x)) with linear A and B are supported. These are not: "
            f"{_listed(unsupported)}. Leave them out with target_modules."
        )
    owners: dict[int, list[str]] = {}
    for name, layer in layers.items():
        for part in ("lora_A", "lora_B"):
            weight = getattr(layer, part)[adapter].weight
            if not is_elsewhere(weight):
                owners.setdefault(weight.data_ptr(), []).append(f"{name}.{part}")
    shared = [" = ".join(names) for names in owners.values() if len(names) > 1]
    if shared:
        raise NotImplementedError(f"LoRA weights that share storage: {_listed(shared)}.")


def _is_linear_map(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear or is_convolution(layer)


def _variant(layer: lora.LoraLayer, adapter: str) -> str:
    """`", AloraLinearVariant"` and the like, empty for plain LoRA and for DoRA of linear layers."""
    variant = getattr(layer, "lora_variant", {}).get(adapter)
    return "" if variant is None or _has_dora(layer, adapter) else f", {type(variant).__name__}"


def _has_dora(layer: lora.LoraLayer, adapter: str) -> bool:
    """Whether a linear layer has DoRA, which scales what it returns by a magnitude over a norm.

    The norm is no part of the derivative: PEFT detaches it, as the DoRA paper does (section 4.3).
    """
    variant = getattr(layer, "lora_variant", {}).get(adapter)
    if variant is not None:
        return type(variant).__name__ == "DoraLinearVariant"
    return bool(getattr(layer, "use_dora", {}).get(adapter, False))

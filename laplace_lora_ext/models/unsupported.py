"""LoRA layers that are not two plain linear maps, and other adapters: refused by name."""

from __future__ import annotations

from collections.abc import Mapping

from peft import tuners
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from laplace_lora_ext.messages import listed
from laplace_lora_ext.models.convolutions import is_convolution
from laplace_lora_ext.models.embeddings import halves, is_embedding, obstacle
from laplace_lora_ext.models.placement import is_elsewhere

# Linear `lora_A` and `lora_B` by type, yet not applied as `B(A(x))`.
_NOT_PLAIN = tuple(
    getattr(lora.layer, name)
    for name in ("MultiheadAttention", "ParamWrapper")
    if hasattr(lora.layer, name)
)

_X_LORA = getattr(tuners, "XLoraModel", ())  # from PEFT 0.12 on


def check_tuner(model: nn.Module) -> None:
    """Refuse X-LoRA, which uses LoRA layers in another way (`NotImplementedError`)."""
    if any(isinstance(module, _X_LORA) for module in model.modules()):
        raise NotImplementedError(
            "X-LoRA weighs several adapters anew for every token, so none of them is a linear map: "
            "load one of them as a plain LoRA adapter."
        )


def other_tuners(model: nn.Module) -> str:
    """What a model without LoRA layers has in their place, for an error message."""
    found = {type(m).__name__ for m in model.modules() if isinstance(m, BaseTunerLayer)}
    for config in getattr(model, "peft_config", {}).values():
        found.add(str(getattr(config.peft_type, "value", config.peft_type)))
    return ", ".join(sorted(found)) or "no adapter at all"


def check_plain(layers: Mapping[str, lora.LoraLayer], adapter: str) -> None:
    """Refuse layers that do not add `B(A(x))` with linear A and B (`NotImplementedError`)."""
    unsupported = [
        f"{name} ({type(layer).__name__}{_detail(layer, adapter)})"
        for name, layer in layers.items()
        if isinstance(layer, _NOT_PLAIN) or _detail(layer, adapter) or not _is_plain(layer, adapter)
    ]
    if unsupported:
        raise NotImplementedError(
            "LoRA layers must add B(A(x)) with linear A and B. These do not: "
            f"{listed(unsupported)}. Leave them out with target_modules."
        )


def check_apart(layers: Mapping[str, lora.LoraLayer], adapter: str) -> None:
    """Refuse LoRA weights that share their storage (`NotImplementedError`)."""
    owners: dict[int, list[str]] = {}
    for name, layer in layers.items():
        for part, half in zip(("lora_A", "lora_B"), halves(layer, adapter), strict=True):
            if not is_elsewhere(half.weight):
                owners.setdefault(half.weight.data_ptr(), []).append(f"{name}.{part}")
    shared = [" = ".join(names) for names in owners.values() if len(names) > 1]
    if shared:
        raise NotImplementedError(
            f"LoRA weights share their storage: {listed(shared)}. Give each its own parameter, "
            "without PEFT's ensure_weight_tying."
        )


def check_parameters(layers: Mapping[str, lora.LoraLayer], adapter: str) -> None:
    """Refuse LoRA weights that are computed anew before every pass.

    Raises
    ------
    NotImplementedError
        The message lists them.
    """
    computed = [
        f"{name}.{part}"
        for name, layer in layers.items()
        for part, half in zip(("lora_A", "lora_B"), halves(layer, adapter), strict=True)
        if not isinstance(half.weight, nn.Parameter)
    ]
    if computed:
        raise NotImplementedError(
            "LoRA weights are computed from other parameters, as torch.nn.utils.prune and "
            f"weight_norm do: {listed(computed)}. Make them parameters again, with prune.remove or "
            "remove_weight_norm."
        )


def has_dora(layer: lora.LoraLayer, adapter: str) -> bool:
    """Whether a linear layer has DoRA, which scales what it returns by a magnitude over a norm.

    The norm is no part of the derivative: PEFT detaches it, as the DoRA paper does (section 4.3).
    """
    variant = getattr(layer, "lora_variant", {}).get(adapter)
    if variant is not None:
        return type(variant).__name__ == "DoraLinearVariant"
    return bool(getattr(layer, "use_dora", {}).get(adapter, False))


def _is_plain(layer: lora.LoraLayer, adapter: str) -> bool:
    if is_embedding(layer):
        return not has_dora(layer, adapter)  # of older PEFT
    if adapter not in layer.lora_A or adapter not in layer.lora_B:
        return False
    A, B = halves(layer, adapter)
    is_known_dora = type(A) is nn.Linear or not has_dora(layer, adapter)
    return is_known_dora and _is_linear_map(A) and _is_linear_map(B)


def _is_linear_map(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear or is_convolution(layer)


def _detail(layer: lora.LoraLayer, adapter: str) -> str:
    """`", AloraLinearVariant"` or `", max_norm"`, empty where nothing of the kind is in the way.

    DoRA of linear layers is not.
    """
    variant = getattr(layer, "lora_variant", {}).get(adapter)
    if variant is not None and not has_dora(layer, adapter):
        return f", {type(variant).__name__}"
    found = obstacle(layer) if is_embedding(layer) else None
    return f", {found}" if found else ""

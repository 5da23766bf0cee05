"""Heads that were trained beside LoRA weights: PEFT's `modules_to_save`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from peft.utils import ModulesToSaveWrapper
from torch import nn

from laplace_lora_ext.messages import listed
from laplace_lora_ext.models.weights import Block, LinearRows, View, strip_wrappers

Selection = bool | str | Collection[str]
"""All heads, none, or those of some names as in `peft.LoraConfig`."""


@dataclass(frozen=True)
class HeadWeight:
    """A weight or a bias of a head, of whatever kind."""

    head: str  # name of the module that PEFT wraps, without wrappers'
    inner: str  # name of the layer within it; "" if it is the layer
    adapter: str
    layer: nn.Module
    parameter: str  # name of the weight in the layer

    @property
    def site(self) -> str:
        """Name the layer as the model's own modules have it."""
        return _joined(f"{self.head}.modules_to_save.{self.adapter}", self.inner)

    @property
    def name(self) -> str:
        """Name the weight as the model's own parameters have it."""
        return f"{self.site}.{self.parameter}"

    @property
    def known_as(self) -> str:
        """Name the layer as users know it, without PEFT's wrapper."""
        return _joined(self.head, self.inner)

    @property
    def weight(self) -> nn.Parameter:
        """Return the parameter itself."""
        weight = self.layer._parameters[self.parameter]
        assert weight is not None
        return weight

    def is_named(self, name: str) -> bool:
        """Tell whether a name in `modules_to_save` is this layer's or its module's."""
        # PEFT compares the ends of names, too.
        module = self.head
        if module.endswith(name):
            return True
        for part in self.inner.split("."):
            module = _joined(module, part)
            if module.endswith(name):
                return True
        return False

    def block(self) -> Block:
        """Make its block; a `NotImplementedError` where it can have none."""
        layer = self.layer
        if type(layer) is not nn.Linear or self.parameter not in ("weight", "bias"):
            raise NotImplementedError(
                f"{self.known_as}.{self.parameter} is a weight of "
                f"{type(layer).__name__}, and a head has a posterior over its linear "
                "layers alone: name these in modules_to_save, such as "
                "'classifier.out_proj', and the rest stays at its MAP value."
            )
        is_bias = self.parameter == "bias"
        return Block(
            name=self.name,
            adapter=self.adapter,
            module=layer,
            small_output=not is_bias and layer.out_features <= layer.in_features,
            rows=LinearRows(layer, site=self.site, of_bias=is_bias),
            parameter=self.parameter,
            # A bias is the weight of one input more, which is always 1.
            view=View((layer.out_features, 1)) if is_bias else None,
            kind="head",
        )


def head_weights(model: nn.Module, adapter: str) -> list[HeadWeight]:
    """List all weights and biases of an adapter's heads."""
    weights: list[HeadWeight] = []
    for name, wrapper in model.named_modules():
        if (
            not isinstance(wrapper, ModulesToSaveWrapper)
            or adapter not in wrapper.modules_to_save
        ):
            continue
        head = strip_wrappers(name)
        for inner, layer in wrapper.modules_to_save[adapter].named_modules():
            for parameter, weight in layer._parameters.items():
                if weight is not None:
                    weights.append(HeadWeight(head, inner, adapter, layer, parameter))
    return weights


def select_heads(
    model: nn.Module, adapter: str, selection: Selection
) -> list[HeadWeight]:
    """Select weights and biases of an adapter's heads, all or by name.

    Frozen ones are left out, unless a head is frozen as a whole, as adapters that were
    loaded for inference are. A `ValueError` if there is no head of such a name.
    """
    if not selection:
        return []
    weights = head_weights(model, adapter)
    trained = {each.head for each in weights if each.weight.requires_grad}
    weights = [
        each
        for each in weights
        if each.weight.requires_grad or each.head not in trained
    ]
    there = listed(sorted({each.known_as for each in weights}))
    if selection is True:
        if not weights:
            raise ValueError(
                f"modules_to_save=True, but the adapter {adapter!r} was trained "
                "without any: leave it out for a posterior over LoRA weights alone."
            )
        return weights
    names = [selection] if isinstance(selection, str) else list(selection)
    missing: list[str] = []
    for name in names:
        if not any(each.is_named(name) for each in weights):
            missing.append(name)
    if missing:
        raise ValueError(
            f"The adapter {adapter!r} has no modules_to_save {listed(missing)}: it has "
            f"{there or 'none'}."
        )
    return [each for each in weights if any(each.is_named(name) for name in names)]


def _joined(name: str, inner: str) -> str:
    return f"{name}.{inner}" if inner else name

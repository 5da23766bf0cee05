"""Whether a model is the one that a posterior was fitted to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from peft.tuners import lora
from torch import nn

from laplace_lora_ext.messages import listed
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import find_idle, lora_layers
from laplace_lora_ext.models.weights import (
    Block,
    bare_name,
    flattened,
    is_of_base,
    owner_of,
    read,
    strip_wrappers,
)

_SAMPLED = 32  # numbers of each weight that are compared: training moves all of them
_ROUNDING = 2**-6  # between two precisions of which one is bfloat16
# How far rounding moves numbers below the smallest normal one, of which float16's is 6e-5.
_ROUNDING_OF_SMALL = {
    str(dtype): torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
_MERGING = {str(dtype): 16 * torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}


class Weight(NamedTuple):
    """A few numbers `(n,)` of a weight, in float64 in main memory."""

    dtype: str
    shape: list[int]
    sample: torch.Tensor

    def equals(self, other: Weight) -> bool:
        """Whether both hold the same numbers, apart from rounding by casts or by merging."""
        if self.shape != other.shape or self.sample.shape != other.sample.shape:
            return False
        if torch.equal(self.sample, other.sample):
            return True
        if self.dtype != other.dtype:
            of_small = [_ROUNDING_OF_SMALL.get(dtype, 0.0) for dtype in (self.dtype, other.dtype)]
            tolerance = {"rtol": _ROUNDING, "atol": max(of_small)}
        else:  # merging an adapter and unmerging it rounds
            rounding = _MERGING.get(self.dtype, 0.0) * self.sample.abs().max().item()
            tolerance = {"rtol": 0.0, "atol": rounding}
        return torch.allclose(self.sample, other.sample, **tolerance, equal_nan=True)


@dataclass(frozen=True)
class ModelState:
    """All that predictions depend on, except the values of the LoRA weights."""

    # Shape and scaling by the name of the LoRA weight, without the adapter's name.
    blocks: dict[str, tuple[list[int], float | None]]
    class_token_ids: list[int] | None
    mask_token_id: int | None
    # Of the base model and the head, and of buffers that are saved with them. Names leave out the
    # adapter's. Left out altogether are other adapters, modules that this one replaces, weights
    # that are not in memory, quantized ones, and all weights of a model that FSDP2 shards.
    weights: dict[str, Weight]
    scalings: dict[str, float]  # of the adapter's LoRA layers that are not in the posterior

    @classmethod
    def of(cls, model: LogitsModel, blocks: Sequence[Block]) -> ModelState:
        """The state of a model as it is now."""
        adapter, modules = blocks[0].adapter, dict(model.model.named_modules())
        scalings = {
            strip_wrappers(name): float(layer.scaling[adapter])
            for name, layer in modules.items()
            if isinstance(layer, lora.LoraLayer) and adapter in layer.scaling
        }
        of_blocks = {b.known_as: (list(b.weight.shape), scalings.get(b.rows.site)) for b in blocks}
        weights = _sampled(dict(_other_weights(modules, blocks)))
        for block in blocks:
            scalings.pop(block.rows.site, None)
        return cls(of_blocks, model.class_token_ids, model.mask_token_id, weights, scalings)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> ModelState:
        """Rebuild what `state_dict` has returned."""
        weights = {name: Weight(*weight) for name, weight in state["weights"].items()}
        blocks = {name: (shape, scaling) for name, (shape, scaling) in state["blocks"].items()}
        return cls(**{**state, "weights": weights, "blocks": blocks})

    def state_dict(self) -> dict[str, Any]:
        """Names, numbers and tensors, ready for `torch.save`."""
        return vars(self) | {"weights": {name: tuple(w) for name, w in self.weights.items()}}

    def base_weights(self) -> dict[str, Weight]:
        """Those of `weights` that adapters of one base model share."""
        return {name: weight for name, weight in self.weights.items() if is_of_base(name)}

    def difference(self, now: ModelState) -> str | None:
        """What has changed, as a sentence without its full stop; None if nothing has."""
        before, after = self._facts(), now._facts()
        for what in before | after:
            if before.get(what) != after.get(what):
                return f"{what} was {before.get(what)} at the fit, and now is {after.get(what)}"
        for name, weight in self.weights.items():
            if name not in now.weights or not weight.equals(now.weights[name]):
                return f"The weight {name} differs from that of the fit"
        return None

    def _facts(self) -> dict[str, Any]:
        """What must be equal exactly, by what it is."""
        facts = {"class_token_ids": self.class_token_ids, "mask_token_id": self.mask_token_id}
        facts |= {f"The LoRA weight {n} (shape, scaling)": x for n, x in self.blocks.items()}
        return facts | {f"The scaling of {name}": x for name, x in self.scalings.items()}


def check_runs(model: LogitsModel, blocks: Sequence[Block]) -> None:
    """Refuse a model whose LoRA layers are merged, disabled or gone, by a `RuntimeError`."""
    present: set[int] = set()
    for module in model.model.modules():
        present.update(map(id, module._parameters.values()))
    idle = find_idle(lora_layers(model.model))
    if idle is not None:
        raise RuntimeError(idle)
    gone = [block.name for block in blocks if id(block.weight) not in present]
    if gone:
        raise RuntimeError(
            f"The model has lost LoRA weights of the posterior: {listed(gone)}. Make a new "
            "posterior, and fit it."
        )


def check_same(
    model: LogitsModel, blocks: Sequence[Block], fitted: ModelState, mean: torch.Tensor
) -> None:
    """Refuse a model that has changed since a fit, by a `RuntimeError` that names what has.

    `mean`, `(parameters,)`, are the LoRA weights of the fit, compared in their present precision.
    """
    check_runs(model, blocks)
    changed = first_changed(blocks, mean)
    if changed is not None:
        raise RuntimeError(
            f"The weights of LoRA layer {changed.name} have changed since the fit: fit again, or "
            "load the weights of the fit."
        )
    difference = fitted.difference(ModelState.of(model, blocks))
    if difference is not None:
        raise RuntimeError(f"{difference}: fit again, or undo the change.")


def first_changed(blocks: Sequence[Block], mean: torch.Tensor) -> Block | None:
    """The first LoRA weight whose present values, in their precision, are not those of a fit."""
    parts = mean.split([block.weight.numel() for block in blocks])
    pairs = zip((block.values.flatten() for block in blocks), parts, strict=True)
    differ = read([(values != part.to(values)).any() for values, part in pairs])
    return blocks[differ.index(True)] if any(differ) else None


def hashes(model: LogitsModel, blocks: Sequence[Block]) -> dict[str, str]:
    """Of what a fit depends on: fits of two processes belong together where these are equal."""
    state = ModelState.of(model, blocks)
    samples = [(n, w.dtype, w.shape, w.sample.tolist()) for n, w in state.weights.items()]
    parts = {
        "LoRA weights": flattened(blocks, torch.device("cpu")).double().numpy().tobytes(),
        "base or head": repr((state._facts(), samples)).encode(),
    }
    return {name: hashlib.sha256(part).hexdigest() for name, part in parts.items()}


def _other_weights(
    modules: Mapping[str, nn.Module], blocks: Sequence[Block]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of the base model, the head and other LoRA layers, by name; see `ModelState`."""
    adapter, ours = blocks[0].adapter, {id(block.weight) for block in blocks}
    if any(hasattr(type(module), "reshard") for module in modules.values()):
        return  # FSDP2 replaces parameters between passes
    for prefix, module in modules.items():
        for name, weight in [*module._parameters.items(), *module._buffers.items()]:
            if weight is None or id(weight) in ours or name in module._non_persistent_buffers_set:
                continue
            is_plain = type(weight.data) is torch.Tensor and weight.is_floating_point()
            known_as = _known_as(f"{prefix}.{name}", adapter)
            if known_as is not None and is_plain and not weight.is_meta:
                yield known_as, weight


def _sampled(weights: dict[str, torch.Tensor]) -> dict[str, Weight]:
    """A few numbers of each weight, with one wait for each device."""
    places: dict[Any, list[str]] = {}
    for name, weight in weights.items():
        places.setdefault((weight.device, weight.dtype), []).append(name)
    samples: dict[str, torch.Tensor] = {}
    for names in places.values():
        flat = [weights[name].detach().flatten() for name in names]
        few = [w[:: max(1, len(w) // _SAMPLED)][:_SAMPLED] for w in flat]
        numbers = torch.cat(few).cpu().double().split([len(sample) for sample in few])
        samples.update(zip(names, numbers, strict=True))
    return {n: Weight(str(w.dtype), list(w.shape), samples[n]) for n, w in weights.items()}


@lru_cache(2**16)  # every call of a posterior asks for all of them
def _known_as(name: str, adapter: str) -> str | None:
    """None for weights of other adapters, and of modules that this one replaces."""
    if owner_of(name) not in (None, adapter) or ".original_module." in name:
        return None
    return bare_name(name)

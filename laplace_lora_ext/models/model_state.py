"""What a posterior depends on besides its LoRA weights: scalings, answers, all other weights."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from laplace_lora_ext.models.adapter_state import scalings, scalings_in
from laplace_lora_ext.models.locks import lock_of
from laplace_lora_ext.models.logits_model import LogitsModel, find_transformer
from laplace_lora_ext.models.lora_layers import Block, strip_wrappers
from laplace_lora_ext.undoing import undoing

_SAMPLED = 32  # numbers of each weight that are compared: training moves all of them
_ROUNDING = 2**-6  # between two precisions of which one is bfloat16
_MERGING = {str(dtype): 16 * torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}

_OF_ADAPTER = re.compile(r"\.(lora_\w+|modules_to_save)\.([^.]+)")


class Weight(NamedTuple):
    """A few numbers of a weight, in float64."""

    dtype: str
    shape: list[int]
    sample: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> Weight:
        return cls(str(weight.dtype), list(weight.shape), _sample(weight).cpu().double().clone())

    def equals(self, other: Weight) -> bool:
        """Whether both hold the same numbers, apart from rounding by casts or by merging."""
        if self.shape != other.shape or self.sample.shape != other.sample.shape:
            return False
        if self.dtype != other.dtype:
            tolerance = {"rtol": _ROUNDING, "atol": 0.0}
        else:  # merging an adapter and unmerging it rounds
            rounding = _MERGING.get(self.dtype, 0.0) * max(self.sample.abs().tolist(), default=0.0)
            tolerance = {"rtol": 0.0, "atol": rounding}
        return bool(torch.isclose(self.sample, other.sample, **tolerance, equal_nan=True).all())


@dataclass(frozen=True)
class ModelState:
    """All that predictions depend on, except the values of the LoRA weights.

    Attributes
    ----------
    blocks : dict
        shape and scaling by the name of the LoRA weight, without the adapter's name
    class_token_ids, mask_token_id
        of the `LogitsModel`
    weights : dict
        a `Weight` for each floating-point weight of the base model and the head, by name, and for
        each buffer that is saved with them. Names leave out the adapter's, and other adapters are
        left out altogether
    scalings : dict
        of the LoRA layers of the adapter that are not in the posterior, by name
    """

    blocks: dict[str, tuple[list[int], float | None]]
    class_token_ids: list[int] | None
    mask_token_id: int | None
    weights: dict[str, Weight]
    scalings: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, model: LogitsModel, blocks: Sequence[Block]) -> ModelState:
        """The state of a model as it is now."""
        everywhere, ours = scalings_in(model, blocks[0].adapter), {b.lora_layer for b in blocks}
        return cls(
            {
                _without_adapter(block.name, block.adapter): (list(block.weight.shape), scaling)
                for block, scaling in zip(blocks, scalings(blocks), strict=True)
            },
            model.class_token_ids,
            model.mask_token_id,
            {name: Weight.of(weight) for name, weight in other_weights(model, blocks)},
            {name: scaling for name, scaling in everywhere.items() if name not in ours},
        )

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> ModelState:
        """Rebuild what `state_dict` has returned."""
        weights = {name: Weight(*weight) for name, weight in state["weights"].items()}
        blocks = {name: (shape, scaling) for name, (shape, scaling) in state["blocks"].items()}
        answers = state["class_token_ids"], state["mask_token_id"]
        return cls(blocks, *answers, weights, dict(state.get("scalings", {})))

    @contextmanager
    def taking_part(self, model: nn.Module) -> Iterator[None]:
        """Within, only the LoRA weights of the fit require grad, so that `find_blocks` finds them.

        A loaded adapter does not say which of its weights were frozen in training.
        """
        weights = {name: weight for name, weight in model.named_parameters() if ".lora_" in name}
        with lock_of(find_transformer(model) or model):
            before = {name: weight.requires_grad for name, weight in weights.items()}

            def restore() -> None:
                for name, weight in weights.items():
                    weight.requires_grad_(before[name])

            with undoing(restore):
                for name, weight in weights.items():
                    bare = _OF_ADAPTER.sub(r".\1", strip_wrappers(name))
                    weight.requires_grad_(bare in self.blocks)
                yield

    def state_dict(self) -> dict[str, Any]:
        """Names, numbers and tensors, ready for `torch.save`."""
        return vars(self) | {"weights": {name: tuple(w) for name, w in self.weights.items()}}

    def digest(self) -> str:
        """A hash of the whole state."""
        rest = self.blocks, self.class_token_ids, self.mask_token_id, self.scalings
        digest = hashlib.sha256(repr(rest).encode())
        for name, weight in self.weights.items():
            digest.update(repr((name, weight.dtype, weight.shape)).encode())
            digest.update(weight.sample.numpy().tobytes())
        return digest.hexdigest()

    def difference(self, now: ModelState) -> str | None:
        """What has changed, as a sentence without its full stop; None if nothing has."""
        if self.blocks.keys() != now.blocks.keys():
            odd = sorted(self.blocks.keys() ^ now.blocks.keys())[0]
            if odd in now.blocks:
                return f"The LoRA weight {odd} takes part now, but did not in the fit"
            return f"The LoRA weight {odd} took part in the fit, but does not now"
        for name, (shape, scaling) in self.blocks.items():
            new_shape, new_scaling = now.blocks[name]
            if shape != new_shape:
                return f"The LoRA weight {name} had shape {shape} at the fit, and now {new_shape}"
            if scaling != new_scaling:
                return (
                    f"The scaling of {name} was {scaling:g} at the fit, and now is {new_scaling:g}"
                )
        for name, scaling in self.scalings.items():
            new_scaling = now.scalings.get(name)
            if scaling != new_scaling:
                return f"The scaling of {name} was {scaling} at the fit, and now is {new_scaling}"
        for name in ("class_token_ids", "mask_token_id"):
            before, after = getattr(self, name), getattr(now, name)
            if before != after:
                return f"The fit had {name}={before}, not {after}"
        for name, weight in self.weights.items():
            if name not in now.weights:
                return f"The model lacks the weight {name} of the fit"
            if not weight.equals(now.weights[name]):
                return f"The weight {name} differs from that of the fit"
        new = [name for name in now.weights if ".lora_" in name and name not in self.weights]
        return f"The model of the fit lacked the LoRA weight {new[0]}" if new else None


class FittedModel:
    """Notices when a model changes after a fit, by each weight's address, version and sample.

    Parameters
    ----------
    model : LogitsModel
    blocks : sequence of Block
    """

    def __init__(self, model: LogitsModel, blocks: Sequence[Block]) -> None:
        self.state = ModelState.of(model, blocks)
        self._model, self._blocks = model, blocks
        self._marks, self._samples = self._look()

    def check(self) -> None:
        """Refuse the model if it has changed since the fit (`RuntimeError`)."""
        marks, samples = self._look()
        # A write to a weight's `.data` leaves its address and version as they were.
        if marks == self._marks and all(map(torch.equal, samples, self._samples)):
            return
        difference = self.state.difference(ModelState.of(self._model, self._blocks))
        if difference is not None:
            raise RuntimeError(f"{difference}: fit again, or undo the change.")
        self._marks, self._samples = marks, samples

    def _look(self) -> tuple[list[Any], list[torch.Tensor]]:
        """Marks, which change with a weight or a scaling, and samples by device and dtype."""
        marks: list[Any] = [scalings_in(self._model, self._blocks[0].adapter)]
        samples: dict[Any, list[torch.Tensor]] = {}
        for _, weight in other_weights(self._model, self._blocks):
            marks.append((weight.data_ptr(), 0 if weight.is_inference() else weight._version))
            samples.setdefault((weight.device, weight.dtype), []).append(_sample(weight))
        # As bytes, so that NaN equals itself.
        return marks, [torch.cat(group).view(torch.uint8) for group in samples.values()]


def other_weights(model: nn.Module, blocks: Sequence[Block]) -> Iterator[tuple[str, torch.Tensor]]:
    """Floating-point weights of the base model, the head and other LoRA layers, by name.

    Buffers that belong to a state, such as the running averages of batch norms, are weights too.
    Left out are weights of other adapters, of modules that an adapter replaces by its own, weights
    that are not in memory, other kinds of tensors such as quantized ones, and all weights of a
    model that FSDP2 shards.
    """
    if any(hasattr(type(module), "reshard") for module in model.modules()):
        return
    adapter, ours = blocks[0].adapter, {id(block.weight) for block in blocks}
    for name, weight in chain(model.named_parameters(), _saved_buffers(model)):
        is_plain = type(weight.data) is torch.Tensor and weight.is_floating_point()
        if id(weight) in ours or weight.is_meta or not is_plain:
            continue
        known_as = _name_in_state(name, adapter)
        if known_as is not None:
            yield known_as, weight


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", buffer


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """A few numbers of a weight, `(n,)`; a view where the weight is contiguous."""
    step, n = max(1, weight.numel() // _SAMPLED), min(_SAMPLED, weight.numel())
    if not weight.is_contiguous():
        return weight.detach().flatten()[::step][:n]
    return weight.detach().as_strided((n,), (step,))


@lru_cache(2**16)  # every call of a posterior asks for all of them
def _name_in_state(name: str, adapter: str) -> str | None:
    """None for weights of other adapters, and of modules that this one replaces."""
    others = {owner for _, owner in _OF_ADAPTER.findall(name)} - {adapter}
    if others or ".original_module." in name:
        return None
    return _without_adapter(strip_wrappers(name), adapter)


def _without_adapter(name: str, adapter: str) -> str:
    return _OF_ADAPTER.sub(lambda m: f".{m[1]}" if m[2] == adapter else m[0], name)

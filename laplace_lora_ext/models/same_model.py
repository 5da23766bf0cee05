"""Tells whether a model is the one that a posterior was fitted to, and what differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laplace_lora_ext.messages import listed
from laplace_lora_ext.models.answers import ClassTokens
from laplace_lora_ext.models.batches import pad_token
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import adapter_layers, find_idle
from laplace_lora_ext.models.running import Standing, Tree
from laplace_lora_ext.models.weights import (
    Block,
    are_in_place,
    bare_name,
    owner_of,
    read,
)
from laplace_lora_ext.processes import count, of_first, rank

_SAMPLED = 32  # numbers of each weight that are compared: training moves all of them


class Weight(NamedTuple):
    """A few numbers `(n,)` of a weight, in float64 in main memory."""

    dtype: str
    shape: list[int]
    sample: Tensor

    def equals(self, other: Weight) -> bool:
        """Tell whether both hold the same numbers, or did before a cast or a merge."""
        if self.shape != other.shape:
            return False
        if self.dtype != other.dtype:
            return self._cast_to(other) or other._cast_to(self)
        # Merging an adapter and unmerging it rounds. In half precision that may move
        # numbers by more than a step of training does: there any difference counts.
        dtype = getattr(torch, self.dtype.removeprefix("torch."))
        atol = 0.0
        if dtype in (torch.float32, torch.float64) and len(self.sample):
            largest = self.sample.abs().max().item()
            atol = 16 * torch.finfo(dtype).eps * largest
        return torch.allclose(self.sample, other.sample, rtol=0.0, atol=atol)

    def _cast_to(self, other: Weight) -> bool:
        """Tell whether casting one gives the other."""
        dtype = getattr(torch, other.dtype.removeprefix("torch."))
        return torch.equal(self.sample.to(dtype).double(), other.sample)


@dataclass(frozen=True)
class ModelState:
    """All that predictions depend on, except the values of the posterior's weights."""

    # Shape, and scaling of LoRA, by the name of the weight, without the adapter's name.
    blocks: dict[str, list[Any]]
    class_token_ids: ClassTokens | None
    mask_token_id: int | None
    normalised: bool
    # Before which decoders that classify read a text.
    pad_token_id: int | None
    # Of the base model and the head, and of buffers that are saved with them. Names
    # leave out the adapter's. Left out altogether are other adapters, modules that this
    # one replaces, weights that are not in memory, quantized ones, and all weights of a
    # model that FSDP2 shards.
    weights: dict[str, Weight]
    # Of the adapter's LoRA layers that are not in the posterior.
    scalings: dict[str, float]

    @classmethod
    def of(cls, model: LogitsModel, blocks: Sequence[Block]) -> ModelState:
        """Describe a model as it is now."""
        adapter = blocks[0].adapter
        scalings = {
            name: float(scaling)
            for name, layer in adapter_layers(model.model).items()
            if (scaling := getattr(layer, "scaling", {}).get(adapter)) is not None
        }
        of_blocks = {
            block.known_as: [list(block.shape), scalings.get(block.site)]
            for block in blocks
        }
        sites = {block.site for block in blocks}
        others = {
            known_as: holder[name]
            for known_as, holder, name in _other_weights(model.tree, blocks)
        }
        has_head = model.may_answer and model.answers is None
        return cls(
            blocks=of_blocks,
            class_token_ids=model.class_token_ids,
            mask_token_id=model.mask_token_id,
            normalised=model.normalised,
            pad_token_id=pad_token(model.transformer) if has_head else None,
            weights=_sampled(others),
            scalings={name: s for name, s in scalings.items() if name not in sites},
        )

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> ModelState:
        """Rebuild what `state_dict` has returned."""
        weights = {name: Weight(*weight) for name, weight in state["weights"].items()}
        fields: dict[str, Any] = state | {"weights": weights}
        return cls(**fields)

    def state_dict(self) -> dict[str, Any]:
        """Return names, numbers and tensors, ready for `torch.save`."""
        weights = {name: tuple(weight) for name, weight in self.weights.items()}
        return vars(self) | {"weights": weights}

    def difference(self, now: ModelState) -> str | None:
        """Say what has changed, in a sentence without a full stop; None if nothing."""
        before, after = self._facts(), now._facts()
        for what in before | after:
            if before.get(what) != after.get(what):
                return (
                    f"{what} was {before.get(what)} at the fit, and now is "
                    f"{after.get(what)}"
                )
        for name, weight in self.weights.items():
            if name not in now.weights or not weight.equals(now.weights[name]):
                return f"The weight {name} differs from that of the fit"
        return None

    def _facts(self) -> dict[str, Any]:
        """Collect what must be equal exactly, by what it is."""
        return {
            "class_token_ids": self.class_token_ids,
            "mask_token_id": self.mask_token_id,
            "normalised": self.normalised,
            "pad_token_id": self.pad_token_id,
            **{f"The weight {n} (shape, scaling)": b for n, b in self.blocks.items()},
            **{f"The scaling of {name}": s for name, s in self.scalings.items()},
        }


def check_runs(model: LogitsModel, blocks: Sequence[Block]) -> None:
    """Refuse LoRA layers that are merged, disabled or gone (`RuntimeError`)."""
    idle = find_idle(adapter_layers(model.model))
    if idle is not None:
        raise RuntimeError(idle)
    # By identity: PEFT may have put another weight under the same name.
    present = set(map(id, model.parameters()))
    gone = [block.name for block in blocks if id(block.weight) not in present]
    if gone:
        raise RuntimeError(
            f"The model has lost weights of the posterior: {listed(gone)}. Make a new "
            "posterior, and fit it."
        )


def check_same(
    model: LogitsModel, blocks: Sequence[Block], fitted: ModelState, mean: Tensor
) -> None:
    """Refuse a model that has changed since a fit, and name what has (`RuntimeError`).

    `mean`, `(parameters,)`, are the LoRA weights of the fit, compared in their present
    precision.
    """
    # First what says more: merged weights have changed, too.
    check_runs(model, blocks)
    changed = first_changed(blocks, mean)
    if changed is not None:
        raise RuntimeError(
            f"The numbers of {changed.name} have changed since the fit: fit again, or "
            "load the weights of the fit."
        )
    difference = fitted.difference(ModelState.of(model, blocks))
    if difference is not None:
        raise RuntimeError(f"{difference}: fit again, or undo the change.")


def standing_of(model: LogitsModel, blocks: Sequence[Block]) -> Standing | None:
    """Note how a model stands; None where passes move its weights."""
    if model.tree.is_resharded or not are_in_place(blocks):
        return None
    places = [(holder, name) for _, holder, name in _other_weights(model.tree, blocks)]
    places += [(block.module._parameters, block.parameter) for block in blocks]
    return Standing(model.tree, places)


def first_changed(blocks: Sequence[Block], mean: Tensor) -> Block | None:
    """Find the first LoRA weight whose values are no longer a fit's."""
    differences: list[Tensor] = []
    parts = mean.split([block.n_params for block in blocks])
    for block, part in zip(blocks, parts, strict=True):
        values = block.values.flatten()
        # In the weights' own precision: a fit of float32 may go on with weights in
        # bfloat16.
        differences.append((values != part.to(values)).any())
    for block, differs in zip(blocks, read(differences), strict=True):
        if differs:
            return block
    return None


def check_alike_on_ranks(state: ModelState, mean: Tensor, settings: str) -> None:
    """Refuse a rank whose weights or settings are not those of rank 0 (`ValueError`).

    Collective: each gives its own.
    """
    if count() == 1:
        return
    mean = mean.cpu()
    first_state, first_mean, first_settings = of_first((state, mean, settings))
    is_alike = torch.equal(mean, first_mean) and settings == first_settings
    if not is_alike or first_state.difference(state) is not None:
        raise ValueError(
            f"Rank {rank()} and rank 0 differ in weights or settings: load the same "
            "adapter and pass the same settings on every rank."
        )


def _other_weights(
    tree: Tree, blocks: Sequence[Block]
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield all other weights by name: the base's, heads and buffers saved with them.

    With the dictionary that holds each, where it may be replaced, and its name there.
    """
    if tree.is_resharded:
        return  # FSDP2 replaces parameters between passes
    adapter = blocks[0].adapter
    of_posterior = {id(block.weight) for block in blocks}
    for prefix, module in tree.model.named_modules():
        not_saved = module._non_persistent_buffers_set
        # Of other adapters, and of modules that this one replaces.
        is_other = "original_module" in prefix.split(".")
        for holder in (module._parameters, module._buffers):
            for name, weight in holder.items():
                if weight is None or name in not_saved or id(weight) in of_posterior:
                    continue
                whole_name = f"{prefix}.{name}"
                if is_other or owner_of(whole_name) not in (None, adapter):
                    continue
                # Quantized weights are subclasses of tensors, or whole numbers.
                is_plain = type(weight.data) is Tensor and weight.is_floating_point()
                if is_plain and not weight.is_meta:
                    yield bare_name(whole_name), holder, name


def _sampled(weights: dict[str, Tensor]) -> dict[str, Weight]:
    """Take a few numbers of each weight."""
    few: list[Tensor] = []
    for weight in weights.values():
        numbers = weight.detach().flatten()
        step = max(1, len(numbers) // _SAMPLED)  # from all over a weight
        few.append(numbers[::step][:_SAMPLED].to(few[0].device if few else None))
    # Reading from an accelerator waits for it: all are read as one tensor.
    joined = torch.cat(few).cpu().double() if few else torch.empty(0)
    samples = joined.split(list(map(len, few)))
    return {
        name: Weight(str(weight.dtype), list(weight.shape), sample)
        for (name, weight), sample in zip(weights.items(), samples, strict=True)
    }

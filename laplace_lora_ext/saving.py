"""Writes posteriors into files, and reads them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from laplace_lora_ext.files import write_whole
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.same_model import ModelState, first_changed
from laplace_lora_ext.models.weights import Block

FILE = "laplace_posterior.safetensors"
CHECKSUM = "sha256"
UNKNOWN = "0" * 64  # stands for the checksum in what it is the checksum of
_SEAL = f'"{CHECKSUM}":"'.encode()
_VERSION = "7"
_TENSOR = "__tensor__"  # the only key of what stands for a tensor in the JSON


def write_state(state: Mapping[str, Any], folder: str | Path) -> None:
    """Write a posterior's state into a folder, which is made if need be."""
    tensors: dict[str, Tensor] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, Tensor):
            raise TypeError(
                "A posterior's file holds tensors, numbers and text, and no "
                f"{type(value).__name__}: put something else than {value!r} into "
                "la.metadata."
            )
        name = str(len(tensors))
        # A copy: safetensors refuses tensors that share memory or have gaps in it.
        in_memory = value.detach().cpu()
        tensors[name] = in_memory.clone(memory_format=torch.contiguous_format)
        return {_TENSOR: name}

    content = json.dumps(state, default=plain)
    metadata = {"laplace_lora_ext": _VERSION, "state": content, CHECKSUM: UNKNOWN}
    file = safetensors.torch.save(tensors, metadata)
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_sealed(Path(folder, FILE), file)


def read_state(folder: str | Path) -> dict[str, Any]:
    """Read a state that `write_state` wrote; damaged or other files are refused."""
    path = Path(folder, FILE)
    read_sealed(path, "posterior")
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if metadata["laplace_lora_ext"] != _VERSION:
        raise ValueError(_foreign(path, "posterior"))

    def restored(node: dict[str, Any]) -> Any:
        return tensors[node[_TENSOR]] if node.keys() == {_TENSOR} else node

    return json.loads(metadata["state"], object_hook=restored)


def write_sealed(path: Path, content: bytes) -> None:
    """Write a file with a checksum over all of it, in its JSON.

    It takes the place of `UNKNOWN`.
    """
    checksum = hashlib.sha256(content).hexdigest().encode()
    # As long as what it stands for: offsets of tensors in the file stay right.
    sealed = content.replace(_SEAL + UNKNOWN.encode(), _SEAL + checksum, 1)
    write_whole(path, sealed)


def read_sealed(path: Path, what: str) -> bytes:
    """Read what `write_sealed` wrote; a `ValueError` for any other content.

    `what` the file should hold is for the message.
    """
    before, seal, rest = path.read_bytes().partition(_SEAL)
    if not seal:
        raise ValueError(_foreign(path, what))
    checksum = rest[: len(UNKNOWN)]
    after = rest[len(UNKNOWN) :]
    content = before + seal + UNKNOWN.encode() + after
    if hashlib.sha256(content).hexdigest().encode() != checksum:
        raise ValueError(
            f"{path} is damaged: its checksum is another. Copy it again from where it "
            f"was saved, or fit and save the {what} again."
        )
    return content


def _foreign(path: Path, what: str) -> str:
    """Say that a file is none of ours."""
    return (
        f"{path} holds no {what} that this release reads (version {_VERSION} of the "
        "format), or is damaged: fit and save it again, or install the release that "
        "wrote it."
    )


def check_state(
    state: Mapping[str, Any],
    settings: Mapping[str, Any],
    model: LogitsModel,
    blocks: Sequence[Block],
) -> None:
    """Refuse the state of another posterior, and name what differs.

    `settings` are class, likelihood and settings of the posterior that the state is
    for, `model` and `blocks` its model as it is now.
    """
    saved = dict(state["settings"])
    saved |= {"cls_name": state["cls_name"], "likelihood": state["likelihood"]}
    for name, value in settings.items():
        if saved.get(name) != value:
            raise ValueError(
                f"The posterior was fitted with {name}={saved.get(name)!r}, not "
                f"{value!r}: pass the same setting."
            )
    fitted = ModelState.from_state_dict(state["model"])
    difference = fitted.difference(ModelState.of(model, blocks))
    if difference is not None:
        raise ValueError(f"The posterior was fitted to another model. {difference}.")
    if first_changed(blocks, state["mean"]) is not None:
        raise ValueError(
            "The posterior was fitted around other LoRA weights than the model has "
            "now: load the adapter of the fit."
        )

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
_VERSION = "5"
# Classes of earlier releases.
_RENAMED = {"LanguageModelLaplace": "LowRankKronLoRALaplace"}


def write_state(
    state: Mapping[str, Any],
    folder: str | Path,
) -> None:
    """Write a posterior's state into a folder, which is made if need be."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    content = json.dumps(_plain(state, tensors))
    # Copies: safetensors refuses tensors that share memory or have gaps in it.
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.values():
        in_memory = tensor.detach().cpu()
        copies[name] = in_memory.clone(memory_format=torch.contiguous_format)
    metadata = {
        "laplace_lora_ext": _VERSION,
        "state": content,
        CHECKSUM: UNKNOWN,
    }
    file = safetensors.torch.save(copies, metadata)
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
        if node.keys() == {"tensor"}:
            return tensors[node["tensor"]]
        if node.keys() == {"tuple"}:
            return tuple(node["tuple"])
        return dict(node["items"]) if node.keys() == {"items"} else node

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


def _plain(
    value: Any,
    tensors: dict[int, tuple[str, Tensor]],
) -> Any:
    """Turn a value into what JSON gives back; `tensors` gets its tensors.

    Dictionaries of one key stand for what JSON does not know: tensors, tuples, and
    dictionaries that have a single key, or keys that are no text.
    """
    if isinstance(value, Tensor):
        # A tensor that stands in several places is written once.
        new_name = str(len(tensors))
        name, _ = tensors.setdefault(id(value), (new_name, value))
        return {"tensor": name}
    if isinstance(value, tuple):
        return {"tuple": [_plain(part, tensors) for part in value]}
    if isinstance(value, list):
        return [_plain(part, tensors) for part in value]
    if isinstance(value, dict):
        pairs: list[tuple[Any, Any]] = []
        for key, part in value.items():
            pairs.append((_plain(key, tensors), _plain(part, tensors)))
        has_other_keys = not all(isinstance(key, str) for key in value)
        would_stand_for_something_else = len(value) == 1
        if has_other_keys or would_stand_for_something_else:
            return {"items": pairs}
        return dict(pairs)
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(
        "A posterior's file holds tensors, numbers and text, and no "
        f"{type(value).__name__}: pass something else than {value!r} in backend_kwargs."
    )


def class_name(state: Mapping[str, Any]) -> str:
    """Name the class of a state, as it is called now."""
    name: str = state["cls_name"]
    return _RENAMED.get(name, name)


def _comparable(value: Any) -> Any:
    """Turn tuples and tensors into lists: users may write any of them."""
    if isinstance(value, dict):
        return {key: _comparable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(part) for part in value]
    if isinstance(value, Tensor | np.ndarray):
        return value.tolist()
    return value


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
    saved |= {"cls_name": class_name(state), "likelihood": state["likelihood"]}
    for name, value in settings.items():
        if _comparable(saved.get(name)) != _comparable(value):
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

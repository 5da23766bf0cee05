"""Writes posteriors into files that are whole at any time, and reads them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

FILE = "laplace_posterior.safetensors"
_VERSION = "9"
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
    metadata = {"laplace_lora_ext": _VERSION, "state": content}
    write_whole(Path(folder, FILE), safetensors.torch.save(tensors, metadata))


def read_state(folder: str | Path) -> dict[str, Any]:
    """Read a state that `write_state` wrote; parts of files and others are refused."""
    path = Path(folder, FILE)
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError:  # of a part of a file
        metadata, tensors = {}, {}
    if metadata.get("laplace_lora_ext") != _VERSION:
        raise ValueError(
            f"{path} holds no posterior that this release reads (version {_VERSION} of "
            "the format), or a part of one: fit and save it again, or install the "
            "release that wrote it."
        )

    def restored(node: dict[str, Any]) -> Any:
        return tensors[node[_TENSOR]] if node.keys() == {_TENSOR} else node

    return json.loads(metadata["state"], object_hook=restored)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside its place, and put it there once it is whole.

    Its folder is made if need be. Whatever interrupts this, the file that was there
    before is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)

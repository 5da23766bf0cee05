"""Posteriors on disk: tensors as safetensors, the rest as JSON, both guarded by hashes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import safetensors.torch
import torch

TENSORS = "laplace_posterior.safetensors"
DESCRIPTION = "laplace_posterior.json"
_FORMAT = "laplace_lora_ext posterior"
_VERSION = 1
_NO_HASH = "0" * 64


def write_posterior(
    folder: str | Path, state: Mapping[str, Any], summary: Mapping[str, Any]
) -> None:
    """Write the state of a posterior into a folder.

    Both files are written elsewhere first and then moved, so neither is ever half written. An old
    file beside a new one does not load.

    Parameters
    ----------
    folder : str or Path
        made if it does not exist
    state : Mapping
        of a Laplace approximation: tensors, numbers and text in dictionaries and lists
    summary : Mapping
        numbers for people who look into the JSON file; nothing reads them again
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tree, tensors = without_tensors(state)
    with TemporaryDirectory(dir=folder, prefix=".posterior-") as work:
        new_tensors, new_description = Path(work, TENSORS), Path(work, DESCRIPTION)
        safetensors.torch.save_file(tensors, new_tensors, metadata={"format": "pt"})
        description = {
            "format": _FORMAT,
            "version": _VERSION,
            "summary": dict(summary),
            "state": tree,
            "tensors_sha256": _hash(new_tensors.read_bytes()),
            "sha256": _NO_HASH,
        }
        text = json.dumps(description, indent=1)
        text = text.replace(_NO_HASH, _hash(text.encode()))
        new_description.write_text(text, encoding="utf-8")
        os.replace(new_tensors, folder / TENSORS)
        os.replace(new_description, folder / DESCRIPTION)


def read_posterior(folder: str | Path) -> dict[str, Any]:
    """Read the state that `write_posterior` wrote, without executing anything in the files.

    Raises
    ------
    FileNotFoundError
        If one of the two files is missing.
    ValueError
        If a file holds something else, was changed or cut, or comes from a newer version. The
        message names it.
    """
    path = Path(folder, DESCRIPTION)
    description = _read_description(path)
    tensors_path = Path(folder, TENSORS)
    content = tensors_path.read_bytes()
    if _hash(content) != description["tensors_sha256"]:
        raise ValueError(f"{tensors_path} is not the file that was saved with {path.name}.")
    try:
        return with_tensors(description["state"], safetensors.torch.load(content))
    except (KeyError, TypeError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} and {tensors_path.name} don't fit together.") from error


def _read_description(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    try:
        description = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON file, or was cut: {error}.") from error
    if not isinstance(description, dict) or description.get("format") != _FORMAT:
        raise ValueError(f"{path} does not describe a posterior of this library.")
    expected = str(description.get("sha256"))
    if content.count(expected.encode()) != 1 or expected == _NO_HASH:
        raise ValueError(f"{path} has been changed since it was saved.")
    if _hash(content.replace(expected.encode(), _NO_HASH.encode())) != expected:
        raise ValueError(f"{path} has been changed since it was saved.")
    if description["version"] != _VERSION:
        raise ValueError(
            f"{path} has version {description['version']} of the format, and this release of "
            f"laplace_lora_ext reads {_VERSION}: install a newer one."
        )
    return description


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def without_tensors(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Replace tensors by names: a tree for JSON, and copies of the tensors by name.

    A tensor that occurs twice gets one name, and comes back as one tensor.
    """
    found: dict[int, tuple[str, torch.Tensor]] = {}
    tree = _named(state, "", found)
    contiguous = torch.contiguous_format
    return tree, {
        name: tensor.detach().cpu().clone(memory_format=contiguous)
        for name, tensor in found.values()
    }


def _named(node: Any, name: str, found: dict[int, tuple[str, torch.Tensor]]) -> Any:
    if isinstance(node, torch.Tensor):
        return {"tensor": found.setdefault(id(node), (name, node))[0]}
    if isinstance(node, Mapping):
        return {"items": {key: _named(v, f"{name}/{key}", found) for key, v in node.items()}}
    if isinstance(node, (list, tuple)):
        return [_named(v, f"{name}/{i}", found) for i, v in enumerate(node)]
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    raise TypeError(f"{name} is a {type(node).__name__}, which can't be saved.")


def with_tensors(node: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Put together what `without_tensors` took apart."""
    if isinstance(node, list):
        return [with_tensors(value, tensors) for value in node]
    if not isinstance(node, dict):
        return node
    if "tensor" in node:
        return tensors[node["tensor"]]
    return {key: with_tensors(value, tensors) for key, value in node["items"].items()}

"""Keeps the sums of a running fit in a file, from which an interrupted fit continues."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from laplace_lora_ext.files import with_tensors, without_tensors
from laplace_lora_ext.fitting.identity import hashes
from laplace_lora_ext.messages import naming
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.processes.exchange import count, rank

_FORMAT = 1


class Keeper:
    """What a pass over the data reports to. This one keeps nothing: every pass starts afresh."""

    def begin(self, state: Any) -> Any:
        """The state to start from: the given one, or that of an interrupted run."""
        return state

    def has(self, batch: Any) -> bool:
        """Whether the state already holds the next batch."""
        return False

    def keep(self, state: Any) -> None:
        """Called with the state after each batch."""

    def end(self) -> None:
        """Called after the last batch."""

    def remove(self) -> None:
        """Called when the fit is done."""


class Checkpoint(Keeper):
    """Keeps a state and the number of batches in it, in one file for each rank.

    The file is safetensors, with JSON in its header; nothing is pickled, and each writing replaces
    the whole file. It also holds torch's random state and a hash of the batches: a run continues
    only with the same batches.

    Parameters
    ----------
    folder : str or Path
        made if it does not exist
    every : int
        how many batches from one writing to the next
    identity : mapping of str to str
        what both runs must have in common

    Raises
    ------
    ValueError
        If `every` is below 1; from `begin` if the file is damaged or of another fit; from `has` and
        `end` if the batches differ. The file then stays as it is.
    """

    def __init__(self, folder: str | Path, every: int, identity: Mapping[str, str]) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, not {every}.")
        self._path = Path(folder) / f"sums-{rank()}-of-{count()}.safetensors"
        self._every, self._identity = every, dict(identity)
        self._seen, self._kept = 0, 0
        self._hash = hashlib.sha256()
        self._kept_hash, self._random = "", {}

    def begin(self, state: Any) -> Any:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not self._path.exists():
            return state
        with naming(f"The checkpoint {self._path}"):
            content = _read(self._path)
            found = content["identity"]
            differing = [key for key in found if found[key] != self._identity.get(key)]
            if differing:
                raise ValueError(
                    f"it is from a fit with other {' and '.join(differing)}: remove it, or pass "
                    "another folder"
                )
        self._kept, self._kept_hash = content["batches"], content["hash"]
        self._random = content["random"]
        return content["state"]

    def has(self, batch: Any) -> bool:
        self._seen += 1
        _add_to(self._hash, batch)
        if self._seen == self._kept:
            if self._hash.hexdigest() != self._kept_hash:
                raise ValueError(
                    f"the {self._kept} batches so far differ from those in {self._path}: seed the "
                    "loader as before, or remove the file to start afresh"
                )
            _set_random_state(self._random)
        return self._seen <= self._kept

    def keep(self, state: Any) -> None:
        if self._seen % self._every:
            return
        content = {
            "identity": self._identity,
            "batches": self._seen,
            "hash": self._hash.hexdigest(),
            "random": _random_state(),
            "state": state,
        }
        _write(self._path, content)

    def end(self) -> None:
        if self._seen < self._kept:
            raise ValueError(
                f"{self._path} holds {self._kept} batches, but the loader gave {self._seen}: pass "
                "the same loader, or remove the file to start afresh."
            )

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def keeper_in(folder: str | Path | None, every: int, la: Posterior) -> Keeper:
    """A `Checkpoint` in a folder, or without one what keeps nothing."""
    return Keeper() if folder is None else Checkpoint(folder, every, hashes(la))


def _write(path: Path, content: Any) -> None:
    tree, tensors = without_tensors(content)
    text = json.dumps(tree)
    metadata = {"format": str(_FORMAT), "content": text, "sha256": _checksum(text, tensors)}
    beside = path.with_suffix(".new")
    with beside.open("wb") as file:
        file.write(safetensors.torch.save(tensors, metadata))
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _read(path: Path) -> Any:
    data = path.read_bytes()
    try:
        tensors = safetensors.torch.load(data)
        size = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + size])["__metadata__"]
        text = metadata["content"]
        whole = metadata["format"] == str(_FORMAT)
        whole = whole and metadata["sha256"] == _checksum(text, tensors)
        content = with_tensors(json.loads(text), tensors)
    except Exception as error:  # whatever foreign bytes lead to
        raise ValueError("it can't be read: remove it to start afresh") from error
    if not whole:
        raise ValueError("it is damaged or of another version: remove it to start afresh")
    return content


def _checksum(text: str, tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        _add_to(digest, tensors[name])
    return digest.hexdigest()


def _add_to(digest: Any, value: Any) -> None:
    """Hash nested tensors, texts and numbers; other objects don't change the hash."""
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        flat = value.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            digest.update(str(key).encode())
            _add_to(digest, value[key])
    elif isinstance(value, list | tuple):
        for part in value:
            _add_to(digest, part)
    elif isinstance(value, str | int | float):
        digest.update(repr(value).encode())


def _random_state() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_state(states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])

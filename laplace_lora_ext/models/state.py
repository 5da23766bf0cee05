"""What a forward pass leaves in a model: it is put back, so that no pass finds it.

RoPE of `rope_type="dynamic"` keeps the frequencies of a longer text, some models count
or average what they have seen, and PEFT may keep products of DoRA's weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from laplace_lora_ext.models.tree import Tree

# Numbers of the largest buffer that is copied for a pass. Larger ones are masks and
# quantised weights, which nobody changes in place.
_LARGEST = 2**16


@contextmanager
def put_back(tree: Tree) -> Iterator[None]:
    """Leave a model as it is before a pass, also after an error.

    Its state are the buffers of modules, and attributes that are numbers, tensors or
    None, where a module has a buffer, has a tensor, or was changed by the first pass.
    """
    modules = tree.watched
    state = State(modules)
    state.lend_copies()
    changed: list[nn.Module] = []
    try:
        with without_caches():
            yield
    finally:
        changed = state.changed()
        tree.leaves_state |= bool(changed)
        state.put_back()
    if tree.changing is None:
        tree.changing = [m for m in modules if _has_tensors(m) or m in changed]


class State:
    """What modules have before a pass: attributes, and buffers with a copy of each."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._before = [(m, dict(vars(m)), dict(m._buffers)) for m in modules]
        # By the `id` of a buffer, which several modules may share.
        self._copies: dict[int, Tensor] = {}
        self._originals: list[tuple[Tensor, int]] = []  # with their versions
        for _, _, buffers in self._before:
            for buffer in buffers.values():
                if buffer is None or buffer.numel() > _LARGEST:
                    continue
                if id(buffer) not in self._copies:
                    self._copies[id(buffer)] = buffer.clone()
                    self._originals.append((buffer, _version(buffer)))
        self._placed = self._buffers_now()

    def lend_copies(self) -> None:
        """Give the modules the copies to change."""
        for module, _, buffers in self._before:
            for name, buffer in buffers.items():
                module._buffers[name] = self._copies.get(id(buffer), buffer)
        self._placed = self._buffers_now()

    def _buffers_now(self) -> list[list[tuple[int, int]]]:
        """Identify each module's buffers, with their versions."""
        return [
            [(id(buffer), _version(buffer)) for buffer in module._buffers.values()]
            for module, _, _ in self._before
        ]

    def changed(self) -> list[nn.Module]:
        """List the modules that have other attributes now, or other buffers."""
        changed = []
        placed = zip(self._before, self._placed, self._buffers_now(), strict=True)
        for (module, attributes, _), before, now in placed:
            if before != now or _differing(module, attributes):
                changed.append(module)
        return changed

    def put_back(self) -> None:
        """Give the modules their attributes and buffers again."""
        for module, attributes, buffers in self._before:
            vars(module).update(_differing(module, attributes))
            module._buffers.update(buffers)
        for buffer, version in self._originals:
            if _version(buffer) != version:  # no copy was lent
                buffer.copy_(self._copies[id(buffer)])


def _version(buffer: Tensor | None) -> int:
    """Count how often a buffer was changed in place."""
    # Those of inference mode don't tell.
    return 0 if buffer is None or buffer.is_inference() else buffer._version


def _differing(module: nn.Module, attributes: dict[str, Any]) -> dict[str, Any]:
    """Select the attributes that are a module's state, and other ones now."""
    now = vars(module)
    return {
        name: value
        for name, value in attributes.items()
        if value is not now.get(name) and _is_state(value, now.get(name))
    }


def _has_tensors(module: nn.Module) -> bool:
    return bool(module._buffers) or any(
        isinstance(value, Tensor) for value in vars(module).values()
    )


def _is_state(*values: Any) -> bool:
    """Tell whether all values are numbers, tensors or None, rather than flags."""
    return all(
        value is None or type(value) in (int, float) or isinstance(value, Tensor)
        for value in values
    )


def without_caches() -> AbstractContextManager[object]:
    """Let layers of DoRA forget what they have cached, maybe of other weights."""
    # Whoever caches has imported it; it imports bitsandbytes, which takes seconds.
    caching = getattr(sys.modules.get("peft.helpers"), "DoraCaching", None)
    return nullcontext() if caching is None else caching(enabled=False)

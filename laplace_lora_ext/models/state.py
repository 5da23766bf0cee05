"""What a forward pass leaves in a model: it is put back, so that no pass finds it.

RoPE of `rope_type="dynamic"` keeps the frequencies of a longer text, some models count
or average what they have seen, and PEFT may keep products of DoRA's weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
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
    modules = tree.modules if tree.changing is None else tree.changing
    copies: dict[int, Tensor] = {}
    before = [_State.of(module, copies) for module in modules]
    try:
        with _without_caches():
            yield
    finally:
        changed = [state.module for state in before if state.put_back()]
    if tree.changing is None:
        tree.changing = [m for m in modules if _has_tensors(m) or m in changed]


@dataclass(frozen=True)
class _State:
    """What a module has before a pass."""

    module: nn.Module
    attributes: dict[str, Any]
    buffers: dict[str, Tensor | None]

    @classmethod
    def of(cls, module: nn.Module, copies: dict[int, Tensor]) -> _State:
        """Note a module's state, and give it copies of buffers to change.

        `copies`, by the `id` of a buffer, serve all modules that share it.
        """
        buffers = dict(module._buffers)
        for name, buffer in buffers.items():
            if buffer is not None and buffer.numel() <= _LARGEST:
                if id(buffer) not in copies:
                    copies[id(buffer)] = buffer.clone()
                module._buffers[name] = copies[id(buffer)]
        return cls(module, dict(vars(module)), buffers)

    def put_back(self) -> bool:
        """Set buffers and attributes again; tell whether attributes had changed."""
        self.module._buffers.update(self.buffers)
        now = vars(self.module)
        changed = {
            name: value
            for name, value in self.attributes.items()
            if value is not now.get(name) and _is_state(value, now.get(name))
        }
        now.update(changed)
        return bool(changed)


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


def _without_caches() -> AbstractContextManager[object]:
    """Let layers of DoRA forget what they have cached, maybe of other weights."""
    # Whoever caches has imported it; it imports bitsandbytes, which takes seconds.
    caching = getattr(sys.modules.get("peft.helpers"), "DoraCaching", None)
    return nullcontext() if caching is None else caching(enabled=False)

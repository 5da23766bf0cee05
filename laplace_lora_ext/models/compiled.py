"""Compiled models run eagerly: compiled code does not call LoRA layers as modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from laplace_lora_ext.messages import warn
from laplace_lora_ext.undoing import undoing


def warn_if_compiled(model: nn.Module) -> None:
    """Warn of a model that torch.compile has compiled, whole or in part."""
    if any(_compiled_call(module) for module in model.modules()):
        warn(
            "The model is compiled: fits and predictions run it eagerly, since compiled code "
            "does not call LoRA layers as modules."
        )


_COMPILED = ("_compiled_call_impl",)


@contextmanager
def running_eagerly(model: nn.Module) -> Iterator[None]:
    """Within, compiled modules run their original code."""
    compiled = [(module, name) for module in model.modules() for name in _compiled_call(module)]
    before = [vars(module)[name] for module, name in compiled]

    def restore() -> None:
        for (module, name), call in zip(compiled, before, strict=True):
            vars(module)[name] = call

    with undoing(restore):
        for module, name in compiled:
            inner: Any = module._modules.get("_orig_mod")
            vars(module)[name] = None if inner is None else inner.__call__
        yield


def _compiled_call(module: nn.Module) -> list[str]:
    """Names of the attributes that make a module run compiled code; none if it does not."""
    names = ("_compiled_call_impl", "forward") if "_orig_mod" in module._modules else _COMPILED
    return [name for name in names if vars(module).get(name) is not None]

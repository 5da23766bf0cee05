"""Lets one thread at a time run models: eagerly, in full precision, tensors made on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from threading import RLock
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import nn

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _OnDevice(Protocol):
    @property
    def _device(self) -> torch.device: ...


Self = TypeVar("Self", bound=_OnDevice)

# One for all models, since a model may hold another one. Methods call each other: the thread that
# has the lock may take it again.
LOCK = RLock()


def exclusive(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make other threads wait while a method runs, and set aside a default device but the CPU."""

    @wraps(method)
    def wrapped(
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        with LOCK, cpu_as_default():
            return method(*args, **kwargs)

    return wrapped


def without_autocast(
    method: Callable[Concatenate[Self, Arguments], Result],
) -> Callable[Concatenate[Self, Arguments], Result]:
    """Shield a method of an object with a `_device` from the user's `torch.autocast`."""

    @wraps(method)
    def wrapped(
        self: Self,
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        with torch.autocast(self._device.type, enabled=False):
            return method(self, *args, **kwargs)

    return wrapped


@contextmanager
def cpu_as_default() -> Iterator[None]:
    """Make tensors without a device on the CPU, whatever `set_default_device` says."""
    default_device = getattr(torch, "get_default_device", None)
    if default_device is None:  # before PyTorch 2.3 nothing tells
        yield
    elif default_device().type == "cpu":
        yield  # a context would slow every call of torch for nothing
    else:
        with torch.device("cpu"):
            yield


def as_tensor(value: Any) -> torch.Tensor:
    """Take a tensor where it is, and make one on the CPU of other numbers.

    Within `cpu_as_default`, `torch.as_tensor` would move tensors from an accelerator to the CPU.
    """
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")


def kept(value: Any) -> Any:
    """Copy a tensor of inference mode, to keep it: nothing could change it later."""
    if isinstance(value, torch.Tensor) and value.is_inference():
        return value.clone()
    return value


def is_compiled(model: nn.Module) -> bool:
    """Tell whether a module within runs compiled code, which calls no LoRA layers as modules."""
    for module in model.modules():
        is_wrapper = "_orig_mod" in module._modules  # of torch.compile(module)
        is_compiled_in_place = vars(module).get("_compiled_call_impl") is not None
        if is_wrapper or is_compiled_in_place:
            return True
    return False


def running_eagerly(model: nn.Module) -> AbstractContextManager[object]:
    """Let compiled modules run their original code, with hooks that are called.

    Before PyTorch 2.6 nothing does, and passes refuse such modules.
    """
    set_stance = getattr(torch.compiler, "set_stance", None)
    if set_stance is None or not is_compiled(model):
        return nullcontext()
    return set_stance("force_eager")


def unfused_attention() -> AbstractContextManager[object]:
    """Let torch's attention run without fused kernels, which have no second derivatives."""
    attention = getattr(torch.nn, "attention", None)
    if attention is not None and hasattr(attention, "sdpa_kernel"):
        return attention.sdpa_kernel(attention.SDPBackend.MATH)
    # Before PyTorch 2.3.
    return torch.backends.cuda.sdp_kernel(enable_flash=False, enable_mem_efficient=False)

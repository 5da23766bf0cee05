"""One thread at a time runs models: eagerly, in full precision, with the CPU as default device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from threading import RLock
from typing import Any, TypeVar

import torch
from torch import nn

Method = TypeVar("Method", bound=Callable[..., Any])

# Of all models, since a model may hold another one; the thread that has it may take it again.
LOCK = RLock()


def exclusive(method: Method) -> Method:
    """Make other threads wait while a method runs, and set aside a default device but the CPU."""

    @wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with LOCK, cpu_as_default():
            return method(*args, **kwargs)

    return wrapped  # pyright: ignore[reportReturnType]


def without_autocast(method: Method) -> Method:
    """Shield a method of an object with a `_device` from the user's `torch.autocast`."""

    @wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device.type, enabled=False):
            return method(self, *args, **kwargs)

    return wrapped  # pyright: ignore[reportReturnType]


@contextmanager
def cpu_as_default() -> Iterator[None]:
    """Within, tensors without a device are made on the CPU, whatever `set_default_device` says."""
    get = getattr(torch, "get_default_device", None)  # before PyTorch 2.3 nothing tells
    is_other = get is not None and get().type != "cpu"
    with torch.device("cpu") if is_other else nullcontext():
        yield


def as_tensor(value: Any) -> torch.Tensor:
    """A tensor where it is, and other numbers as one on the CPU.

    Within `cpu_as_default`, `torch.as_tensor` would move tensors from an accelerator to the CPU.
    """
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")


def kept(value: Any) -> Any:
    """A value to keep: a tensor of inference mode, which nothing could change later, as a copy."""
    is_inference = isinstance(value, torch.Tensor) and value.is_inference()
    return value.clone() if is_inference else value


def is_compiled(model: nn.Module) -> bool:
    """Whether a module within runs compiled code, which does not call LoRA layers as modules."""
    return any(
        "_orig_mod" in module._modules or vars(module).get("_compiled_call_impl") is not None
        for module in model.modules()
    )


def running_eagerly(model: nn.Module) -> AbstractContextManager[object]:
    """Within, compiled modules run their original code; before PyTorch 2.6 passes refuse them."""
    set_stance = getattr(torch.compiler, "set_stance", None)
    return set_stance("force_eager") if set_stance and is_compiled(model) else nullcontext()


def unfused_attention() -> AbstractContextManager[object]:
    """Within, torch's attention runs without fused kernels, which have no second derivatives."""
    attention: Any = getattr(torch.nn, "attention", None)
    if hasattr(attention, "sdpa_kernel"):
        return attention.sdpa_kernel(attention.SDPBackend.MATH)
    return torch.backends.cuda.sdp_kernel(enable_flash=False, enable_mem_efficient=False)

"""An accelerator made of Python: its tensors mix with no others.

`install` is for a process of its own, since PyTorch knows one such kind of device for
good.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.utils.backend_registration as registration
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "pretended"
_MADE = {
    "empty.memory_format": torch.empty,
    "empty_strided": torch.empty_strided,
    "triu_indices": torch.triu_indices,
}
# What PyTorch holds on to without counting as its own.
_kept: list[Any] = []


class Pretended(Tensor):
    """A tensor of an accelerator, of which `inner` holds the numbers."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> Pretended:
        return Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
        )

    def __init__(self, inner: Tensor, device: torch.device) -> None:
        self.inner = inner

    def tolist(self) -> Any:
        return self.inner.tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        ours = [leaf for leaf in leaves if isinstance(leaf, Pretended)]
        device = _device_of(function, args, kwargs, ours)
        if kwargs.get("device") is not None:
            device = torch.device(kwargs["device"])
            # Whatever is asked for, `inner` is made on the CPU.
            kwargs = kwargs | {"device": "cpu"}
        args, kwargs = tree_map_only(
            Pretended, lambda tensor: tensor.inner, (args, kwargs)
        )
        # Operations in place return what they were given.
        of_inner = {id(tensor.inner): tensor for tensor in ours}

        def wrapped(result: Tensor) -> Tensor:
            if id(result) in of_inner:
                return of_inner[id(result)]
            return result if device.type == "cpu" else cls(result, device)

        return tree_map_only(Tensor, wrapped, function(*args, **kwargs))


def install() -> None:
    """Make PyTorch know the device "pretended"."""
    module = registration._DummyBackendModule()
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    hook = registration._DummyPrivateUse1Hook()
    guard = registration._DummyDeviceGuard()
    registration._setup_privateuseone_for_python_backend(NAME, module, hook, guard)
    library = torch.library.Library("aten", "IMPL")
    for name, make in _MADE.items():
        library.impl(name, partial(_made, make), "PrivateUse1")
    library.impl("_copy_from", _copy, "PrivateUse1")
    # `to` keeps the parameters.
    torch.__future__.set_swap_module_params_on_conversion(True)
    _kept.extend([library, hook, guard])
    run = torch.autograd._engine_run_backward

    def in_this_thread(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return run(*args, **kwargs)

    # Threads for backward passes are for devices that PyTorch can count.
    torch.autograd._engine_run_backward = in_this_thread


def _made(
    make: Any,
    *args: Any,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **_: Any,
) -> Pretended:
    inner = make(*args, dtype=dtype, device="cpu")
    return Pretended(inner, torch.device(device))


def _copy(source: Any, target: Pretended, non_blocking: bool = False) -> Pretended:
    target.inner.copy_(source.inner if isinstance(source, Pretended) else source)
    return target


def _device_of(
    function: Any, args: Any, kwargs: Any, ours: list[Pretended]
) -> torch.device:
    """Find an operation's device; a `RuntimeError` if tensors have several."""
    name = function._schema.name.removeprefix("aten::")
    if name == "copy_":
        return args[0].device
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    # As on CUDA, numbers by themselves and indices may be on the CPU.
    devices = {
        tensor.device
        for tensor in tensors
        if tensor.dim() or tensor.device.type != "cpu"
    }
    if name.lstrip("_").startswith("index"):
        accelerators = {device for device in devices if device.type != "cpu"}
        devices = accelerators | {tensors[0].device}
    if len(devices) > 1:
        raise RuntimeError(f"{name}: all tensors must be on one device, not {devices}.")
    return devices.pop() if devices else ours[0].device

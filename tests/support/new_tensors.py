"""What operations make: shapes of new tensors."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NewTensors(TorchDispatchMode):
    """Notes operations, and shapes of tensors that they make, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[torch.Size] = set()
        # Layer norms that were passed back through, and numbers in these: in
        # proportion to the passes, and to the vectors that pass back at once.
        self.passes = 0
        self.vectors = 0
        # How often a number was asked for, which waits for an accelerator.
        self.readings = 0

    @property
    def largest(self) -> int:
        """Count the numbers of the largest tensor."""
        return max(shape.numel() for shape in self.shapes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        given = tensors_in((args, kwargs))
        name = func.overloadpacket.__name__
        self.readings += name in ("_local_scalar_dense", "nonzero")
        if name == "native_layer_norm_backward":
            self.passes += 1
            self.vectors += args[0].numel()
        for tensor in tensors_in(results):
            if not _storages([tensor]) & _storages(given):
                self.shapes.add(tensor.shape)
        return results


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}

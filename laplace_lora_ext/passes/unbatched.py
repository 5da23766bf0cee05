"""Plain tensors within backward passes that run under `torch.func.vmap`."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Unbatched(torch.autograd.Function):
    """Hands a tensor to a function that then runs outside of `vmap`.

    The tensor gets a leading dimension: that of `vmap`, or one of size 1.
    """

    @staticmethod
    def forward(tensor: torch.Tensor, receive: Callable) -> torch.Tensor:
        receive(tensor[None])
        return tensor.new_zeros(())

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        """Nothing is differentiated."""

    @staticmethod
    def vmap(info, in_dims, tensor, receive):
        receive(tensor[None] if in_dims[0] is None else tensor.movedim(in_dims[0], 0))
        return tensor.new_zeros(()), None

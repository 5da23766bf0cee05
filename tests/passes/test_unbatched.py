"""Functions that run outside of `torch.func.vmap`."""

from __future__ import annotations

import pytest
import torch

from laplace_lora_ext.passes.unbatched import Unbatched


@pytest.mark.parametrize("in_dims", [0, 1])
def test_a_batched_tensor_comes_with_its_dimension_first(in_dims):
    received = []
    x = torch.randn(2, 2)

    def call(part):
        return Unbatched.apply(part, received.append)

    torch.func.vmap(call, in_dims=in_dims)(x)
    (tensor,) = received
    assert not torch._C._functorch.is_batchedtensor(tensor)
    torch.testing.assert_close(tensor, x if in_dims == 0 else x.mT)


@pytest.mark.parametrize("within_vmap", [True, False])
def test_another_tensor_comes_alone(within_vmap):
    received = []
    x = torch.randn(3)

    def call(_):
        return Unbatched.apply(x, received.append)

    torch.func.vmap(call)(torch.ones(4)) if within_vmap else call(None)
    (tensor,) = received
    torch.testing.assert_close(tensor, x[None])


def test_the_function_may_do_what_vmap_forbids():
    leaves = []

    def make_leaf(_):
        leaves.append(torch.zeros(2).requires_grad_())

    torch.func.vmap(lambda x: Unbatched.apply(x, make_leaf))(torch.ones(4))
    assert leaves[0].is_leaf

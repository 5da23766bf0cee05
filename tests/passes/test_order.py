"""Operations that put rows in another order are told from those that keep it."""

from __future__ import annotations

import pytest
import torch

from laplace_lora_ext.passes.order import picks_rows, reorders

FALLING, RISING = torch.tensor([1, 0, 3, 2]), torch.tensor([0, 0, 1, 3])
LAST = torch.tensor([2, 0, 2, 1])  # positions of four texts

REORDERING = {
    "x[index]": lambda x: x[FALLING],
    "positions first": lambda x: x.transpose(0, 1)[:, FALLING],
    "index_select": lambda x: x.index_select(0, FALLING),
    "gather": lambda x: x.gather(0, FALLING[:, None, None].expand_as(x)),
    "index_put": lambda x: torch.zeros_like(x).index_put((FALLING,), x),
    "index_add": lambda x: torch.zeros_like(x).index_add(0, FALLING, x),
    "index_copy": lambda x: torch.zeros_like(x).index_copy(0, FALLING, x),
    "scatter": lambda x: torch.zeros_like(x).scatter(0, FALLING[:, None, None].expand_as(x), x),
    "stack": lambda x: torch.stack([x[i] for i in FALLING.tolist()]),
    "stack of parts": lambda x: torch.stack([list(x)[i] for i in FALLING.tolist()]),
    "cat": lambda x: torch.cat([x.split(1)[i] for i in FALLING.tolist()]),
}
KEEPING = {
    "rising": lambda x: x[RISING],
    "rising index_select": lambda x: x.index_select(0, RISING),
    "where a mask is": lambda x: x[FALLING % 2 > 0],
    "last positions": lambda x: x[torch.arange(4), LAST],
    "last positions by gather": lambda x: x.take_along_dim(LAST[:, None, None], dim=1),
    "other numbers": lambda x: x[:, :3].flatten(0, 1)[torch.arange(12).flip(0)],
    "half of the rows": lambda x: x[FALLING[:2]],
    "stack": lambda x: torch.stack([x[i] for i in range(4)]),
    "cat of other tensors": lambda x: torch.cat([x, 2 * x, x.exp(), -x]),
}


def found(operation) -> bool:
    """Whether a node of the graph of four texts with three positions reorders four rows."""
    x = torch.randn(4, 3, 2, requires_grad=True).tanh()
    nodes, waiting = [], [operation(x).sum().grad_fn]
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        waiting += [before for before, _ in node.next_functions if before is not None]
    return any(picks_rows(node) and reorders(node, {4}) for node in nodes)


@pytest.mark.parametrize("operation", REORDERING.values(), ids=list(REORDERING))
def test_rows_out_of_order_are_noticed(operation):
    assert found(operation)


@pytest.mark.parametrize("operation", KEEPING.values(), ids=list(KEEPING))
def test_rows_in_order_and_other_numbers_are_not(operation):
    assert not found(operation)

"""Operations that put rows in another order are told from those that keep it."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import embedding, one_hot

from laplace_lora_ext.passes.order import Sizes, follows_numbers, reorders

FALLING, UNEVEN = torch.tensor([1, 0, 3, 2]), torch.tensor([0, 0, 1, 3])
LAST = torch.tensor([2, 0, 2, 1])  # positions of four texts


def assigned(x: torch.Tensor) -> torch.Tensor:
    result = torch.zeros_like(x)
    for place, row in zip(FALLING.tolist(), x, strict=True):
        result[place] = row
    return result


def of_each(index: torch.Tensor) -> torch.Tensor:
    return torch.eye(4)[index]


REORDERING = {
    "x[index]": lambda x: x[FALLING],
    "uneven": lambda x: x[UNEVEN],
    "positions first": lambda x: x.transpose(0, 1)[:, FALLING],
    "index_select": lambda x: x.index_select(0, FALLING),
    "gather": lambda x: x.gather(0, FALLING[:, None, None].expand_as(x)),
    "index_put": lambda x: torch.zeros_like(x).index_put((FALLING,), x),
    "index_add": lambda x: torch.zeros_like(x).index_add(0, FALLING, x),
    "index_copy": lambda x: torch.zeros_like(x).index_copy(0, FALLING, x),
    "index_reduce": lambda x: torch.ones_like(x).index_reduce(0, FALLING, x, "prod"),
    "scatter": lambda x: torch.zeros_like(x).scatter(0, FALLING[:, None, None].expand_as(x), x),
    "scatter_reduce": lambda x: torch.zeros_like(x).scatter_reduce(
        0, FALLING[:, None, None].expand_as(x), x, "sum"
    ),
    "embedding": lambda x: embedding(FALLING, x.flatten(1)),
    "take": lambda x: x.take(2 * FALLING),
    "assigned in place": assigned,
    "stack": lambda x: torch.stack([x[i] for i in FALLING.tolist()]),
    "stack of means": lambda x: torch.stack([x[i].mean(0) for i in FALLING.tolist()]),
    "stack of parts": lambda x: torch.stack([list(x)[i] for i in FALLING.tolist()]),
    "cat": lambda x: torch.cat([x.split(1)[i] for i in FALLING.tolist()]),
    "cat of slices": lambda x: torch.cat([x[i : i + 1] for i in FALLING.tolist()]),
    "cat of halves": lambda x: torch.cat([x[2:], x[:2]]),
    "a matrix": lambda x: of_each(FALLING) @ x.flatten(1),
    "a matrix and one column": lambda x: of_each(FALLING) @ x[:, 0, :1],
    "a matrix and a vector": lambda x: of_each(FALLING) @ x[:, 0, 0],
    "a matrix from the right": lambda x: (x.flatten(1).T @ of_each(FALLING)).T,
    "einsum": lambda x: torch.einsum("ij,jtd->itd", of_each(FALLING), x),
    "a matrix and a sum": lambda x: (of_each(FALLING)[..., None] * x[:, 0]).sum(1),
    "roll": lambda x: x.roll(2, 0),
    "flip": lambda x: x.flip(0),
    "sort": lambda x: x.sort(0).values,
}
KEEPING = {
    "in order": lambda x: x[torch.arange(4)],
    "where a mask is": lambda x: x[FALLING % 2 > 0],
    "last positions": lambda x: x[torch.arange(4), LAST],
    "last positions by gather": lambda x: x.take_along_dim(LAST[:, None, None], dim=1),
    "other numbers": lambda x: x[:, :3].flatten(0, 1)[torch.arange(12).flip(0)],
    "half of the rows": lambda x: x[FALLING[:2]],
    "padding overwritten": lambda x: x.index_put((FALLING,), torch.zeros(())),
    "stack": lambda x: torch.stack([x[i] for i in range(4)]),
    "stack of means": lambda x: torch.stack([x[i, :n].mean(0) for i, n in enumerate((3, 2, 1, 2))]),
    "cat of slices": lambda x: torch.cat([x[:2], x[2:]]),
    "cat of other tensors": lambda x: torch.cat([x, 2 * x, x.exp(), -x]),
    "a linear layer": lambda x: x @ torch.ones(2, 4) @ of_each(FALLING),
    "attention": lambda x: (x @ x.mT) @ x,
    "a mean of positions": lambda x: x.mean(1),
}

OWNERS = torch.tensor([0, 1, 1, 1])  # two examples of four windows
OF_WINDOWS = {
    "index_add": lambda x: torch.zeros(2, 3, 2).index_add(0, OWNERS, x),
    "a mask": lambda x: x[OWNERS == 1],
    "slices": lambda x: torch.stack([x[:1].sum(0), x[1:].sum(0)]),
    "split": lambda x: torch.stack([part.sum(0) for part in x.split([1, 3])]),
    "segments": lambda x: torch.segment_reduce(x, "mean", lengths=torch.tensor([1, 3])),
    "a matrix": lambda x: one_hot(OWNERS).float().T @ x.flatten(1),
    "the first of each": lambda x: x[torch.tensor([0, 1])],
}
OF_EQUAL_NUMBERS = {
    "index_add": lambda x: torch.zeros(2, 3, 2).index_add(0, torch.arange(4) // 2, x),
    "split": lambda x: torch.stack([part.sum(0) for part in x.split([2, 2])]),
    "the first of each": lambda x: x[torch.tensor([0, 2])],
    "a view": lambda x: x.reshape(2, 6, 2).mean(1),
}


def found(operation, sizes: Sizes) -> bool:
    """Whether a node of the graph of four rows with three positions reorders rows."""
    x = torch.randn(4, 3, 2, requires_grad=True).tanh()
    nodes, waiting = [], [operation(x).sum().grad_fn]
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        waiting += [before for before, _ in node.next_functions if before is not None]
    return any(follows_numbers(node) and reorders(node, sizes) for node in nodes)


@pytest.mark.parametrize("operation", REORDERING.values(), ids=list(REORDERING))
@pytest.mark.filterwarnings("ignore:index_reduce")
def test_rows_out_of_order_are_noticed(operation):
    assert found(operation, Sizes({4}))


@pytest.mark.parametrize("operation", KEEPING.values(), ids=list(KEEPING))
def test_rows_in_order_and_other_numbers_are_not(operation):
    assert not found(operation, Sizes({4}))


@pytest.mark.parametrize("operation", OF_WINDOWS.values(), ids=list(OF_WINDOWS))
def test_windows_of_which_examples_have_unequal_numbers_are_noticed(operation):
    assert found(operation, Sizes({2}, {4, 12}))


@pytest.mark.parametrize("operation", OF_EQUAL_NUMBERS.values(), ids=list(OF_EQUAL_NUMBERS))
def test_equal_numbers_of_windows_are_not(operation):
    assert not found(operation, Sizes({2}, {4, 12}))

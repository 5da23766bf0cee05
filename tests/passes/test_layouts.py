"""Rows at a layer by example, however a model lays them out."""

from __future__ import annotations

import pytest
import torch

from laplace_lora_ext.models.positions import Positions
from laplace_lora_ext.passes.layouts import (
    ExamplesFirst,
    OneAtATime,
    PositionsFirst,
    Scattered,
    Together,
)
from laplace_lora_ext.passes.ownership import NOBODY

# Three examples of two sequences each, five positions a sequence, four numbers a position.
POSITIONS = Positions(n_examples=3, n_rows=6, length=5, mask=None)
BY_EXAMPLE = torch.arange(3 * 10 * 4).reshape(3, 10, 4)
BY_POSITION = BY_EXAMPLE.reshape(6, 5, 4).transpose(0, 1)


def assert_arranges(layout, rows: torch.Tensor, expected: torch.Tensor = BY_EXAMPLE) -> None:
    """With a leading dimension of seeds and without one."""
    assert torch.equal(layout.arrange(rows, POSITIONS), expected)
    seeds = torch.stack([rows, -rows])
    arranged = layout.arrange(seeds, POSITIONS, n_leading=1)
    assert torch.equal(arranged, torch.stack([expected, -expected]))


@pytest.mark.parametrize("shape", [(6, 5, 4), (30, 4), (3, 2, 5, 4), (15, 2, 4)])
def test_examples_first(shape):
    assert ExamplesFirst().allows(torch.Size(shape[:-1]), POSITIONS)
    assert_arranges(ExamplesFirst(), BY_EXAMPLE.reshape(shape))


@pytest.mark.parametrize("shape", [(5, 6, 4), (30, 4)])
def test_positions_first(shape):
    assert PositionsFirst().allows(torch.Size(shape[:-1]), POSITIONS)
    assert_arranges(PositionsFirst(), BY_POSITION.reshape(shape))


def test_sizes_that_a_layout_cannot_have():
    for shape in ((5, 6), (), (10,), (1, 3)):
        assert not ExamplesFirst().allows(torch.Size(shape), POSITIONS)
    for shape in ((6, 5), (), (15,), (3,)):
        assert not PositionsFirst().allows(torch.Size(shape), POSITIONS)


def test_a_layout_explains_the_owners_of_its_rows_and_no_others():
    square = Positions(n_examples=3, n_rows=3, length=3, mask=None)
    shape = torch.Size((3, 3))
    by_example = torch.arange(3).repeat_interleave(3)
    by_position = torch.arange(3).repeat(3)
    assert ExamplesFirst().explains(by_example, shape, square)
    assert PositionsFirst().explains(by_position, shape, square)
    assert not ExamplesFirst().explains(by_position, shape, square)
    assert not PositionsFirst().explains(by_example, shape, square)
    diagonal = torch.tensor([0, NOBODY, NOBODY, NOBODY, 1, NOBODY, NOBODY, NOBODY, 2])
    assert ExamplesFirst().explains(diagonal, shape, square)
    assert PositionsFirst().explains(diagonal, shape, square)
    assert not ExamplesFirst().explains(
        by_example, torch.Size((9, 1)), square._replace(n_examples=2, n_rows=2)
    )


def test_scattered_rows_are_gathered_and_filled_up():
    owners = torch.tensor([2, 0, NOBODY, 2, 2, 0])
    rows = torch.arange(1.0, 13).reshape(6, 2)
    none = [0.0, 0.0]
    expected = torch.tensor(
        [[[3.0, 4.0], [11.0, 12.0], none], [none] * 3, [[1.0, 2.0], [7.0, 8.0], [9.0, 10.0]]]
    )
    assert_arranges(Scattered(owners), rows, expected)
    assert_arranges(Scattered(owners), rows.reshape(2, 3, 2), expected)


def test_one_example_has_all_rows():
    rows = BY_EXAMPLE.reshape(5, 6, 4)
    assert_arranges(Together(), rows, rows.reshape(1, 30, 4))
    assert_arranges(Together(), torch.ones(4), torch.ones(1, 1, 4))


def test_a_mask_is_refused_where_it_says_nothing_of_the_rows():
    with pytest.raises(NotImplementedError, match='no fixed order: use kfac_approx="gradient"'):
        Scattered(torch.zeros(3)).valid(2, POSITIONS)
    with pytest.raises(NotImplementedError, match=r"rows of a\.query belong to several examples"):
        OneAtATime("a.query").valid(2, POSITIONS)
    assert ExamplesFirst().valid(10, POSITIONS) is None

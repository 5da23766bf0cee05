"""What a batch says of the rows that its layers see."""

from __future__ import annotations

import pytest
import torch

from laplace_lora_ext.models.batches import Positions


def test_a_mask_is_for_layers_that_see_all_positions():
    mask = torch.tensor([[True, True, False, True], [True, False, False, True]])
    positions = Positions(n_examples=2, n_rows=4, length=2, mask=mask)
    assert positions.valid(4) is mask
    assert positions.valid(2) is None  # pooled: one row a sequence
    assert positions._replace(mask=None).valid(7) is None
    with pytest.raises(NotImplementedError, match=r"3 positions of each example, .*mask has 4"):
        positions.valid(3)


def test_tokens_are_counted_where_their_length_is_known():
    positions = Positions(n_examples=2, n_rows=4, length=3, mask=None)
    assert positions.n_tokens == 12
    assert positions._replace(length=None).n_tokens is None

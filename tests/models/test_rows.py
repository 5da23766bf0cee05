"""Rows of the layers that blocks belong to."""

import torch
from torch import nn

from laplace_lora_ext.models.convolutions import PatchRows
from laplace_lora_ext.models.embeddings import halves
from laplace_lora_ext.models.lora_layers import Block
from laplace_lora_ext.models.rows import LinearRows
from tests.support.models import with_lora


def rows_of(layer) -> LinearRows:
    return Block("0.lora_A.default.weight", layer, True).rows


def test_each_kind_of_layer_has_its_rows():
    linear, x = nn.Linear(3, 4, bias=False), torch.randn(2, 5, 3)
    rows, y = rows_of(linear), linear(x)
    assert type(rows) is LinearRows
    torch.testing.assert_close(rows.input_rows(x) @ linear.weight.T, rows.output_rows(y))
    assert rows.row_shape(y) == (2, 5)
    assert isinstance(rows_of(nn.Conv1d(2, 3, 1)), PatchRows)
    words = with_lora(nn.Sequential(nn.Embedding(5, 4)), "0")[0]
    for half in halves(words, "default"):
        assert rows_of(half) is half

"""Searches for the least of a loss."""

import math

import pytest
import torch

from laplace_lora_ext.tuning.loss_search import search_line


def test_a_search_without_a_minimum_says_so():
    with pytest.warns(UserWarning, match="no minimum in reach") as warning:
        search_line(lambda point: 1 / (1 + point.item()), torch.ones(1), 100)
    assert len(warning) == 1
    with pytest.raises(ValueError, match="does not depend"):
        search_line(lambda point: 1.0, torch.ones(1), 100)
    with pytest.raises(ValueError, match="not a number"):
        search_line(lambda point: math.nan, torch.ones(1), 100)

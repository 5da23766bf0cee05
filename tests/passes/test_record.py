"""Recorded passes of a batch, or of its examples alone where they share rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from laplace_lora_ext.curvature.backend import LowRankKronGGN
from laplace_lora_ext.passes import record
from laplace_lora_ext.passes.record import Alone
from laplace_lora_ext.passes.recording import Recording
from tests.support.models import sequences, with_lora
from tests.support.posteriors import count_forward_passes, make


class SharedRows(nn.Module):
    """Adds to its inputs what a layer makes of rows without a batch dimension."""

    def __init__(self, in_batch: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.embedding = nn.Parameter(torch.randn(2, 5))
        self.in_batch = in_batch  # whether the logits depend on the other examples

    def forward(self, batch: Any) -> torch.Tensor:
        x = batch["x"] if isinstance(batch, Mapping) else batch
        x = x[0] if isinstance(x, tuple) else x
        others = x.mean(0) if self.in_batch else 0
        return (self.layer(x - others) + self.layer(self.embedding).sum(0)).tanh().mean(1)


def recorded_as(model: nn.Module, x: Any) -> type:
    backend = LowRankKronGGN(model, "classification")
    with record(backend.model, backend.blocks, x) as recording:
        return type(recording)


def test_examples_that_share_rows_are_recorded_alone():
    X, _ = sequences(3, 4)
    model = with_lora(SharedRows(), "layer")
    assert recorded_as(model, X) is Alone
    assert recorded_as(model, {"x": X, "same": torch.ones(7)}) is Alone


def test_examples_that_are_not_the_same_alone_are_recorded_together():
    X, _ = sequences(3, 4)
    assert recorded_as(with_lora(SharedRows(in_batch=True), "layer"), X) is Recording
    assert recorded_as(with_lora(SharedRows(), "layer"), (X, X)) is Recording


class NeedsPairs(SharedRows):
    def forward(self, batch: Any) -> torch.Tensor:
        if len(batch) == 1:
            raise RuntimeError("not alone")
        return super().forward(batch)


def test_examples_that_the_model_does_not_take_alone_are_recorded_together():
    X, _ = sequences(3, 4)
    assert recorded_as(with_lora(NeedsPairs(), "layer"), X) is Recording


def test_examples_alone_take_one_pass_each():
    """And the batch one, which tells that they have the same logits in it."""
    (X, y), la = sequences(4, 3), make(with_lora(SharedRows(), "layer"))
    la.fit([(X, y)])
    calls = count_forward_passes(la)
    la.fit([(X, y)])
    assert len(calls) == 1 + 4
    calls.clear()
    la.fit([(X[:1], y[:1])])
    assert len(calls) == 1


@pytest.mark.parametrize("in_batch", [False, True])
def test_nothing_can_be_back_propagated_afterwards(in_batch):
    backend = LowRankKronGGN(with_lora(SharedRows(in_batch), "layer"), "classification")
    with record(backend.model, backend.blocks, sequences(3, 4)[0]) as recording:
        parts = getattr(recording, "_examples", [recording])
        assert all(part.logits.requires_grad for part in parts)
    for part in parts:
        assert not part.logits.requires_grad
        assert not part._heard.calls
        assert "_graph" not in vars(part)

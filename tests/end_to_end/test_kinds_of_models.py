"""Kinds of adapters, precisions and wrappers have the outcomes of the tables."""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product

import peft
import pytest
import torch
from packaging.version import Version
from torch import Tensor, distributed, nn
from torch.testing import assert_close

from tests.compatibility.kinds import (
    ADAPTERS,
    PRECISIONS,
    WRAPPERS,
    Kind,
    Precision,
)
from tests.support.dense import EXACT, assert_exact, full_rank
from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import make


def made(kind: Kind) -> nn.Module:
    """Make the model, or skip where this PEFT or torch has no such kind."""
    try:
        return kind.model()
    except ImportError as error:
        pytest.skip(f"this torch: {error}")
    except (AttributeError, TypeError, ValueError) as error:
        # From here on PEFT has all of them: such an error is a fault.
        if Version(peft.__version__) >= Version("0.21"):
            raise
        pytest.skip(f"this PEFT: {error}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("structure", "name"),
    [*product(["lowrank_kron"], ADAPTERS), ("diag", "DoRA"), ("full", "LoRA-FA")],
)
def test_each_kind_of_adapter(structure: str, name: str):
    kind = ADAPTERS[name]
    model = made(kind)
    settings = full_rank(structure)
    if kind.refusal:
        refused = (ValueError, NotImplementedError)
        with pytest.raises(refused, match=kind.refusal):
            make(model, structure, **settings)
        # There is no posterior to compare.
        return
    batches = kind.batches()
    la = make(model, structure, **settings)
    la.fit(batches)
    inputs = [X for X, _ in batches]
    assert_exact(la, model, inputs)


@pytest.fixture
def process_group() -> Iterator[None]:
    """Begin a group of this process alone, for wrappers that ask for one."""
    distributed.init_process_group(
        "gloo",
        store=distributed.HashStore(),
        rank=0,
        world_size=1,
    )
    yield
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", WRAPPERS)
def test_each_wrapper(name: str):
    kind = WRAPPERS[name]
    model = made(kind)
    if kind.refusal:
        with pytest.raises(NotImplementedError, match=kind.refusal):
            make(model, **full_rank())
        return
    # A wrapper must change nothing: what is expected is the model without it.
    batches = ragged_batches()
    bare = make(lora_model("bert"), **full_rank())
    bare.fit(batches)
    wrapped = make(model, **full_rank())
    wrapped.fit(batches)
    found = wrapped.H.to_matrix()
    expected = bare.H.to_matrix()
    assert_close(found, expected, **EXACT)
    first, *_ = batches
    found = wrapped.predictive_moments(first)
    expected = bare.predictive_moments(first)
    assert_close(found, expected, **EXACT)


def in_precision(precision: Precision) -> nn.Module:
    """Make a model whose base and LoRA weights have their data types."""
    model = lora_model("bert").to(precision.base)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.to(precision.lora)
    return model


def covariances(
    model: nn.Module,
    autocast: torch.dtype | None = None,
) -> Tensor:
    """Fit a posterior, perhaps under autocast, and find covariances of its logits."""
    batches = ragged_batches()
    precision = nullcontext()
    if autocast is not None:
        precision = torch.autocast("cpu", autocast)
    with precision:
        la = make(model, **full_rank())
        try:
            la.fit(batches)
        except RuntimeError as error:
            # Older ones lack kernels of some data types.
            pytest.skip(f"this torch: {error}")
        first, *_ = batches
        return la.predictive_moments(first).f_var


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PRECISIONS)
def test_each_precision(name: str):
    precision = PRECISIONS[name]
    rounded = in_precision(precision)
    # The same rounded weights, with which float64 computes.
    in_float64 = copy.deepcopy(rounded).double()
    expected = covariances(in_float64)
    found = covariances(rounded, precision.autocast)
    # Half precision is not enough for what is summed.
    at_least_float32 = torch.promote_types(precision.lora, torch.float32)
    assert found.dtype is at_least_float32
    error = (found - expected).abs().max()
    # Relative to the largest number, which small ones are rounded like.
    largest = expected.abs().max()
    assert error <= precision.bound * largest

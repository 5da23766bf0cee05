"""Kinds of adapters, precisions and wrappers have the outcomes of the tables."""

import copy
from collections.abc import Iterator
from contextlib import nullcontext

import peft
import pytest
import torch
from packaging.version import Version
from torch import distributed, nn
from torch.testing import assert_close

from tests.compatibility.kinds import ADAPTERS, PRECISIONS, WRAPPERS, Kind, Precision
from tests.support.dense import EXACT, assert_exact
from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import make

RANK = {"backend_kwargs": {"rank": 1000}}


def made(kind: Kind) -> nn.Module:
    """The model, unless this PEFT or torch has no such kind."""
    try:
        return kind.model()
    except ImportError as error:
        pytest.skip(f"this torch: {error}")
    except (AttributeError, TypeError, ValueError) as error:
        if Version(peft.__version__) >= Version("0.21"):
            raise
        pytest.skip(f"this PEFT: {error}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("structure", ["lowrank_kron", "diag", "full"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_each_kind_of_adapter(name: str, structure: str):
    kind = ADAPTERS[name]
    model = made(kind)
    settings = RANK if structure == "lowrank_kron" else {}
    if kind.refusal:
        with pytest.raises((ValueError, NotImplementedError), match=kind.refusal):
            make(model, structure, **settings)
        return
    batches = kind.batches()
    la = make(model, structure, **settings)
    la.fit(batches)
    assert_exact(la, model, [X for X, _ in batches])


@pytest.fixture
def process_group() -> Iterator[None]:
    """One of this process alone, for wrappers that ask for one."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", WRAPPERS)
def test_each_wrapper(name: str):
    kind = WRAPPERS[name]
    batches = ragged_batches()
    if kind.refusal:
        with pytest.raises(NotImplementedError, match=kind.refusal):
            make(made(kind), **RANK)
        return
    results = []
    for model in (lora_model("bert"), made(kind)):
        la = make(model, **RANK)
        la.fit(batches)
        results.append((la.H.to_matrix(), *la.predictive_moments(batches[0])))
    for found, expected in zip(results[1], results[0], strict=True):
        assert_close(found, expected, **EXACT)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PRECISIONS)
def test_each_precision(name: str):
    precision = PRECISIONS[name]
    batch, *others = ragged_batches()
    rounded = in_precision(precision)
    results = []
    for model in (copy.deepcopy(rounded).double(), rounded):
        autocast = precision.autocast if model is rounded else None
        with torch.autocast("cpu", autocast) if autocast else nullcontext():
            la = make(model, **RANK)
            try:
                la.fit([batch, *others])
            except RuntimeError as error:
                pytest.skip(f"this torch: {error}")
            results.append(la.predictive_moments(batch).f_var)
    expected, found = results
    assert found.dtype is torch.promote_types(precision.lora, torch.float32)
    assert (found - expected).abs().max() <= precision.bound * expected.abs().max()


def in_precision(precision: Precision) -> nn.Module:
    model = lora_model("bert").to(precision.base)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.to(precision.lora)
    return model

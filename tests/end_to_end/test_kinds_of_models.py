"""Kinds of adapters, precisions and wrappers have the outcomes of the tables."""

import copy
from collections.abc import Iterator
from contextlib import nullcontext

import peft
import pytest
import torch
from packaging.version import Version
from torch import Tensor, distributed, nn
from torch.testing import assert_close

from tests.compatibility.kinds import ADAPTERS, PRECISIONS, WRAPPERS, Kind
from tests.support.cases import assert_exact
from tests.support.dense import EXACT, full_rank
from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import make

pytestmark = pytest.mark.filterwarnings("ignore")


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


OURS = [("lowrank_kron", name) for name in ADAPTERS]


@pytest.mark.parametrize(
    ("structure", "name"), [*OURS, ("diag", "DoRA"), ("full", "LoRA-FA")]
)
def test_each_kind_of_adapter(structure: str, name: str):
    kind = ADAPTERS[name]
    model = made(kind)
    if kind.refusal:
        with pytest.raises((ValueError, NotImplementedError), match=kind.refusal):
            make(model, structure, **full_rank(structure))
        # There is no posterior to compare.
        return
    batches = kind.batches()
    la = make(model, structure, **full_rank(structure))
    la.fit(batches)
    assert_exact(la, model, [X for X, _ in batches])


@pytest.fixture
def process_group() -> Iterator[None]:
    """Begin a group of this process alone, for wrappers that ask for one."""
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def bare():
    """Fit a posterior of the model that all wrappers are around."""
    la = make(lora_model("bert"), **full_rank())
    la.fit(ragged_batches())
    return la


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", WRAPPERS)
def test_each_wrapper(name: str, bare):
    kind = WRAPPERS[name]
    model = made(kind)
    if kind.refusal:
        with pytest.raises(NotImplementedError, match=kind.refusal):
            make(model, **full_rank())
        return
    # A wrapper must change nothing: what is expected is the model without it.
    batches = ragged_batches()
    wrapped = make(model, **full_rank())
    wrapped.fit(batches)
    assert_close(wrapped.H.to_matrix(), bare.H.to_matrix(), **EXACT)
    found = wrapped.predictive_moments(batches[0])
    assert_close(found, bare.predictive_moments(batches[0]), **EXACT)


def covariances(model: nn.Module, autocast: torch.dtype | None = None) -> Tensor:
    """Fit a posterior, perhaps under autocast, and find covariances of its logits."""
    batches = ragged_batches()
    with torch.autocast("cpu", autocast) if autocast else nullcontext():
        la = make(model, **full_rank())
        try:
            la.fit(batches)
        except RuntimeError as error:
            # Older ones lack kernels of some data types.
            pytest.skip(f"this torch: {error}")
        return la.predictive_moments(batches[0]).f_var


@pytest.mark.parametrize("name", PRECISIONS)
def test_each_precision(name: str):
    precision = PRECISIONS[name]
    rounded = lora_model("bert").to(precision.base)
    for parameter_name, parameter in rounded.named_parameters():
        if ".lora_" in parameter_name:
            parameter.data = parameter.data.to(precision.lora)
    # The same rounded weights, with which float64 computes.
    expected = covariances(copy.deepcopy(rounded).double())
    found = covariances(rounded, precision.autocast)
    # Half precision is not enough for what is summed.
    assert found.dtype is torch.promote_types(precision.lora, torch.float32)
    # Relative to the largest number, which small ones are rounded like.
    error = (found - expected).abs().max()
    assert error <= precision.bound * expected.abs().max()

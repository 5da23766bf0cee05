"""Numbers of examples in memory, and in a temporary file."""

import errno
import tempfile

import pytest
import torch

from laplace_lora_ext import LinearizedModel
from laplace_lora_ext.linearized import storage
from laplace_lora_ext.linearized.storage import Collected, RowFile
from tests.support.models import ragged_batches
from tests.support.posteriors import fitted, linearized


@pytest.mark.parametrize("limit", [0, 100, 10**9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_collected_comes_back_in_order(monkeypatch, limit, dtype):
    monkeypatch.setattr(storage, "_LARGEST_IN_MEMORY", limit)
    parts = [torch.randn(n, 2, 3).to(dtype) for n in (2, 1, 4)]
    collected = Collected()
    for part in parts:
        collected.append(part)
    result = collected.result()
    assert isinstance(result, RowFile) == (limit < 10**9)
    assert result.shape == (7, 2, 3)
    assert result.dtype == dtype
    whole = torch.cat(parts)
    for part in (slice(None), slice(1, 3), slice(5, 99), slice(3, 3)):
        assert torch.equal(result[part], whole[part])


def test_batches_that_are_kept_are_let_go_of_as_they_are_joined():
    collected = Collected()
    collected.append(torch.zeros(2, 1, 1))
    collected.result()
    assert not collected._parts


def test_a_file_is_not_read_in_steps():
    rows = RowFile(torch.Size([1]), torch.float32)
    rows.append(torch.zeros(4, 1))
    with pytest.raises(IndexError, match="without steps"):
        rows[::2]


def test_a_full_disk_says_what_to_do(monkeypatch):
    class Full:
        def seek(self, place):
            pass

        def write(self, values):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", Full)
    rows = RowFile(torch.Size([3]), torch.float32)
    with pytest.raises(OSError, match=r"12 bytes each.*TMPDIR.*n_features") as caught:
        rows.append(torch.zeros(4, 3))
    assert caught.value.errno == errno.ENOSPC


def test_features_on_disk_give_the_same_evidence_and_moments(monkeypatch):
    la = fitted()
    precision = torch.linspace(0.1, 2, len(la.blocks)).double()
    in_memory = linearized(la, ragged_batches())
    monkeypatch.setattr(storage, "_LARGEST_IN_MEMORY", 100)
    on_disk = linearized(la, ragged_batches())
    assert isinstance(on_disk._features._stored, RowFile)
    assert isinstance(on_disk._own, RowFile)
    for model in (in_memory, on_disk):
        assert isinstance(model, LinearizedModel)
    expected, found = (model.evidence(precision) for model in (in_memory, on_disk))
    torch.testing.assert_close(found, expected)
    expected, found = (model.leave_one_out(precision) for model in (in_memory, on_disk))
    torch.testing.assert_close(tuple(found), tuple(expected))

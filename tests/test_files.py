"""Posteriors on disk: equal after a round trip, and refused where a single byte is not theirs."""

from __future__ import annotations

import random
import shutil

import pytest
import safetensors.torch
import torch

import laplace_lora_ext
from laplace_lora_ext.files import DESCRIPTION, TENSORS, read_posterior, write_posterior
from tests.support.models import lora_model
from tests.support.posteriors import fitted


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("posterior")
    fitted().save_pretrained(folder)
    return folder


@pytest.fixture
def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def test_trees_come_back_as_they_were(tmp_path):
    state = {
        "numbers": [1, 2.5, None, True, "text"],
        "nested": {"a": [{"b": torch.arange(3)}, torch.zeros(2, 0)], "empty": {}},
        "transposed": torch.randn(3, 2, dtype=torch.float64).T,
        "scalar": torch.tensor(0.1, dtype=torch.float64),
        "half": torch.ones(2, dtype=torch.bfloat16),
    }
    write_posterior(tmp_path / "new" / "folder", state, {"evidence": -1.5})
    read = read_posterior(tmp_path / "new" / "folder")
    assert read["numbers"] == state["numbers"]
    assert read["nested"]["empty"] == {}
    for name in ("transposed", "scalar", "half"):
        torch.testing.assert_close(read[name], state[name], rtol=0, atol=0)
    torch.testing.assert_close(read["nested"]["a"], state["nested"]["a"], rtol=0, atol=0)
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == [DESCRIPTION, TENSORS]


def test_what_cannot_be_saved_leaves_the_files_that_were_there(copied):
    before = {path: path.read_bytes() for path in copied.iterdir()}
    with pytest.raises(TypeError, match="/a/0 is a set"):
        write_posterior(copied, {"a": [{1}]}, {})
    assert {path: path.read_bytes() for path in copied.iterdir()} == before


def test_another_model_is_refused(folder):
    with pytest.raises(ValueError, match="fitted to another model"):
        laplace_lora_ext.from_pretrained(lora_model("bert", r=3), folder)


@pytest.mark.parametrize("name", [DESCRIPTION, TENSORS])
def test_a_missing_file_is_named(copied, name):
    (copied / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        read_posterior(copied)


@pytest.mark.parametrize("name", [DESCRIPTION, TENSORS])
def test_no_changed_or_cut_file_is_read(copied, name):
    path = copied / name
    content = path.read_bytes()
    numbers = random.Random(0)
    read_posterior(copied)
    for _ in range(500):
        place = numbers.randrange(len(content))
        changed = bytearray(content)
        changed[place] ^= 1 << numbers.randrange(8)
        path.write_bytes(numbers.choice([bytes(changed), content[:place], content + b"\n"]))
        with pytest.raises(ValueError, match=r"laplace_posterior\.(json|safetensors)"):
            read_posterior(copied)


FOREIGN = [b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"format": 3}', b"[" * 10_000]


@pytest.mark.parametrize("content", FOREIGN, ids=range(len(FOREIGN)))
def test_foreign_descriptions_are_refused(copied, content):
    (copied / DESCRIPTION).write_bytes(content)
    with pytest.raises(ValueError, match=DESCRIPTION):
        read_posterior(copied)


def test_tensors_of_another_posterior_are_refused(copied, tmp_path):
    safetensors.torch.save_file({"a": torch.ones(2)}, copied / TENSORS)
    with pytest.raises(ValueError, match=rf"{TENSORS} is not the file that was saved with"):
        read_posterior(copied)


def test_a_newer_format_says_so(copied, monkeypatch):
    monkeypatch.setattr("laplace_lora_ext.files._VERSION", 2)
    write_posterior(copied, {}, {})
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"version 2.*reads 1: install a newer one"):
        read_posterior(copied)

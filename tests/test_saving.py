"""Posteriors in files and on the hub: the same after a round trip, or refused."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from laplace_lora_ext import from_pretrained
from laplace_lora_ext.saving import FILE
from tests.support.models import CLASS_TOKEN_IDS, lora_model
from tests.support.posteriors import fitted, make, priors_of_blocks


def assert_same_posterior(read, la) -> None:
    """Compare evidences to the bit."""
    assert torch.equal(read.log_marginal_likelihood(), la.log_marginal_likelihood())


def test_answers_and_settings_survive(tmp_path):
    options = {"stochastic": True, "num_samples": 2}
    la = fitted("gpt2", backend_kwargs=options, rank=np.int64(2), temperature=0.5)
    la.prior_precision = priors_of_blocks(la)
    la.n_contrasts = 2
    # In a folder that is made.
    la.save_pretrained(tmp_path / "new")
    read = from_pretrained(la.model.model, tmp_path / "new")
    assert_same_posterior(read, la)
    assert read.model.class_token_ids == CLASS_TOKEN_IDS
    assert read.n_contrasts == 2
    # What the user gives in place of the file's.
    read = from_pretrained(la.model.model, tmp_path / "new", prior_precision=7.0)
    assert (read.prior_precision.item(), read.temperature) == (7, 0.5)
    assert read._structure.settings == la._structure.settings
    la.metadata["dtypes"] = {torch.float32}
    with pytest.raises(TypeError, match="float32"):
        la.save_pretrained(tmp_path)


@pytest.mark.parametrize("metadata", [None, {"laplace_lora_ext": "3", "state": "{}"}])
def test_a_file_of_none_or_of_an_earlier_release_is_refused(metadata, tmp_path):
    with pytest.raises(FileNotFoundError, match=FILE):
        from_pretrained(lora_model("bert"), tmp_path)
    content = safetensors.torch.save({"a": torch.ones(2)}, metadata)
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(ValueError, match=f"{FILE} holds no posterior"):
        from_pretrained(lora_model("bert"), tmp_path)


def test_no_part_of_a_file_is_loaded(la, tmp_path):
    la.save_pretrained(tmp_path)
    path = tmp_path / FILE
    content = path.read_bytes()
    for length in (0, 7, 8, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=f"{FILE} holds no"):
            from_pretrained(la.model.model, tmp_path)


def test_an_interrupted_save_leaves_the_posterior_of_before(la, tmp_path, monkeypatch):
    la.save_pretrained(tmp_path)
    write = Path.write_bytes

    def write_half(path: Path, content: bytes) -> int:
        write(path, content[: len(content) // 2])
        raise OSError("no space left on the disk")

    with monkeypatch.context() as context:
        context.setattr(Path, "write_bytes", write_half)
        with pytest.raises(OSError, match="no space left"):
            la.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert_same_posterior(from_pretrained(la.model.model, tmp_path), la)


def test_the_state_of_another_posterior_is_refused_and_changes_nothing(la):
    # Another prior than any has by default, so that loading would be seen.
    state = la.state_dict() | {"prior_precision": torch.tensor([7.0])}
    same = {"model": la.model.model, "backend_kwargs": {"rank": 3}}
    # What another posterior is made with.
    for options, message in (
        ({"structure": "diag"}, "cls_name=.*not 'DiagLoRA"),
        ({"likelihood": "regression"}, "likelihood="),
        ({"backend_kwargs": {"rank": 4}}, "rank=3, not 4"),
        ({"model": lora_model("bert", r=3)}, "fitted to another model"),
        ({"target_modules": ["value"]}, "query.lora_A.weight .*is None"),
    ):
        other = make(**same | options)
        before = dict(vars(other))
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)
        # The same objects, and not copies that are equal.
        for name, value in before.items():
            assert vars(other)[name] is value, name


def test_draws_of_a_model_that_has_changed_are_not_written(la, tmp_path):
    la.blocks[0].weight.data.mul_(1.01)
    folder = tmp_path / "draws"
    with pytest.raises(RuntimeError, match="have changed since the fit"):
        la.sample_adapters(2, folder)
    assert not folder.exists()

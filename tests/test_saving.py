"""Posteriors in files and on the hub: the same after a round trip, or refused."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.testing import assert_close

from laplace_lora_ext import from_pretrained
from laplace_lora_ext.saving import FILE
from tests.support.models import CLASS_TOKEN_IDS, lora_model, ragged_batches
from tests.support.posteriors import STRUCTURES, fitted, make, some_precision


def assert_same_posterior(read, la) -> None:
    """Compare evidences to the bit."""
    found = read.log_marginal_likelihood()
    expected = la.log_marginal_likelihood()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_posterior_survives(structure, tmp_path):
    model = lora_model("bert")
    batch, *rest = ragged_batches()
    la = fitted(
        model=model, structure=structure, target_modules=["value"], temperature=0.5
    )
    la.prior_precision = some_precision(la, "layerwise")
    model.save_pretrained(tmp_path)
    # In a folder that is made.
    folder = tmp_path / "new"
    la.save_pretrained(folder)
    read = from_pretrained(model, folder)
    assert type(read) is type(la)
    assert_same_posterior(read, la)
    assert torch.equal(read(batch), la(batch))

    # A fit goes on from a file as from memory.
    for posterior in (la, read):
        posterior.fit(rest, override=False)
    assert_close(read(batch), la(batch), rtol=1e-12, atol=0)
    curvature = read.state_dict()["H"]
    expected = la.state_dict()["H"]
    assert_close(curvature, expected, rtol=1e-8, atol=1e-12)


def test_answers_and_settings_survive(tmp_path):
    la = fitted("gpt2", backend_kwargs={"stochastic": True, "num_samples": 2}, rank=2)
    la.n_contrasts = 2
    la.save_pretrained(tmp_path)
    read = from_pretrained(la.model.model, tmp_path)
    assert read.model.class_token_ids == CLASS_TOKEN_IDS
    assert read.n_contrasts == 2
    assert read.backend.settings == la.backend.settings


def test_a_folder_without_a_file_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match=FILE):
        from_pretrained(lora_model("bert"), tmp_path)


SOME_TENSORS = {"a": torch.ones(2)}


def of_no_release() -> bytes:
    return safetensors.torch.save(SOME_TENSORS)


def of_an_earlier_release() -> bytes:
    metadata = {"laplace_lora_ext": "3", "state": "{}"}
    return safetensors.torch.save(SOME_TENSORS, metadata)


@pytest.mark.parametrize(
    "content", [of_no_release(), of_an_earlier_release()], ids=["none", "earlier"]
)
def test_a_file_that_holds_no_posterior_is_refused(content, tmp_path):
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"{FILE} holds no posterior .* save it again"
    ):
        from_pretrained(lora_model("bert"), tmp_path)


def test_no_part_of_a_file_is_loaded(tmp_path):
    la = fitted()
    model = la.model.model
    la.save_pretrained(tmp_path)
    path = tmp_path / FILE
    content = path.read_bytes()
    for length in (0, 7, 8, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=rf"{FILE} holds no posterior that this"):
            from_pretrained(model, tmp_path)
    # It was what lacked that was refused.
    path.write_bytes(content)
    read = from_pretrained(model, tmp_path)
    assert torch.equal(read.mean, la.mean)


def test_an_interrupted_save_leaves_the_posterior_of_before(tmp_path, monkeypatch):
    la = fitted()
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
    read = from_pretrained(la.model.model, tmp_path)
    assert_same_posterior(read, la)


def test_numbers_of_numpy_are_settings_too(tmp_path):
    la = fitted(rank=np.int64(3))
    la.save_pretrained(tmp_path)
    read = from_pretrained(la.model.model, tmp_path)
    assert_same_posterior(read, la)


def test_what_a_file_can_not_hold_is_named(tmp_path):
    la = fitted()
    la.metadata["dtypes"] = {torch.float32}
    with pytest.raises(TypeError, match=r"no set: .*\{torch.float32\}"):
        la.save_pretrained(tmp_path)
    # Not even a part of a file is left.
    assert not list(tmp_path.iterdir())


def other_weights(la):
    la.blocks[0].weight.data.mul_(1.01)
    return la


def another_structure(la):
    return make(la.model.model, "diag")


def another_model(la):
    return make(lora_model("bert", r=3), backend_kwargs={"rank": 3})


def another_rank(la):
    return make(la.model.model, backend_kwargs={"rank": 4})


def another_approximation(la):
    return make(la.model.model, backend_kwargs={"rank": 3, "kfac_approx": "expand"})


def another_likelihood(la):
    return make(la.model.model, likelihood="regression", backend_kwargs={"rank": 3})


FOREIGN = [
    (another_structure, "cls_name='LowRank.*not 'DiagLoRA"),
    (another_model, "fitted to another model"),
    (other_weights, "around other LoRA weights"),
    (another_rank, "rank=3, not 4"),
    (another_approximation, "kfac_approx='gradient', not 'expand'"),
    (another_likelihood, "likelihood='classification', not 'regression'"),
]


@pytest.mark.parametrize(("another", "message"), FOREIGN)
def test_the_state_of_another_posterior_is_refused_and_changes_nothing(
    another, message
):
    la = fitted()
    # Another prior than any has by default, so that loading would be seen.
    state = la.state_dict() | {"prior_precision": torch.tensor([7.0])}
    other = another(la)
    before = dict(vars(other))
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)
    # The same objects, and not copies that are equal.
    for name, value in before.items():
        assert vars(other)[name] is value, name


def test_draws_of_a_model_that_has_changed_are_not_written(tmp_path):
    la = other_weights(fitted())
    folder = tmp_path / "draws"
    with pytest.raises(RuntimeError, match="have changed since the fit"):
        la.sample_adapters(2, folder)
    assert not folder.exists()

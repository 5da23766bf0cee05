"""Posteriors in files and on the hub: the same after a round trip, or refused."""

import pytest
import safetensors
import safetensors.torch
import torch

from laplace_lora_ext import from_pretrained
from laplace_lora_ext.saving import FILE
from tests.support.models import CLASS_TOKEN_IDS, lora_model, ragged_batches
from tests.support.posteriors import STRUCTURES, fitted, make, some_precision


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_posterior_survives(structure, tmp_path):
    model, (batch, *rest) = lora_model("bert"), ragged_batches()
    la = fitted(model=model, structure=structure, target_modules=["value"], temperature=0.5)
    la.prior_precision = some_precision(la, "layerwise")
    model.save_pretrained(tmp_path)
    la.save_pretrained(tmp_path / "new")
    read = from_pretrained(model, tmp_path / "new")
    assert type(read) is type(la)
    assert torch.equal(read(batch), la(batch))
    assert torch.equal(read.log_marginal_likelihood(), la.log_marginal_likelihood())
    for posterior in (la, read):
        posterior.fit(rest, override=False)
    torch.testing.assert_close(read(batch), la(batch), rtol=1e-12, atol=0)
    torch.testing.assert_close(read.state_dict()["H"], la.state_dict()["H"], rtol=1e-8, atol=1e-12)


def test_answers_and_settings_survive(tmp_path):
    la = fitted("gpt2", backend_kwargs={"stochastic": True, "num_samples": 2}, rank=2)
    la.save_pretrained(tmp_path)
    read = from_pretrained(la.model.model, tmp_path)
    assert read.model.class_token_ids == CLASS_TOKEN_IDS
    assert read.backend.settings == la.backend.settings


def test_a_file_that_holds_no_posterior_is_refused(tmp_path):
    la = fitted()
    with pytest.raises(FileNotFoundError, match=FILE):
        from_pretrained(la.model.model, tmp_path)
    la.save_pretrained(tmp_path)
    path = tmp_path / FILE
    content = path.read_bytes()
    for damaged in (b"", content[:-1], content[:100], b"\xff" * 100):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{FILE} is damaged"):
            from_pretrained(la.model.model, tmp_path)
    for metadata in (None, {"laplace_lora_ext": "2"}):
        safetensors.torch.save_file({"a": torch.ones(2)}, path, metadata)
        with pytest.raises(ValueError, match=rf"{FILE} holds no posterior that this release"):
            from_pretrained(la.model.model, tmp_path)


def other_weights(la):
    la.blocks[0].weight.data.mul_(1.01)
    return la


FOREIGN = {
    "structure": (lambda la: make(la.model.model, "diag"), "cls_name='LowRank.*not 'DiagLoRA"),
    "model": (
        lambda _: make(lora_model("bert", r=3), backend_kwargs={"rank": 3}),
        "fitted to another model",
    ),
    "weights": (other_weights, "around other LoRA weights"),
    "rank": (lambda la: make(la.model.model, backend_kwargs={"rank": 4}), "rank=3, not 4"),
    "kfac_approx": (
        lambda la: make(la.model.model, backend_kwargs={"rank": 3, "kfac_approx": "expand"}),
        "kfac_approx='gradient', not 'expand'",
    ),
    "likelihood": (
        lambda la: make(la.model.model, "lowrank_kron", "regression", backend_kwargs={"rank": 3}),
        "likelihood='classification', not 'regression'",
    ),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_the_state_of_another_posterior_is_refused_and_changes_nothing(what):
    la = fitted()
    state = la.state_dict() | {"prior_precision": torch.tensor([7.0])}
    to, message = FOREIGN[what]
    other = to(la)
    before = dict(vars(other))
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)
    assert all(vars(other)[name] is value for name, value in before.items())


def test_draws_of_a_model_that_has_changed_are_not_written(tmp_path):
    la = other_weights(fitted())
    with pytest.raises(RuntimeError, match="have changed since the fit"):
        la.sample_adapters(2, tmp_path / "draws")
    assert not (tmp_path / "draws").exists()

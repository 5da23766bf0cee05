"""Posteriors in folders and on the hub: the same after a round trip."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn

import laplace_lora_ext
from laplace_lora_ext.files import DESCRIPTION, TENSORS
from tests.support.models import CLASS_TOKEN_IDS, base_model, lora_model, ragged_batches
from tests.support.posteriors import STRUCTURES, fitted, some_precision


@pytest.mark.parametrize("structure", STRUCTURES)
def test_predictions_and_evidence_survive(structure, tmp_path):
    model, batch = lora_model("bert"), ragged_batches()[0]
    la = fitted(model=model, structure=structure, target_modules=["value"], temperature=0.5)
    la.prior_precision = some_precision(la, "layerwise")
    model.save_pretrained(tmp_path)
    la.save_pretrained(tmp_path)
    read = laplace_lora_ext.from_pretrained(model, tmp_path)
    assert type(read) is type(la)
    torch.testing.assert_close(read.predictive_moments(batch), la.predictive_moments(batch))
    assert torch.equal(read.log_marginal_likelihood(), la.log_marginal_likelihood())
    summary = json.loads((tmp_path / DESCRIPTION).read_text())["summary"]
    assert summary["evidence"] == la.log_marginal_likelihood().item()
    assert summary["mean_prior_precision"] == la.prior_precision.mean().item()
    read.fit(ragged_batches(), override=False)
    assert read.n_data == 2 * la.n_data


def test_a_model_that_is_loaded_anew_is_the_same(tmp_path):
    """Its base comes with another head, which the adapter's own replaces."""
    model, batch = lora_model("bert", torch.float32), ragged_batches()[0]
    la = fitted(model=model)
    model.save_pretrained(tmp_path / "adapter")
    la.save_pretrained(tmp_path / "adapter")
    torch.manual_seed(0)  # as in `lora_model`
    again = base_model("bert")
    nn.init.ones_(again.classifier.weight)
    loaded = PeftModel.from_pretrained(again, tmp_path / "adapter")
    read = laplace_lora_ext.from_pretrained(loaded, tmp_path / "adapter")
    torch.testing.assert_close(read(batch), la(batch), rtol=1e-6, atol=1e-7)


def test_answers_and_settings_survive(tmp_path):
    la = fitted("gpt2", backend_kwargs={"stochastic": True, "num_samples": 2}, rank=2)
    la.save_pretrained(tmp_path)
    read = laplace_lora_ext.from_pretrained(la.model.model, tmp_path)
    assert read.model.class_token_ids == CLASS_TOKEN_IDS
    assert read.backend.settings == la.backend.settings


def test_the_hub_gets_adapter_and_posterior(monkeypatch):
    seen = {}

    def upload(repo_id, folder_path, **kwargs):
        seen[repo_id] = {path.name for path in Path(folder_path).iterdir()}, kwargs

    monkeypatch.setattr("huggingface_hub.create_repo", lambda *args, **kwargs: None)
    monkeypatch.setattr("huggingface_hub.upload_folder", upload)
    fitted().push_to_hub("me/posterior", commit_message="fitted")
    files, kwargs = seen["me/posterior"]
    assert {DESCRIPTION, TENSORS, "adapter_config.json", "adapter_model.safetensors"} <= files
    assert kwargs == {"commit_message": "fitted"}


def test_draws_of_a_model_that_has_changed_are_not_written(tmp_path, monkeypatch):
    la = fitted()
    la.blocks[2].weight.data.mul_(1.01)
    with pytest.raises(RuntimeError, match="have changed since the fit"):
        la.sample_adapters(2, tmp_path / "draws")
    assert not (tmp_path / "draws").exists()
    with pytest.raises(RuntimeError, match="have changed since the fit"):
        la.push_to_hub("user/nothing")

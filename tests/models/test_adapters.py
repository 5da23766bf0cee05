"""Draws from the posterior as ordinary adapters."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext.models.adapters import add_fresh_adapter
from laplace_lora_ext.models.tree import Tree, evaluating
from tests.support.models import (
    CLASS_TOKEN_IDS,
    base_model,
    lora_model,
    ragged_batches,
    without_labels,
)
from tests.support.posteriors import fitted, generator

Batch = dict[str, Tensor]


def reloaded(kind: str, folder: Path) -> PeftModel:
    """Load an adapter as a user would, onto the base model of `lora_model`."""
    # As `lora_model` sets it.
    torch.manual_seed(0)
    base = base_model(kind).double()
    model = PeftModel.from_pretrained(base, str(folder))
    return model.double().eval()


# --- files of drawn adapters ----------------------------------------------------------


def probabilities(model: PeftModel, batch: Batch) -> Tensor:
    """Predict texts of which none is padded."""
    logits = model(**without_labels(batch)).logits
    if logits.ndim == 3:
        logits = logits[:, -1, CLASS_TOKEN_IDS]
    return logits.softmax(-1)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_averaged_adapters_are_the_sampled_networks_prediction(kind, tmp_path):
    la = fitted(kind, prior_precision=20.0)
    (batch,) = ragged_batches(lengths=[5] * 3, padded_to=5)
    folders = la.sample_adapters(
        3,
        tmp_path,
        # As of the prediction: the same three are drawn.
        generator=generator(),
    )
    names = [folder.name for folder in folders]
    assert names == ["sample_0", "sample_1", "sample_2"]
    drawn = []
    for folder in folders:
        model = reloaded(kind, folder)
        drawn.append(probabilities(model, batch))
    # Means of draws that were alike would agree with anything.
    assert not torch.allclose(drawn[0], drawn[1], atol=1e-4)

    found = torch.stack(drawn).mean(0)
    expected = la(
        batch, pred_type="nn", link_approx="mc", n_samples=3, generator=generator()
    )
    assert_close(found, expected)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_drawing_adapters_leaves_the_model(kind, tmp_path):
    la = fitted(kind)
    before = copy.deepcopy(la.model.state_dict())
    la.sample_adapters(2, tmp_path)
    after = la.model.state_dict()
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value), name


def configuration(folder: Path) -> dict[str, Any]:
    path = folder / "adapter_config.json"
    return json.loads(path.read_text())


def weights_in(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def weights_of(model: PeftModel) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def test_files_are_those_of_the_users_own_adapter(tmp_path):
    la = fitted()
    (folder,) = la.sample_adapters(1, tmp_path)
    folder_of_own = tmp_path / "own"
    la.model.model.save_pretrained(folder_of_own)
    assert configuration(folder) == configuration(folder_of_own)
    drawn = weights_in(folder)
    own = weights_in(folder_of_own)
    assert drawn.keys() == own.keys()
    for name, value in drawn.items():
        assert value.shape == own[name].shape, name
        # The head is at its MAP value.
        is_drawn = "lora_" in name
        is_kept = torch.equal(value, own[name])
        assert is_kept != is_drawn, name


def test_weights_outside_the_posterior_stay_at_their_map_value(tmp_path):
    la = fitted(layers_to_transform=[1])
    (folder,) = la.sample_adapters(1, tmp_path)
    drawn = weights_of(reloaded("bert", folder))
    trained = weights_of(lora_model("bert"))
    assert drawn.keys() == trained.keys()
    for name, value in drawn.items():
        # PEFT's own copy of the head, which is not used.
        if "original_module" in name:
            continue
        takes_part = ".layer.1." in name and "lora_" in name
        is_kept = torch.equal(value, trained[name])
        assert is_kept != takes_part, name


# --- adapters beside another ----------------------------------------------------------


def trained_names(model: PeftModel) -> list[str]:
    """List the names of the weights that a training would change."""
    names = []
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            names.append(name)
    return names


@pytest.mark.parametrize("adapter", ["second", "s", "weight", "default_2", "lora_A"])
def test_a_fresh_adapter_trains_what_the_other_one_does(adapter):
    model = lora_model("bert", trainable_token_indices=[1, 5])
    # As LoRA-FA, which does not train A.
    for name, weight in model.named_parameters():
        if "lora_A" in name:
            weight.requires_grad_(False)
    of_default = trained_names(model)
    expected = [name.replace(".default", f".{adapter}") for name in of_default]
    add_fresh_adapter(model, adapter)
    assert trained_names(model) == expected


def test_an_adapter_runs_alone_whatever_another_one_has(eight_texts):
    model = lora_model("bert", trainable_token_indices=[1, 5]).eval()
    config = LoraConfig(r=2, target_modules=["key"], init_lora_weights=False)
    model.add_adapter("plain", config)
    inputs = without_labels(eight_texts)

    def logits() -> Tensor:
        return model(**inputs).logits

    logits_of = {}
    for adapter in ("default", "plain"):
        model.set_adapter(adapter)
        logits_of[adapter] = logits()
    assert not torch.allclose(logits_of["default"], logits_of["plain"])

    # Whichever of them is active outside.
    for active in logits_of:
        model.set_adapter(active)
        for alone, expected in logits_of.items():
            with evaluating(Tree(model), alone):
                assert torch.equal(logits(), expected)

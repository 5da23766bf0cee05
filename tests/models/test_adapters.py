"""Draws from the posterior as ordinary adapters."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from torch.testing import assert_close

from laplace_lora_ext.models.adapters import add_fresh_adapter, only_active
from tests.support.models import CLASS_TOKEN_IDS, base_model, lora_model, ragged_batches
from tests.support.posteriors import fitted, generator


def reloaded(kind, folder) -> PeftModel:
    torch.manual_seed(0)  # the base model of `lora_model`
    base = base_model(kind).double()
    return PeftModel.from_pretrained(base, str(folder)).double().eval()


def probabilities(model, batch):
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    logits = model(**inputs).logits
    if logits.ndim == 3:  # no row of the batch is padded
        logits = logits[:, -1, CLASS_TOKEN_IDS]
    return logits.softmax(-1)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_averaged_adapters_are_the_sampled_networks_prediction(kind, tmp_path):
    la = fitted(kind, prior_precision=20.0)
    batch = ragged_batches(lengths=(5, 5, 5), padded_to=5)[0]
    before = {name: value.clone() for name, value in la.model.state_dict().items()}
    folders = la.sample_adapters(3, tmp_path / "samples", generator=generator())
    assert [folder.name for folder in folders] == ["sample_0", "sample_1", "sample_2"]
    draws = torch.stack([probabilities(reloaded(kind, folder), batch) for folder in folders])
    assert not torch.allclose(draws[0], draws[1], atol=1e-4)
    expected = la(batch, pred_type="nn", link_approx="mc", n_samples=3, generator=generator())
    assert_close(draws.mean(0), expected)
    for name, value in la.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_files_are_those_of_the_users_own_adapter(tmp_path):
    la = fitted()
    (folder,) = la.sample_adapters(1, tmp_path)
    la.model.model.save_pretrained(tmp_path / "own")
    tensors, own = (load_file(f / "adapter_model.safetensors") for f in (folder, tmp_path / "own"))
    assert {name: value.shape for name, value in tensors.items()} == {
        name: value.shape for name, value in own.items()
    }
    assert all(
        torch.equal(tensors[name], own[name]) != ("lora_" in name) for name in tensors
    )  # the head is at its MAP value
    configurations = [
        json.loads((f / "adapter_config.json").read_text()) for f in (folder, tmp_path / "own")
    ]
    assert configurations[0] == configurations[1]


def test_weights_outside_the_posterior_stay_at_their_map_value(tmp_path):
    la = fitted(layers_to_transform=[1])
    (folder,) = la.sample_adapters(1, tmp_path)
    model = reloaded("bert", folder)
    map_model = lora_model("bert")
    for (name, value), expected in zip(
        model.named_parameters(), map_model.parameters(), strict=True
    ):
        changed = ".layer.1." in name and "lora_" in name
        if "original_module" not in name:  # PEFT's own copy of the head, which is not used
            assert torch.equal(value, expected) != changed, name


NAMES = ["second", "s", "lora", "q", "weight", "default_2", "lora_A"]


@pytest.mark.filterwarnings("ignore:The model has modules that are named 'weight'")
@pytest.mark.parametrize("adapter", NAMES)
def test_a_fresh_adapter_trains_what_the_other_one_does(adapter):
    model = lora_model("bert", trainable_token_indices=[1, 5])
    for name, weight in model.named_parameters():
        weight.requires_grad_(weight.requires_grad and "lora_A" not in name)  # LoRA-FA
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    add_fresh_adapter(model, adapter)
    found = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert found == [name.replace(".default", f".{adapter}") for name in trained]


def test_a_name_of_modules_is_warned_of():
    with pytest.warns(UserWarning, match="modules that are named 'layer'"):
        add_fresh_adapter(lora_model("bert"), "layer")


def test_an_adapter_runs_alone_whatever_another_one_has():
    model = lora_model("bert", trainable_token_indices=[1, 5]).eval()
    model.add_adapter("plain", LoraConfig(r=2, target_modules=["key"], init_lora_weights=False))
    (batch,) = ragged_batches(batch_size=8)
    found = []
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    for adapter, other in (("plain", "default"), ("default", "plain")):
        model.set_adapter(adapter)
        expected = model(**inputs).logits
        model.set_adapter(other)
        with only_active(model, adapter):
            assert torch.equal(model(**inputs).logits, expected)
        found.append(expected)
    assert not torch.allclose(*found)

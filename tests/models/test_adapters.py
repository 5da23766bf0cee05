"""Draws from the posterior as ordinary adapters."""

import copy
import json

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from torch.testing import assert_close

from laplace_lora_ext.models.adapters import add_fresh_adapter
from laplace_lora_ext.models.lora_layers import only_active
from tests.support.models import (
    CLASS_TOKEN_IDS,
    base_model,
    lora_model,
    ragged_batches,
    without_labels,
)
from tests.support.posteriors import fitted, generator


def reloaded(kind, folder) -> PeftModel:
    """Load an adapter as a user would, onto the base model of `lora_model`."""
    torch.manual_seed(0)  # as `lora_model` sets it
    base = base_model(kind).double()
    model = PeftModel.from_pretrained(base, str(folder))
    return model.double().eval()


def probabilities(model, batch):
    logits = model(**without_labels(batch)).logits
    if logits.ndim == 3:  # no row of the batch is padded
        logits = logits[:, -1, CLASS_TOKEN_IDS]
    return logits.softmax(-1)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_averaged_adapters_are_the_sampled_networks_prediction(kind, tmp_path):
    la = fitted(kind, prior_precision=20.0)
    (batch,) = ragged_batches(lengths=(5, 5, 5), padded_to=5)
    before = copy.deepcopy(la.model.state_dict())
    folders = la.sample_adapters(3, tmp_path / "samples", generator=generator())
    assert [folder.name for folder in folders] == ["sample_0", "sample_1", "sample_2"]
    drawn = [probabilities(reloaded(kind, folder), batch) for folder in folders]
    assert not torch.allclose(drawn[0], drawn[1], atol=1e-4)
    expected = la(
        batch,
        pred_type="nn",
        link_approx="mc",
        n_samples=3,
        generator=generator(),
    )
    assert_close(torch.stack(drawn).mean(0), expected)
    for name, value in la.model.state_dict().items():
        assert torch.equal(value, before[name])


def weights_in(folder):
    return load_file(folder / "adapter_model.safetensors")


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
        assert torch.equal(value, own[name]) != is_drawn, name


def configuration(folder):
    return json.loads((folder / "adapter_config.json").read_text())


def test_weights_outside_the_posterior_stay_at_their_map_value(tmp_path):
    la = fitted(layers_to_transform=[1])
    (folder,) = la.sample_adapters(1, tmp_path)
    drawn = dict(reloaded("bert", folder).named_parameters())
    trained = dict(lora_model("bert").named_parameters())
    assert drawn.keys() == trained.keys()
    for name, value in drawn.items():
        if "original_module" in name:  # PEFT's own copy of the head, which is not used
            continue
        takes_part = ".layer.1." in name and "lora_" in name
        assert torch.equal(value, trained[name]) != takes_part, name


# --- adapters beside another ----------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The model has modules that are named 'weight'")
@pytest.mark.parametrize(
    "adapter",
    ["second", "s", "lora", "q", "weight", "default_2", "lora_A"],
)
def test_a_fresh_adapter_trains_what_the_other_one_does(adapter):
    model = lora_model("bert", trainable_token_indices=[1, 5])
    for name, weight in model.named_parameters():
        if "lora_A" in name:
            weight.requires_grad_(False)  # as LoRA-FA
    of_default = trained_names(model)
    expected = [name.replace(".default", f".{adapter}") for name in of_default]
    add_fresh_adapter(model, adapter)
    assert trained_names(model) == expected


def trained_names(model) -> list[str]:
    return [name for name, weight in model.named_parameters() if weight.requires_grad]


def test_a_name_of_modules_is_warned_of():
    with pytest.warns(UserWarning, match="modules that are named 'layer'"):
        add_fresh_adapter(lora_model("bert"), "layer")


def test_an_adapter_runs_alone_whatever_another_one_has():
    model = lora_model("bert", trainable_token_indices=[1, 5]).eval()
    config = LoraConfig(r=2, target_modules=["key"], init_lora_weights=False)
    model.add_adapter("plain", config)
    (batch,) = ragged_batches(batch_size=8)
    inputs = without_labels(batch)

    def logits():
        return model(**inputs).logits

    model.set_adapter("default")
    of_default = logits()
    with only_active(model, "plain"):
        of_plain = logits()
    model.set_adapter("plain")
    assert torch.equal(of_plain, logits())
    with only_active(model, "default"):
        assert torch.equal(of_default, logits())
    assert not torch.allclose(of_default, of_plain)

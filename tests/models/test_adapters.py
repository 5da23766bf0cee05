"""Draws from the posterior as ordinary adapters."""

import json

import pytest
import torch
from peft import PeftModel, load_peft_weights
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext.models.adapters import add_fresh_adapter
from tests.support.models import (
    CLASS_TOKEN_IDS,
    base_model,
    lora_model,
    ragged_batches,
    without_labels,
)
from tests.support.posteriors import fitted, generator
from tests.support.snapshots import Snapshot

Batch = dict[str, Tensor]


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
    before = Snapshot(la.model.model)
    # As of the prediction: the same three are drawn.
    folders = la.sample_adapters(3, tmp_path, generator=generator())
    before.assert_equal(la.model.model)
    assert [folder.name for folder in folders] == ["sample_0", "sample_1", "sample_2"]
    drawn = []
    for folder in folders:
        torch.manual_seed(0)  # as `lora_model` sets it
        model = PeftModel.from_pretrained(base_model(kind).double(), folder)
        drawn.append(probabilities(model.double().eval(), batch))
    # Means of draws that were alike would agree with anything.
    assert not torch.allclose(drawn[0], drawn[1], atol=1e-4)
    options = {"pred_type": "nn", "n_samples": 3, "generator": generator()}
    assert_close(torch.stack(drawn).mean(0), la(batch, **options))


def test_files_are_those_of_ones_own_adapter_but_for_the_weights_drawn(tmp_path):
    la = fitted(layers_to_transform=[1])
    (folder,) = la.sample_adapters(1, tmp_path)
    own = tmp_path / "own"
    la.model.model.save_pretrained(own)
    name = "adapter_config.json"
    assert json.loads((folder / name).read_text()) == json.loads(
        (own / name).read_text()
    )
    drawn, weights = (load_peft_weights(str(each)) for each in (folder, own))
    assert drawn.keys() == weights.keys()
    for name, value in drawn.items():
        takes_part = ".layer.1." in name and "lora_" in name
        assert torch.equal(value, weights[name]) != takes_part, name


# --- adapters beside another ----------------------------------------------------------


@pytest.mark.parametrize("adapter", ["second", "weight", "default_2", "lora_A"])
def test_a_fresh_adapter_trains_what_the_other_one_does(adapter):
    model = lora_model("bert", trainable_token_indices=[1, 5])
    # As LoRA-FA, which does not train A.
    for name, weight in model.named_parameters():
        if "lora_A" in name:
            weight.requires_grad_(False)

    def trained() -> list[str]:
        return [name for name, each in model.named_parameters() if each.requires_grad]

    expected = [name.replace(".default", f".{adapter}") for name in trained()]
    add_fresh_adapter(model, adapter)
    assert trained() == expected

"""Draws from the posterior as ordinary adapters, and adapters beside another."""

import json

import pytest
import torch
from peft import load_peft_weights

from laplace_lora_ext.models.adapters import active_again, add_fresh_adapter
from laplace_lora_ext.models.lora_layers import adapter_layers
from tests.support.models import lora_model
from tests.support.posteriors import fitted, plain_regression
from tests.support.tasks import add_second


def test_files_are_those_of_ones_own_adapter_but_for_the_weights_drawn(tmp_path):
    la = fitted(layers_to_transform=[1])
    add_second(la.model.model)
    folder, *_, last = la.sample_adapters(10, tmp_path)
    assert [folder.name, last.name] == ["sample_0", "sample_9"]
    assert not (folder / "second").exists()
    own = tmp_path / "own"
    la.model.model.save_pretrained(own)
    configs = [
        json.loads((f / "adapter_config.json").read_text()) for f in (folder, own)
    ]
    assert configs[0] == configs[1]
    drawn, weights = (load_peft_weights(str(each)) for each in (folder, own))
    assert drawn.keys() == weights.keys()
    for name, value in drawn.items():
        takes_part = ".layer.1." in name and "lora_" in name
        assert torch.equal(value, weights[name]) != takes_part, name
    with pytest.raises(FileExistsError, match="sample_0 exists"):
        la.sample_adapters(2, last.parent)
    plain, _ = plain_regression()
    with pytest.raises(ValueError, match="no PeftModel"):
        plain.sample_adapters(1, own)


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
    model.peft_config[adapter].init_lora_weights = "pissa_niter_4"
    with pytest.raises(ValueError, match="changes the base model"):
        add_fresh_adapter(model, "third")
    # A third one would begin with what has learnt the first one's texts.
    model.get_base_model().bert.pooler.dense.bias.requires_grad_(True)
    with pytest.raises(ValueError, match="pooler"):
        add_fresh_adapter(model, "third")


def test_an_adapter_that_is_active_already_stays_merged():
    model = lora_model("bert")
    activate = active_again(model)
    model.merge_adapter()
    activate()
    assert all(layer.merged for layer in adapter_layers(model).values())

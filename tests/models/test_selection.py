"""Which LoRA layers are selected, and adapters that are refused."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from torch import nn

from laplace_lora_ext.models.lora_layers import Block, find_blocks
from tests.support.models import TwoLinear, lora_model, ragged_batches, with_lora
from tests.support.posteriors import fitted

NAMES = [block.name for block in find_blocks(lora_model("bert"))]


def names(blocks: list[Block]) -> list[str]:
    return [block.name for block in blocks]


class Stack(nn.Module):
    """Blocks with an index in their name, as transformers have, below `model.layers`."""

    def __init__(self, n_layers: int = 3) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(TwoLinear(4, 5, 4) for _ in range(n_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.model.layers:
            x = layer(x)
        return x


def test_layers_without_the_active_adapter_are_left_out(bert):
    bert.add_adapter(
        "second", LoraConfig(r=3, target_modules=["value"], modules_to_save=["classifier"])
    )
    bert.set_adapter("second")
    for name, parameter in bert.named_parameters():
        if "lora_B.second" in name:
            nn.init.normal_(parameter, std=0.3)
    blocks = find_blocks(bert)
    assert len(blocks) == 4
    assert all(".value." in b.name and b.name.endswith(".second.weight") for b in blocks)


def test_an_inactive_adapter_takes_no_part(bert):
    bert.add_adapter("second", LoraConfig(r=3, target_modules=["value", "key"]))
    bert.set_adapter("default")  # older PEFT makes the second active where it is the only one
    assert names(find_blocks(bert)) == NAMES


@pytest.mark.parametrize(
    ("selection", "kept"),
    [
        ({"target_modules": ["query"]}, "query"),
        ({"target_modules": "query"}, None),  # a string is a pattern of the whole name, as in PEFT
        ({"target_modules": r".*layer\.1\..*"}, "layer.1."),
        ({"layers_to_transform": 1}, "layer.1."),
        ({"layers_to_transform": [0]}, "layer.0."),
        ({"layers_to_transform": range(2)}, "layer."),
        (
            {"target_modules": ["value"], "layers_to_transform": iter([1])},
            "layer.1.attention.self.value",
        ),
    ],
)
def test_selection_speaks_pefts_words(bert, selection, kept):
    if kept is None:
        with pytest.raises(ValueError, match="No LoRA layer matches"):
            find_blocks(bert, **selection)
    else:
        expected = [name for name in NAMES if kept in name]
        assert names(find_blocks(bert, **selection)) == expected


def test_layers_are_selected_in_a_plain_module():
    model = with_lora(Stack(), "first", "second")
    blocks = find_blocks(model, layers_to_transform=[1])
    assert {name.rpartition(".lora")[0] for name in names(blocks)} == {
        "model.layers.1.first",
        "model.layers.1.second",
    }


def test_layers_without_an_index_do_not_match_layers_to_transform():
    model = with_lora(TwoLinear(), "first")
    with pytest.raises(ValueError, match="No LoRA layer matches"):
        find_blocks(model, layers_to_transform=[5])


@pytest.mark.parametrize(
    "selection",
    [
        {"target_modules": ["key"]},
        {"target_modules": []},
        {"layers_to_transform": [7]},
        {"layers_to_transform": range(0)},
        {"target_modules": ["query"], "layers_to_transform": 2},
    ],
    ids=str,
)
def test_a_selection_that_matches_nothing_is_refused_and_says_what_there_is(bert, selection):
    with pytest.raises(ValueError, match=r"No LoRA layer matches.*layer\.0\.attention\.self"):
        find_blocks(bert, **selection)


def test_a_selection_is_what_the_posterior_is_over(bert):
    la = fitted(
        model=bert, batches=ragged_batches(), target_modules=["value"], layers_to_transform=[1]
    )
    assert la.n_params == 2 * (2 * 12)
    assert len(la.mean) == la.n_params
    assert la.n_layers == 2


def test_a_merged_adapter_is_refused_until_it_is_unmerged(bert):
    bert.merge_adapter()
    with pytest.raises(ValueError, match=r"[Mm]erged.*unmerge_adapter"):
        find_blocks(bert)
    bert.unmerge_adapter()
    assert names(find_blocks(bert)) == NAMES


def test_a_disabled_adapter_is_refused_until_it_is_enabled(bert):
    with (
        bert.disable_adapter(),
        pytest.raises(ValueError, match=r"disabled.*enable_adapter_layers"),
    ):
        find_blocks(bert)
    assert names(find_blocks(bert)) == NAMES


def test_several_active_adapters_are_refused_until_one_is_set():
    model = lora_model("gpt2")
    expected = names(find_blocks(model))
    model.add_adapter("second", LoraConfig(r=3, target_modules=["c_attn"], fan_in_fan_out=True))
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ValueError, match=r"Several.*default, second.*set_adapter"):
        find_blocks(model)
    model.set_adapter("default")
    assert names(find_blocks(model)) == expected


def test_no_active_adapter_is_refused():
    model = with_lora(TwoLinear(), "first")
    model.first.delete_adapter("default")
    with pytest.raises(ValueError, match=r"No adapter is active.*set_adapter"):
        find_blocks(model)

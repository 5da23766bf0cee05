"""LoRA layers and adapters that are refused, by name."""

from __future__ import annotations

import pytest
from peft import AdaLoraConfig, IA3Config, LoHaConfig, PromptTuningConfig, get_peft_model
from torch import nn
from torch.nn.utils import prune, weight_norm

from laplace_lora_ext.models.lora_layers import find_blocks
from tests.support.models import TwoLinear, base_model, with_lora
from tests.support.posteriors import make


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (
            IA3Config(task_type="SEQ_CLS", target_modules=["value"], feedforward_modules=[]),
            "IA3",
        ),
        (LoHaConfig(task_type="SEQ_CLS", r=2, target_modules=["value"]), "LOHA"),
        (PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2), "PROMPT_TUNING"),
    ],
    ids=["IA3", "LoHa", "prompt tuning"],
)
def test_another_tuner_is_refused_by_name(config, found):
    with pytest.raises(ValueError, match=f"No LoRA layer.*{found}"):
        make(get_peft_model(base_model("bert"), config))


def test_a_model_without_adapter_is_refused():
    with pytest.raises(ValueError, match=r"No LoRA layer.*no adapter"):
        make(TwoLinear())


def embedding_lora(**settings: object) -> nn.Module:
    """Beside layers that are supported."""
    return with_lora(base_model("bert"), "word_embeddings", "query", **settings)


def bounded_lora(name: str = "max_norm", value: object = 1.0) -> nn.Module:
    """An embedding with a setting that is not linear."""
    model = embedding_lora()
    setattr(model.bert.embeddings.word_embeddings.base_layer, name, value)
    return model


def frequency_lora() -> nn.Module:
    return bounded_lora("scale_grad_by_freq", True)


def dora_of_an_embedding() -> nn.Module:
    return embedding_lora(use_dora=True)


def conv_lora(**settings: object) -> nn.Module:
    """Convolutions that are not linear maps of patches."""
    return with_lora(nn.Sequential(nn.Conv1d(2, 4, 2, **settings), nn.Flatten()), "0")


def grouped_lora() -> nn.Module:
    return conv_lora(groups=2)


def volume_lora() -> nn.Module:
    return with_lora(nn.Sequential(nn.Conv3d(2, 3, 2), nn.Flatten()), "0")


def attention_lora() -> nn.Module:
    model = nn.Module()
    model.attention = nn.MultiheadAttention(4, 2)
    model.head = nn.Linear(4, 2)
    return with_lora(model, "attention", "head")


def adalora() -> nn.Module:
    config = AdaLoraConfig(task_type="SEQ_CLS", target_modules=["query"], total_step=10)
    return get_peft_model(base_model("bert"), config)


@pytest.mark.parametrize(
    ("make", "listed"),
    [
        (dora_of_an_embedding, r"embeddings\.word_embeddings \(Embedding, Dora"),
        (bounded_lora, r"embeddings\.word_embeddings \(Embedding, max_norm\)"),
        (frequency_lora, r"embeddings\.word_embeddings \(Embedding, scale_grad_by_freq\)"),
        (grouped_lora, r"0 \(Conv1d"),
        (volume_lora, r"0 \(Conv3d"),
        (attention_lora, r"attention \(MultiheadAttention"),
        (adalora, r"layer\.0\.attention\.self\.query.*layer\.1\.attention\.self\.query"),
    ],
)
def test_lora_that_is_not_two_plain_linear_maps_is_refused_by_module(make, listed):
    try:
        model = make()
    except ValueError as error:
        pytest.skip(f"this PEFT: {error}")
    with pytest.raises(NotImplementedError, match=listed):
        find_blocks(model)


def test_what_is_supported_is_not_listed_as_refused():
    with pytest.raises(NotImplementedError) as error:
        find_blocks(bounded_lora())
    assert ".query" not in str(error.value)


def test_target_modules_leave_out_what_is_refused():
    blocks = find_blocks(bounded_lora(), target_modules=["query"])
    assert [block.name for block in blocks] == [
        f"bert.encoder.layer.{layer}.attention.self.query.lora_{part}.default.weight"
        for layer in (0, 1)
        for part in "AB"
    ]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize(
    "compute", [weight_norm, lambda half: prune.random_unstructured(half, "weight", 0.5)]
)
@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_weights_that_are_computed_before_every_pass_are_refused(part, compute):
    model = with_lora(TwoLinear(), "first", "second")
    compute(getattr(model.second, part)["default"])
    with pytest.raises(NotImplementedError, match=rf"other parameters.*: second\.{part}\. Make"):
        find_blocks(model)


def test_shared_storage_is_refused(bert):
    layers = bert.base_model.model.bert.encoder.layer
    first, second = (layer.attention.self.query.lora_A for layer in layers)
    second["default"].weight = first["default"].weight
    with pytest.raises(
        NotImplementedError,
        match=r"share .*layer\.0.*query\.lora_A = .*layer\.1.*query\.lora_A.*parameter",
    ):
        find_blocks(bert)


def test_an_embedding_tied_to_the_output_layer_is_refused():
    model = with_lora(base_model("gpt2"), "wte", "lm_head")
    tied = nn.Parameter(model.transformer.wte.lora_embedding_B["default"].T)
    model.lm_head.lora_A["default"].weight = tied
    with pytest.raises(NotImplementedError, match=r"wte\.lora_B = lm_head\.lora_A"):
        find_blocks(model)


def test_dora_of_embeddings_is_refused_of_older_peft_as_well():
    model = embedding_lora()
    words = model.bert.embeddings.word_embeddings
    words.lora_variant, words.use_dora = {}, {"default": True}
    with pytest.raises(NotImplementedError, match=r"word_embeddings \(Embedding\)"):
        find_blocks(model)


def test_dora_of_convolutions_is_refused_of_older_peft_as_well():
    model = with_lora(nn.Sequential(nn.Conv1d(2, 4, 2), nn.Flatten()), "0")
    model[0].lora_variant, model[0].use_dora = {}, {"default": True}
    with pytest.raises(NotImplementedError, match=r"0 \(Conv1d"):
        find_blocks(model)

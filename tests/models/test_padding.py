"""Left padding: the model's own way to number positions, unless it is proven wrong."""

import warnings

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.padding import LeftPadding
from tests.support.families import FAMILIES, LEFT
from tests.support.family_examples import together
from tests.support.models import CLASS_TOKEN_IDS, VOCABULARY, lora_model, ragged_batches
from tests.support.posteriors import fitted, make

SMALL = {"vocab_size": VOCABULARY, "hidden_size": 12, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "intermediate_size": 16, "pad_token_id": 0}
LEARNED = {"max_position_embeddings": 20, "is_decoder": True}
ROTARY = {"num_key_value_heads": 1}
DECODERS = {  # that number positions by themselves, and one way or another
    "Roberta": LEARNED,
    "XLMRoberta": LEARNED,
    "Camembert": LEARNED,
    "RobertaPreLayerNorm": LEARNED,
    "Qwen2": ROTARY,
    "Mistral": ROTARY,
}


def decoder(kind: str, **settings: object) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL, **settings)
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(
        config, attn_implementation="eager"
    )
    targets = ["query", "value"] if settings is not ROTARY and "is_decoder" in settings else None
    targets = targets or ["q_proj", "v_proj"]
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=targets, init_lora_weights=False)
    return get_peft_model(model, lora).eval()


def alone(model: nn.Module, batch: dict) -> torch.Tensor:
    """Each text by itself, without padding, as the model predicts it."""
    rows = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        logits = model(input_ids=ids[mask.bool()][None], use_cache=False).logits
        rows.append(logits[0, -1, CLASS_TOKEN_IDS])
    return torch.stack(rows)


def real(batches: list) -> list:
    """The same without padding tokens among the real ones, which RoBERTa takes for padding."""
    for batch in batches:
        mask = batch["attention_mask"].bool()
        batch["input_ids"] = torch.where(mask, batch["input_ids"].clamp_min(1), 0)
    return batches


@pytest.mark.parametrize("kind", DECODERS)
def test_decoders_that_number_positions_by_themselves_are_left_alone(kind):
    model = decoder(kind, **DECODERS[kind])
    (batch,) = real(ragged_batches(batch_size=8, padding_side="left"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = LogitsModel(model, CLASS_TOKEN_IDS)(batch)
    torch.testing.assert_close(found, alone(model, batch), rtol=1e-4, atol=1e-4)


def test_posteriors_of_padded_and_unpadded_texts_are_the_same():
    batches = real(ragged_batches(batch_size=3, padding_side="left"))
    single = real(ragged_batches(batch_size=1, padding_side="left"))
    for batch in single:
        real_tokens = batch["attention_mask"][0].bool()
        for key in ("input_ids", "attention_mask"):
            batch[key] = batch[key][:, real_tokens]
    evidence = []
    for data in (batches, single):
        la = make(decoder("Roberta", **LEARNED), class_token_ids=CLASS_TOKEN_IDS)
        la.fit(data)
        evidence.append(la.log_marginal_likelihood())
    torch.testing.assert_close(*evidence, rtol=1e-4, atol=1e-4)


def test_the_check_is_made_once_and_not_without_left_padding():
    model = lora_model("gpt2").eval()
    logits_model = LogitsModel(model, CLASS_TOKEN_IDS)
    calls: list[int] = []
    model.base_model.model.register_forward_hook(lambda *_: calls.append(1))
    logits_model(ragged_batches()[0])
    assert len(calls) == 1
    left = ragged_batches(padding_side="left")
    logits_model(left[0])
    assert len(calls) == 1 + 3 + 1
    logits_model(left[1])
    assert len(calls) == 1 + 3 + 2


def test_a_recorded_pass_does_not_see_the_check():
    la = fitted("gpt2", ragged_batches(padding_side="left"))
    other = fitted("gpt2", ragged_batches(padding_side="right"))
    expected = other.log_marginal_likelihood()
    torch.testing.assert_close(la.log_marginal_likelihood(), expected, rtol=1e-6, atol=0)


def test_a_classifier_that_depends_on_left_padding_says_so_once():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=12, n_layer=2, n_head=2, n_positions=20, pad_token_id=0
    )
    model = transformers.GPT2ForSequenceClassification(config)
    nn.init.normal_(model.transformer.wpe.weight)
    lora = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    logits_model = LogitsModel(get_peft_model(model, lora).eval())
    left = real(ragged_batches(padding_side="left"))
    with pytest.warns(UserWarning, match="depend on left padding.*Pad on the right"):
        logits_model(left[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        logits_model(left[1])
        LogitsModel(model)(real(ragged_batches(padding_side="right"))[0])


def test_what_cannot_be_checked_is_said():
    model = lora_model("gpt2").eval()
    logits_model = LogitsModel(model, CLASS_TOKEN_IDS)
    batch = ragged_batches(padding_side="left")[0]
    call = logits_model._call

    def refuse_single_texts(inputs, **kwargs):
        if len(inputs["input_ids"]) == 1:
            raise ValueError("no single texts")
        return call(inputs, **kwargs)

    logits_model._call = refuse_single_texts
    with pytest.warns(UserWarning, match="Can't check whether.*no single texts"):
        logits_model(batch)


def masked(*lengths: int) -> dict:
    """Texts of so many tokens, padded on the left to five."""
    first = 5 - torch.tensor(lengths)[:, None]
    return {"attention_mask": (torch.arange(5) >= first).long()}


def attending(inputs, counts_positions: bool) -> torch.Tensor:
    """Logits of a model whose positions matter to attention alone, to that of several tokens."""
    mask = inputs["attention_mask"]
    padding = 0 if counts_positions else (mask == 0).sum(-1)
    return torch.stack([padding * (mask.sum(-1) > 1), mask.sum(-1)], dim=-1).double()


def test_a_text_of_one_token_does_not_tell_how_positions_are_numbered():
    left_padding = LeftPadding(can_pass=True)
    left_padding.settle(masked(1, 3, 5), attending)
    assert left_padding.passes(masked(1, 3, 5))
    left_padding = LeftPadding(can_pass=True)
    for lengths, passes in (((1, 5), False), ((2, 5), True), ((1, 3), True)):
        if left_padding.is_open(masked(*lengths)):
            left_padding.settle(masked(*lengths), attending)
        assert left_padding.passes(masked(*lengths)) == passes
    assert left_padding.is_settled(masked(1, 5))


def with_own_positions(inputs, counts_positions: bool) -> torch.Tensor:
    """Logits of a model that numbers images in three dimensions, and rounds a little."""
    mask = inputs["attention_mask"]
    off = float("pixel_values" in inputs) if counts_positions else 1e-9 * (mask == 0).sum()
    return torch.stack([mask.sum(-1) + off, mask.sum(-1)], dim=-1).double()


def test_batches_with_images_decide_for_themselves():
    left_padding, texts = LeftPadding(can_pass=True), masked(3, 5)
    images = texts | {"pixel_values": torch.zeros(2, 3)}
    for batch in (texts, images):
        assert left_padding.is_open(batch)
        left_padding.settle(batch, with_own_positions)
    assert not left_padding.passes(images)
    assert left_padding.is_settled(texts)
    assert left_padding.is_settled(images)


def test_only_what_lies_by_position_begins_with_the_text():
    kept = {
        "decoder_input_ids": torch.arange(10).reshape(2, 5),
        "rows": torch.arange(12).reshape(2, 3, 2),
    }
    shared, seen = torch.arange(5)[None], []

    def predict(inputs, counts_positions: bool) -> torch.Tensor:
        assert all(torch.equal(inputs[key], value[1:]) for key, value in kept.items())
        assert torch.equal(inputs["shared"], shared)
        seen.append(inputs["attention_mask"].tolist())
        return attending(inputs, True)

    batch = masked(5, 3) | kept | {"shared": shared}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LeftPadding(can_pass=False).settle(batch, predict)
    assert seen == [[[1, 1, 1]], [[0, 0, 1, 1, 1]]]


@pytest.mark.parametrize("row_of_longest", [0, 1])
def test_batches_with_images_are_tried_whole(row_of_longest):
    """Their patches lie one after the other, and no text could be told its own."""
    lengths = (5, 3) if row_of_longest == 0 else (3, 5)
    batch = masked(*lengths) | {
        "pixel_values": torch.randn(7, 4),
        "token_type_ids": torch.ones(2, 5)
        .long()
        .masked_fill(masked(*lengths)["attention_mask"] == 0, 9),
    }
    seen = []

    def predict(inputs, counts_positions: bool) -> torch.Tensor:
        assert torch.equal(inputs["pixel_values"], batch["pixel_values"])
        padding = inputs["attention_mask"] == 0
        assert (inputs["token_type_ids"] == torch.where(padding, 9, 1)).all()
        seen.append(inputs["attention_mask"].sum(0).tolist())
        off = torch.zeros(2, 1)
        off[row_of_longest] = padding[row_of_longest].sum()
        return off * (not counts_positions) + torch.tensor([[0.0, 1.0]])

    left_padding = LeftPadding(can_pass=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        left_padding.settle(batch, predict)
    assert left_padding.passes(batch)
    assert seen == [[1, 1, 2, 2, 2], *[[0, 0, 1, 1, 2, 2, 2]] * 2]
    with pytest.warns(UserWarning, match="depend on left padding"):
        LeftPadding(can_pass=False).settle(batch, predict)


@pytest.mark.skipif(not hasattr(transformers, "Qwen2_5_VLConfig"), reason="an older transformers")
def test_images_of_patches_need_no_warning():
    family = FAMILIES["Qwen2.5-VL"]
    batch = together(family.examples(4), "left")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        LogitsModel(family.model(LEFT), [VOCABULARY - 1, VOCABULARY - 2])(batch)

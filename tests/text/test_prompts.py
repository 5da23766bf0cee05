"""Prompts of every kind: scores of what is written are those of the logits it was chosen by."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import (
    Speech2TextConfig,
    Speech2TextForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from laplace_lora_ext.text.generation import Settings
from laplace_lora_ext.text.perturbations import ForwardMode
from laplace_lora_ext.text.prompts import Prompt, given
from tests.support.families import FAMILIES, RIGHT
from tests.support.family_examples import IMAGE_TOKEN, together
from tests.support.models import VOCABULARY, lora_model, with_lora
from tests.support.posteriors import generator
from tests.support.texts import encoder_decoder, fitted_text, pairs_of_texts

N_NEW = 4
with_images_as_now = pytest.mark.skipif(
    transformers.__version__ < "5", reason="other families, and images read in another way"
)


def prompts():
    tokens = torch.tensor([[0, 0, 7, 8], [5, 6, 7, 9], [0, 6, 5, 4]])
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long()}


def test_a_text_is_scored_up_to_its_end():
    prompt = Prompt(torch.tensor([[0, 5], [6, 7]]), torch.tensor([[0, 1], [1, 1]]))
    sequences = torch.tensor([[0, 5, 8, 9, 9], [6, 7, 8, 3, 3]])
    settings = Settings(1, [9], 3)
    batch = prompt.continued(sequences, settings)
    assert batch["labels"].tolist() == [[-100, -100, 8, 9, -100], [-100, -100, 8, -100, -100]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1, 1, 0], [1, 1, 1, 0, 0]]
    twice = prompt.continued(sequences.repeat_interleave(2, dim=0), settings)
    assert twice["attention_mask"][:2].tolist() == [[0, 1, 1, 1, 0]] * 2


def test_a_mask_that_is_not_given_is_made_as_transformers_does():
    model = lora_model("gpt2").eval()
    la = fitted_text(model)
    tokens = prompts()["input_ids"]
    options = {"max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": 59}
    found = la.generate(input_ids=tokens, n_samples=0, **options)
    assert torch.equal(found.sequences, model.generate(input_ids=tokens, **options))
    settings = Settings.of(model.get_base_model(), options)
    prompt = given(model.get_base_model(), {"input_ids": tokens}, settings, torch.device("cpu"))
    assert isinstance(prompt, Prompt)
    assert torch.equal(prompt.attention_mask, prompts()["attention_mask"])


def test_few_tokens_of_a_prompt_are_looked_at():
    prompt = Prompt(torch.ones(2, 100).long(), torch.ones(2, 100).long())
    assert (prompt.as_text()["labels"] != -100).sum(1).tolist() == [8, 8]


def written(la, n_samples, **given):
    """What is generated, and log-probabilities of its tokens by the logits they came of."""
    found = la.generate(
        **given,
        n_samples=n_samples,
        generator=generator(),
        max_new_tokens=N_NEW,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=-1,
        suppress_tokens=[IMAGE_TOKEN],
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.stack(found.output.logits, dim=1)
    new = found.sequences[:, -N_NEW:, None]
    return found, logits.log_softmax(-1).gather(-1, new).squeeze(-1).double()


def check(la, n_samples, given):
    found, expected = written(la, n_samples, **given)
    assert torch.equal(found.scores.labelled.sum(1), torch.full((len(expected),), N_NEW))
    of_tokens = found.scores.tokens.log_prob[:, -N_NEW:]
    torch.testing.assert_close(of_tokens, expected, rtol=1e-5, atol=1e-5)
    return found


def with_images(name):
    """A posterior of a model that reads images, whose encoder has LoRA too, and its prompts."""
    batch = together(FAMILIES[name].examples(3), "left")
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE_TOKEN).long()
    if name == "LLaVA":
        del batch["mm_token_type_ids"]
    labels = torch.where(batch["input_ids"] > 9, batch["input_ids"], -100)
    la = fitted_text(
        FAMILIES[name].model(RIGHT), [batch | {"labels": labels}], prior_precision=20.0
    )
    la.products = ForwardMode()
    return la, batch


@with_images_as_now
@pytest.mark.parametrize("n_samples", [0, 2])
@pytest.mark.parametrize("name", ["LLaVA", "Qwen2.5-VL"])
def test_images_are_read_by_every_draw_and_by_scores(name, n_samples):
    la, batch = with_images(name)
    found = check(la, n_samples, batch)
    other = check(la, n_samples, batch | {"pixel_values": -batch["pixel_values"]})
    assert (found.scores.log_prob - other.scores.log_prob).abs().min() > 1e-3


@with_images_as_now
def test_which_image_belongs_to_which_of_several_texts_is_not_guessed():
    la, batch = with_images("LLaVA")
    for several in ({"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}):
        with pytest.raises(NotImplementedError, match="Which of pixel_values"):
            la.generate(**batch, n_samples=2, **several)


@pytest.mark.parametrize("n_samples", [0, 2])
@pytest.mark.parametrize("key", ["token_type_ids", "position_ids"])
def test_what_lies_by_token_goes_on_with_the_text(key, n_samples):
    la = fitted_text(prior_precision=20.0, products=ForwardMode())
    given = prompts()
    if key == "token_type_ids":
        found = check(la, n_samples, given | {key: torch.full((3, 4), 11)})
        plain = check(la, n_samples, given)
        assert (found.scores.log_prob - plain.scores.log_prob).abs().min() > 1e-3
    else:
        positions = (given["attention_mask"].cumsum(1) - 1).clamp_min(0)
        text = Prompt(*given.values(), {key: positions}).continued(
            torch.cat([given["input_ids"], torch.ones(3, 2).long()], dim=1), Settings(1, [], None)
        )
        assert torch.equal(text[key][:, :4], positions)
        assert torch.equal(text[key][:, 4:], positions[:, -1:] + torch.tensor([1, 2]))


_SOUNDS = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "d_model": 8,
    **{
        f"{side}_{size}": n
        for side in ("encoder", "decoder")
        for size, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 12))
    },
}


def listener():
    """A posterior of a model that writes what it hears, and the sounds."""
    torch.manual_seed(0)
    sizes = {"input_feat_per_channel": 4, "conv_channels": 8, "max_target_positions": 16}
    config = Speech2TextConfig(**_SOUNDS, **sizes)
    model = with_lora(Speech2TextForConditionalGeneration(config), "q_proj", "v_proj")
    sounds = torch.randn(3, 24, 4, generator=generator()).double()
    mask = (torch.arange(24) < torch.tensor([[24], [20], [12]])).long()
    given = {"input_features": sounds, "attention_mask": mask}
    batch = given | {"labels": torch.tensor([[5, 6, 2], [7, 2, -100], [9, 8, 2]])}
    la = fitted_text(model.double().eval(), [batch], prior_precision=20.0)
    la.products = ForwardMode()
    return la, given


@pytest.mark.parametrize("n_samples", [0, 2])
def test_sounds_are_written_down(n_samples):
    la, sounds = listener()
    found = check(la, n_samples, sounds)
    assert found.sequences.shape == (3, 1 + N_NEW)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"num_return_sequences": 2}])
def test_sounds_are_written_down_as_the_model_does(options):
    la, sounds = listener()
    options = options | {"do_sample": "num_return_sequences" in options, "max_new_tokens": N_NEW}
    texts = []
    for generate in (
        la.model.model.generate,
        lambda **given: la.generate(n_samples=0, **given).sequences,
    ):
        torch.manual_seed(0)
        texts.append(generate(**sounds, **options))
    assert torch.equal(*texts)


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"num_return_sequences": 2}])
def test_caches_change_nothing_that_is_written_down(options):
    la, sounds = listener()
    texts = []
    for cached in (True, False):
        torch.manual_seed(0)
        options |= {"do_sample": "num_return_sequences" in options, "use_cache": cached}
        found = la.generate(
            **sounds, **options, n_samples=2, generator=generator(), max_new_tokens=N_NEW
        )
        texts.append(found.sequences)
    assert torch.equal(*texts)


def test_models_that_generate_in_another_way_are_refused_by_name():
    torch.manual_seed(0)
    sizes = {"num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 16}
    model = WhisperForConditionalGeneration(WhisperConfig(**_SOUNDS, **sizes))
    model = with_lora(model, "q_proj", "v_proj").eval()
    sounds = torch.randn(2, 4, 16, generator=generator()).double()
    batch = {"input_features": sounds, "labels": torch.tensor([[5, 6, 2], [7, 2, -100]])}
    la = fitted_text(model, [batch])
    assert la.score(batch, 2).log_prob.isfinite().all()
    with pytest.raises(NotImplementedError, match=r"Whisper\w* has a generate of its own"):
        la.generate(input_features=sounds)


def test_what_can_not_be_continued_is_refused():
    la = fitted_text()
    with pytest.raises(ValueError, match="Pass input_ids"):
        la.generate(inputs_embeds=torch.zeros(1, 2, 12))
    with pytest.raises(ValueError, match="without inputs_embeds"):
        la.generate(**prompts(), inputs_embeds=torch.zeros(3, 4, 12))
    for tokens, mask in (((3,), (3,)), ((1, 3), (1, 5)), ((1, 0), (1, 0))):
        given = torch.ones(tokens).long(), torch.ones(mask).long()
        with pytest.raises(ValueError, match="Pass whole texts"):
            la.generate(input_ids=given[0], attention_mask=given[1])
    tokens = torch.tensor([[7, 8, 9], [5, 6, 0]])
    for given in ({"attention_mask": (tokens > 0).long()}, {"pad_token_id": 0, "eos_token_id": 59}):
        with pytest.raises(ValueError, match=r"row 1 .* on the left"):
            la.generate(input_ids=tokens, **given)
    with pytest.raises(ValueError, match="Pass input_features"):
        listener()[0].generate(inputs=torch.zeros(1, 8, 4))
    batch = pairs_of_texts()
    la, labels = fitted_text(encoder_decoder("t5"), [batch]), batch.pop("labels")
    begun = {"decoder_input_ids": labels[:, :2], "decoder_attention_mask": labels[:, :2] > 0}
    with pytest.raises(NotImplementedError, match=r"without \[.decoder_attention_mask"):
        la.generate(**batch, **begun)

"""Generated texts, against a loop over drawn models without caches, and the models' own."""

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    LogitsProcessorList,
    Speech2TextConfig,
    Speech2TextForConditionalGeneration,
    StoppingCriteriaList,
)

from tests.compatibility.families import FAMILIES, RIGHT, SIDES
from tests.support.models import VOCABULARY, lora_model, ragged_batches, with_lora
from tests.support.posteriors import generator
from tests.support.snapshots import Snapshot, half_trained
from tests.support.texts import drawn_models, encoder_decoder, fitted_text, pairs_of_texts

N_NEW = 5
PAD = 0
GREEDY = {"max_new_tokens": N_NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": PAD}
SAMPLING = {"max_new_tokens": N_NEW, "do_sample": True, "temperature": 0.7, "pad_token_id": PAD}
_SOUNDS = {
    **{"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"decoder_start_token_id": 2, "d_model": 8, "input_feat_per_channel": 4},
    **{"conv_channels": 8, "max_target_positions": 16, **SIDES},
}


def writer(kind):
    """A posterior and a batch of what it continues: three texts, padded, or sounds."""
    if kind in ("t5", "bart"):
        batch = pairs_of_texts()
        la = fitted_text(encoder_decoder(kind), [batch], prior_precision=20.0)
        return la, {key: batch[key] for key in ("input_ids", "attention_mask")}
    if kind == "sounds":
        torch.manual_seed(0)
        model = Speech2TextForConditionalGeneration(Speech2TextConfig(**_SOUNDS))
        model = with_lora(model, "q_proj", "v_proj").double().eval()
        sounds = torch.randn(3, 24, 4, generator=generator()).double()
        mask = (torch.arange(24) < torch.tensor([[24], [20], [12]])).long()
        given = {"input_features": sounds, "attention_mask": mask}
        labels = {"labels": torch.tensor([[5, 6, 2], [7, 2, -100], [9, 8, 2]])}
        return fitted_text(model, [given | labels], prior_precision=20.0), given
    model = lora_model("gpt2").eval() if kind == "gpt2" else FAMILIES[kind].model(RIGHT)
    (batch,) = ragged_batches((4, 2, 3), padding_side="left", padded_to=4)
    prompts = {key: batch[key] for key in ("input_ids", "attention_mask")}
    return fitted_text(model, prior_precision=20.0), prompts


def continued(models, given, begun):
    """Tokens that a mixture of models writes after others, and their log-probabilities."""
    tokens, log_probs = begun, []
    with torch.no_grad():
        for _ in range(N_NEW):
            read = {"decoder_input_ids": tokens} if given else {"input_ids": tokens}
            p = torch.stack([model(**given, **read).logits[0, -1].softmax(-1) for model in models])
            log_probs.append(p.mean(0).max().log())
            tokens = torch.cat([tokens, p.mean(0).argmax().view(1, 1)], dim=1)
    return tokens[0], torch.stack(log_probs)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("kind", ["gpt2", "t5", "bart"])
def test_texts_are_those_of_a_mixture_of_drawn_models(kind, cached):
    la, given = writer(kind)
    models = drawn_models(la, 3, generator())
    options = GREEDY | {"use_cache": cached, "forced_eos_token_id": None}
    found = la.generate(**given, n_samples=3, generator=generator(), **options)
    for row, mask in enumerate(given["attention_mask"].bool()):
        text = given["input_ids"][row][mask][None]
        if kind == "gpt2":
            expected, log_probs = continued(models, {}, text)
            expected = torch.cat([given["input_ids"][row][~mask], expected])
        else:
            start = torch.tensor([[la.model.model.config.decoder_start_token_id]])
            expected, log_probs = continued(models, {"input_ids": text}, start)
        assert torch.equal(found.sequences[row], expected)
        of_tokens = found.scores.tokens.log_prob[row][found.scores.labelled[row]]
        exact = {"rtol": 1e-5 if kind == "t5" else 1e-8, "atol": 0}  # T5 normalises in float32
        torch.testing.assert_close(of_tokens, log_probs, **exact)


@pytest.mark.parametrize("options", [GREEDY, SAMPLING], ids=["greedy", "sampling"])
@pytest.mark.parametrize("kind", ["gpt2", "t5", "bart", "sounds", "Mamba"])
def test_without_draws_texts_are_the_models_own_row_by_row(kind, options):
    la, given = writer(kind)
    options = options | {"eos_token_id": 7}
    torch.manual_seed(0)
    found = la.generate(**given, n_samples=0, **options)
    torch.manual_seed(0)
    rows = [{key: of[row : row + 1] for key, of in given.items()} for row in range(3)]
    texts = [la.model.model.generate(**row, **options)[0] for row in rows]
    expected = pad_sequence(texts, batch_first=True, padding_value=PAD)
    assert torch.equal(found.sequences, expected)
    n_read = given["input_ids"].shape[1] if kind in ("gpt2", "Mamba") else 1
    assert found.scores.labelled.sum(1).tolist() == [len(text) - n_read for text in texts]


@pytest.mark.parametrize("kind", ["sounds", "Mamba"])
def test_caches_change_no_text(kind):
    la, given = writer(kind)
    texts = []
    for cached in (True, False):
        torch.manual_seed(0)
        options = SAMPLING | {"eos_token_id": -1, "use_cache": cached}
        found = la.generate(**given, n_samples=2, generator=generator(), **options)
        texts.append(found.sequences)
    assert torch.equal(*texts)


def test_each_new_token_takes_a_pass_a_draw_and_encoders_read_once_a_draw():
    la, given = writer("t5")
    passes, encodings = [], []
    la.model.transformer.register_forward_hook(lambda *_: passes.append(1))
    la.model.transformer.get_encoder().register_forward_hook(lambda *_: encodings.append(1))
    la.generate(**given, n_samples=3, **GREEDY)
    of_scores = 1 + 3
    assert len(passes) == 3 * N_NEW * (1 + 3) + of_scores
    assert len(encodings) == 3 * (1 + 3) + of_scores


def test_texts_of_many_lengths_are_padded_and_scored_up_to_their_ends():
    la, given = writer("gpt2")
    greedy = la.generate(**given, n_samples=2, generator=generator(), **GREEDY).sequences
    end = int(greedy[0, 5])
    options = GREEDY | {"eos_token_id": torch.tensor([end])}
    found = la.generate(**given, n_samples=2, generator=generator(), **options)
    assert not found.scores.labelled[:, :4].any()
    for row, text in enumerate(found.sequences):
        stops = (greedy[row, 4:] == end).nonzero()[:, 0].tolist() or [N_NEW - 1]
        n_new = stops[0] + 1
        assert torch.equal(text[: 4 + n_new], greedy[row, : 4 + n_new])
        assert (text[4 + n_new :] == PAD).all()
        assert found.scores.labelled[row].sum() == n_new
        alone = {key: of[row : row + 1] for key, of in given.items()}
        again = la.generate(**alone, n_samples=2, generator=generator(), **options).scores
        torch.testing.assert_close(found.scores.log_prob[row], again.log_prob[0])


def test_processors_see_log_probabilities_and_what_they_forbid_stays_forbidden():
    sums = []

    def note(input_ids, scores):
        sums.append(scores.exp().sum(-1))
        return scores

    la, given = writer("gpt2")
    options = {"n_samples": 2, "max_new_tokens": 1, "pad_token_id": PAD}
    processors = {"logits_processor": LogitsProcessorList([note])}
    usual = la.generate(**given, generator=generator(), **options, **processors).sequences
    torch.testing.assert_close(torch.stack(sums), torch.ones(3, 1))
    forbidden = {"suppress_tokens": usual[:, -1].tolist()}
    other = la.generate(**given, generator=generator(), **options, **forbidden).sequences
    assert not set(other[:, -1].tolist()) & set(usual[:, -1].tolist())


def test_draws_are_seeded_and_the_model_stays_as_it_was():
    model = half_trained(lora_model("gpt2"))
    la = fitted_text(model, prior_precision=20.0)
    _, given = writer("gpt2")
    before = Snapshot(model)
    runs = [la.generate(**given, n_samples=2, generator=generator(), **GREEDY) for _ in range(2)]
    assert torch.equal(runs[0].sequences, runs[1].sequences)
    assert torch.equal(runs[0].scores.tokens.total, runs[1].scores.tokens.total)
    other = la.generate(**given, n_samples=2, generator=generator(1), **GREEDY)
    assert not torch.equal(runs[0].scores.tokens.total, other.scores.tokens.total)
    before.assert_equal(model, random_state=False)

    def fail(*_):
        raise KeyError

    with pytest.raises(KeyError):
        la.generate(**given, n_samples=2, stopping_criteria=StoppingCriteriaList([fail]))
    before.assert_equal(model, random_state=False)


def reading_another_text(la):
    def read(input_ids, scores):
        la.model.model(input_ids=input_ids[:, :1])
        return scores

    return GREEDY | {"n_samples": 2, "logits_processor": LogitsProcessorList([read])}


ON_THE_RIGHT = {"input_ids": torch.tensor([[7, 8, 9], [5, 6, 0]])}
SEVERAL = [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}]
SEVERAL += [{"guidance_scale": 1.5}]
REFUSED = [
    *(("gpt2", option, "one text a prompt.*" + next(iter(option))) for option in SEVERAL),
    ("gpt2", {"input_ids": None, "inputs_embeds": torch.zeros(1, 2, 12)}, "Pass input_ids"),
    ("gpt2", {"token_type_ids": torch.zeros(3, 4)}, "plain texts, without token_type_ids"),
    (
        "t5",
        {"decoder_input_ids": torch.ones(3, 2).long()},
        "plain texts, without decoder_input_ids",
    ),
    *(
        ("gpt2", ON_THE_RIGHT | padded, "pad on the left")
        for padded in (
            {"attention_mask": (ON_THE_RIGHT["input_ids"] > 0).long()},
            {"attention_mask": None, "pad_token_id": 0, "eos_token_id": 59},
        )
    ),
    ("gpt2", reading_another_text, "other texts in turn"),
]


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED)
def test_what_can_not_be_continued_is_refused(kind, options, message):
    la, given = writer(kind)
    options = given | (options(la) if callable(options) else options)
    options = {name: value for name, value in options.items() if value is not None}
    with pytest.raises((ValueError, NotImplementedError), match=message):
        la.generate(**options)

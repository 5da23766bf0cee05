"""Generated texts, against a loop over drawn models without caches."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close
from transformers import (
    LogitsProcessorList,
    Speech2TextConfig,
    Speech2TextForConditionalGeneration,
    StoppingCriteriaList,
)

from tests.compatibility.families import FAMILIES, RIGHT, SIDES
from tests.support.models import (
    VOCABULARY,
    lora_model,
    ragged_batches,
    with_lora,
    without_labels,
)
from tests.support.posteriors import generator
from tests.support.snapshots import Snapshot, half_trained
from tests.support.texts import (
    drawn_models,
    encoder_decoder,
    fitted_text,
    pairs_of_texts,
)

N_NEW = 5
N_TEXTS = 3
PAD = 0
# As the end of a text, so that all texts have their full length.
NO_TOKEN = -1
GREEDY = {
    "max_new_tokens": N_NEW,
    "do_sample": False,
    "eos_token_id": NO_TOKEN,
    "pad_token_id": PAD,
}
SAMPLING = {
    "max_new_tokens": N_NEW,
    "do_sample": True,
    "temperature": 0.7,
    "pad_token_id": PAD,
}
# So broad that draws write other texts than the model.
BROAD = 20.0

Batch = dict[str, Tensor]


# --- what writes ----------------------------------------------------------------------


class Writer(NamedTuple):
    """A posterior, and a batch of what it continues."""

    la: Any
    given: Batch


def row_of(
    batch: Batch,
    row: int,
) -> Batch:
    """Take one example of a batch, as a batch of one."""
    texts = slice(row, row + 1)
    return {key: value[texts] for key, value in batch.items()}


def translator(kind: str) -> Writer:
    """Of three padded texts, which an encoder reads."""
    batch = pairs_of_texts()
    model = encoder_decoder(kind)
    la = fitted_text(model, [batch], prior_precision=BROAD)
    return Writer(la, without_labels(batch))


def transcriber() -> Writer:
    """Of three sounds of several lengths."""
    torch.manual_seed(0)
    config = Speech2TextConfig(
        vocab_size=VOCABULARY,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        d_model=8,
        input_feat_per_channel=4,
        conv_channels=8,
        max_target_positions=16,
        **SIDES,
    )
    base = Speech2TextForConditionalGeneration(config)
    model = with_lora(base, "q_proj", "v_proj").eval()
    features = torch.randn(3, 24, 4, generator=generator())
    lengths = torch.tensor([[24], [20], [12]])
    is_sound = torch.arange(24) < lengths
    given = {
        "input_features": features.double(),
        "attention_mask": is_sound.long(),
    }
    labels = torch.tensor(
        [
            [5, 6, 2],
            [7, 2, -100],
            [9, 8, 2],
        ]
    )
    batch = given | {"labels": labels}
    la = fitted_text(model, [batch], prior_precision=BROAD)
    return Writer(la, given)


def continuer(kind: str) -> Writer:
    """Of three prompts, padded on the left."""
    model = lora_model("gpt2") if kind == "gpt2" else FAMILIES[kind].model(RIGHT)
    (batch,) = ragged_batches(
        lengths=(4, 2, 3),
        padding_side="left",
        padded_to=4,
    )
    la = fitted_text(model.eval(), prior_precision=BROAD)
    return Writer(la, without_labels(batch))


def writer(kind: str) -> Writer:
    """Make a posterior of a kind of model, and what it is to continue."""
    if kind in ("t5", "bart"):
        return translator(kind)
    if kind == "sounds":
        return transcriber()
    return continuer(kind)


# --- texts ----------------------------------------------------------------------------


class Text(NamedTuple):
    """What is written after some tokens, and how probable each new token is."""

    tokens: Tensor
    log_probs: Tensor


def continued(
    models: Sequence[nn.Module],
    given: Batch,
    begun: Tensor,
) -> Text:
    """Let a mixture continue a text by its most probable tokens."""
    tokens = begun
    written = "decoder_input_ids" if given else "input_ids"
    log_probs = []
    with torch.no_grad():
        for _ in range(N_NEW):
            of_models = []
            for model in models:
                logits = model(**given, **{written: tokens}).logits
                of_models.append(logits[0, -1].softmax(-1))
            p = torch.stack(of_models).mean(0)
            log_probs.append(p.max().log())
            best = p.argmax().view(1, 1)
            tokens = torch.cat([tokens, best], dim=1)
    return Text(tokens[0], torch.stack(log_probs))


def written_by(
    la: Any,
    models: Sequence[nn.Module],
    given: Batch,
    row: int,
) -> Text:
    """Let a mixture write after one row of a batch, without its padding."""
    ids = given["input_ids"][row]
    is_real = given["attention_mask"][row].bool()
    text = ids[is_real][None]
    config = la.model.model.config
    if not config.is_encoder_decoder:
        tokens, log_probs = continued(models, {}, text)
        padding = ids[~is_real]
        return Text(torch.cat([padding, tokens]), log_probs)
    begun = torch.tensor([[config.decoder_start_token_id]])
    return continued(models, {"input_ids": text}, begun)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("kind", ["gpt2", "t5", "bart"])
def test_texts_are_those_of_a_mixture_of_drawn_models(kind, cached):
    la, given = writer(kind)
    models = drawn_models(la, 3, generator())
    found = la.generate(
        **given,
        n_samples=3,
        generator=generator(),
        use_cache=cached,
        forced_eos_token_id=None,
        **GREEDY,
    )
    # T5 normalises in float32.
    rtol = 1e-5 if kind == "t5" else 1e-8
    for row in range(N_TEXTS):
        expected = written_by(la, models, given, row)
        assert torch.equal(found.sequences[row], expected.tokens)
        is_new = found.scores.labelled[row]
        log_probs = found.scores.tokens.log_prob[row][is_new]
        assert_close(log_probs, expected.log_probs, rtol=rtol, atol=0)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(GREEDY, id="greedy"),
        pytest.param(SAMPLING, id="sampling"),
    ],
)
@pytest.mark.parametrize("kind", ["gpt2", "t5", "bart", "sounds", "Mamba"])
def test_without_draws_texts_are_the_models_own_row_by_row(kind, options):
    la, given = writer(kind)
    options = options | {"eos_token_id": 7}
    torch.manual_seed(0)
    found = la.generate(**given, n_samples=0, **options)
    torch.manual_seed(0)
    texts = []
    for row in range(N_TEXTS):
        example = row_of(given, row)
        (text,) = la.model.model.generate(**example, **options)
        texts.append(text)
    expected = pad_sequence(texts, batch_first=True, padding_value=PAD)
    assert torch.equal(found.sequences, expected)
    # A decoder beside an encoder begins with one token of its own.
    has_decoder_alone = kind in ("gpt2", "Mamba")
    n_read = given["input_ids"].shape[1] if has_decoder_alone else 1
    n_new = [len(text) - n_read for text in texts]
    assert found.scores.labelled.sum(1).tolist() == n_new


@pytest.mark.parametrize("kind", ["sounds", "Mamba"])
def test_caches_change_no_text(kind):
    la, given = writer(kind)

    def write(cached: bool) -> Tensor:
        # Texts are drawn by torch's own generator.
        torch.manual_seed(0)
        found = la.generate(
            **given,
            n_samples=2,
            generator=generator(),
            eos_token_id=NO_TOKEN,
            use_cache=cached,
            **SAMPLING,
        )
        return found.sequences

    found = write(cached=True)
    assert torch.equal(found, write(cached=False))


def test_each_new_token_takes_a_pass_a_draw_and_encoders_read_once_a_draw():
    la, given = writer("t5")
    passes = []
    encodings = []
    transformer = la.model.transformer
    transformer.register_forward_hook(lambda *_: passes.append(1))
    transformer.get_encoder().register_forward_hook(lambda *_: encodings.append(1))
    la.generate(**given, n_samples=3, **GREEDY)
    # The model itself and its draws.
    n_models = 1 + 3
    # What has been written is scored once, by all.
    of_scores = n_models
    assert len(passes) == N_TEXTS * N_NEW * n_models + of_scores
    assert len(encodings) == N_TEXTS * n_models + of_scores


def test_texts_of_many_lengths_are_padded_and_scored_up_to_their_ends():
    la, given = writer("gpt2")
    n_read = 4

    def write(
        batch: Batch,
        **options: Any,
    ) -> Any:
        return la.generate(
            **batch,
            n_samples=2,
            generator=generator(),
            **options,
        )

    greedy = write(given, **GREEDY).sequences
    # A token that one text has after two, and that ends it now.
    end = int(greedy[0, 5])
    options = GREEDY | {"eos_token_id": torch.tensor([end])}
    found = write(given, **options)
    assert not found.scores.labelled[:, :n_read].any()
    for row, text in enumerate(found.sequences):
        new = greedy[row, n_read:].tolist()
        n_new = new.index(end) + 1 if end in new else N_NEW
        length = n_read + n_new
        assert torch.equal(text[:length], greedy[row, :length])
        assert (text[length:] == PAD).all()
        assert found.scores.labelled[row].sum() == n_new
        alone = write(row_of(given, row), **options).scores
        assert_close(found.scores.log_prob[row], alone.log_prob[0])


def next_tokens(**options: Any) -> set[int]:
    """Write one token after each prompt."""
    la, given = writer("gpt2")
    found = la.generate(
        **given,
        n_samples=2,
        generator=generator(),
        max_new_tokens=1,
        pad_token_id=PAD,
        **options,
    )
    new = found.sequences[:, -1]
    return set(new.tolist())


def test_processors_see_log_probabilities():
    sums = []

    def note(
        input_ids: Tensor,
        scores: Tensor,
    ) -> Tensor:
        sums.append(scores.exp().sum(-1))
        return scores

    next_tokens(logits_processor=LogitsProcessorList([note]))
    assert_close(torch.stack(sums), torch.ones(N_TEXTS, 1))


def test_tokens_that_are_forbidden_are_not_written():
    usual = next_tokens()
    # They are the likeliest, so that they would be written again.
    others = next_tokens(suppress_tokens=list(usual))
    assert not others & usual


# --- seeds, and the model afterwards --------------------------------------------------


def test_draws_are_seeded():
    la, given = writer("gpt2")

    def write(seed: int) -> Any:
        return la.generate(
            **given,
            n_samples=2,
            generator=generator(seed),
            **GREEDY,
        )

    one = write(seed=0)
    same = write(seed=0)
    other = write(seed=1)
    entropies = one.scores.tokens.total
    # Greedy texts may be the same with any draws: entropies tell them apart.
    assert torch.equal(same.sequences, one.sequences)
    assert torch.equal(same.scores.tokens.total, entropies)
    assert not torch.equal(other.scores.tokens.total, entropies)


def half_trained_writer() -> Writer:
    """Of a model that is unlike any default."""
    model = half_trained(lora_model("gpt2"))
    la = fitted_text(model, prior_precision=BROAD)
    _, given = writer("gpt2")
    return Writer(la, given)


def test_the_model_stays_as_it_was():
    la, given = half_trained_writer()
    model = la.model.model
    before = Snapshot(model)
    la.generate(**given, n_samples=2, generator=generator(), **GREEDY)
    before.assert_equal(model, random_state=False)


def test_the_model_stays_as_it_was_where_writing_fails():
    la, given = half_trained_writer()
    model = la.model.model
    before = Snapshot(model)

    def fail(*_: Any) -> None:
        raise KeyError

    failing = StoppingCriteriaList([fail])
    with pytest.raises(KeyError):
        la.generate(**given, n_samples=2, stopping_criteria=failing)
    before.assert_equal(model, random_state=False)


# --- what can't be continued ----------------------------------------------------------

PADDED_ON_THE_RIGHT = torch.tensor(
    [
        [7, 8, 9],
        [5, 6, PAD],
    ]
)
REFUSED = [
    pytest.param(
        "gpt2",
        {"num_beams": 2},
        "one text a prompt.*num_beams",
        id="beams",
    ),
    pytest.param(
        "gpt2",
        {"num_return_sequences": 2, "do_sample": True},
        "one text a prompt.*num_return_sequences",
        id="several texts",
    ),
    pytest.param(
        "gpt2",
        {"guidance_scale": 1.5},
        "one text a prompt.*guidance_scale",
        id="guidance",
    ),
    pytest.param(
        "gpt2",
        {"input_ids": None, "inputs_embeds": torch.zeros(1, 2, 12)},
        "Pass input_ids",
        id="embeddings",
    ),
    pytest.param(
        "gpt2",
        {"token_type_ids": torch.zeros(3, 4)},
        "plain texts, without token_type_ids",
        id="token types",
    ),
    pytest.param(
        "t5",
        {"decoder_input_ids": torch.ones(3, 2).long()},
        "plain texts, without decoder_input_ids",
        id="a decoder's tokens",
    ),
    pytest.param(
        "gpt2",
        {
            "input_ids": PADDED_ON_THE_RIGHT,
            "attention_mask": (PADDED_ON_THE_RIGHT != PAD).long(),
        },
        "pad on the left",
        id="padding on the right",
    ),
    pytest.param(
        "gpt2",
        {
            "input_ids": PADDED_ON_THE_RIGHT,
            "attention_mask": None,
            "pad_token_id": PAD,
            "eos_token_id": 59,
        },
        "pad on the left",
        id="padding on the right without a mask",
    ),
]


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED)
def test_what_can_not_be_continued_is_refused(kind, options, message):
    la, given = writer(kind)
    changed = given | options
    # None stands for an input that is left out.
    passed = {name: value for name, value in changed.items() if value is not None}
    with pytest.raises((ValueError, NotImplementedError), match=message):
        la.generate(**passed)


def test_other_texts_that_are_read_in_turn_are_refused():
    la, given = writer("gpt2")

    def read(
        input_ids: Tensor,
        scores: Tensor,
    ) -> Tensor:
        la.model.model(input_ids=input_ids[:, :1])
        return scores

    options = GREEDY | {"logits_processor": LogitsProcessorList([read])}
    errors = (ValueError, NotImplementedError)
    with pytest.raises(errors, match="other texts in turn"):
        la.generate(**given, n_samples=2, **options)

"""Language models that write: their logits, their fit, what is refused."""

from collections import defaultdict
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.special import entr
from torch.testing import assert_close
from transformers import FSMTConfig, FSMTForConditionalGeneration

import tests.support.dense as dense
from laplace_lora_ext import GridSearch
from laplace_lora_ext.passes import graph
from laplace_lora_ext.tasks import language
from laplace_lora_ext.tasks.classification import drawn_labels
from laplace_lora_ext.tasks.language import (
    LANGUAGE_MODELING,
    LabelsOfTokens,
    TokensModel,
)
from laplace_lora_ext.tasks.task import Draws
from tests.compatibility.families import FAMILIES, RIGHT
from tests.support.cases import unpadded_rows
from tests.support.dense import EXACT
from tests.support.models import (
    VOCABULARY,
    Batch,
    built,
    llama,
    lora_model,
    ragged_batches,
    with_lora,
    without_labels,
)
from tests.support.new_tensors import NewTensors
from tests.support.posteriors import generator, make, normal
from tests.support.tasks import IGNORED
from tests.support.texts import (
    drawn_models,
    encoder_decoder,
    fitted_text,
    pairs_of_texts,
    text_batches,
    token_logits,
)

# Of no factor more columns than the vocabulary has words.
FULL_RANK = VOCABULARY


# --- tiny models that write, in float64 -----------------------------------------------


def overwriting() -> nn.Module:
    """Make a model with checkpoints that overwrites what its output layer is given."""
    base = llama()
    base.gradient_checkpointing_enable()
    model = with_lora(base, "q_proj", "down_proj").eval()

    def double(layer: nn.Module, args: tuple[Tensor]) -> None:
        args[0].mul_(2)

    model.get_output_embeddings().register_forward_pre_hook(double)
    return model


def fsmt() -> nn.Module:
    """Make an encoder-decoder whose embedding is also its output layer."""
    torch.manual_seed(0)
    config = FSMTConfig(
        langs=["en", "de"],
        src_vocab_size=VOCABULARY,
        tgt_vocab_size=VOCABULARY,
        pad_token_id=0,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
    )
    # It knows no float64.
    return FSMTForConditionalGeneration(config).eval()


def gemma2() -> nn.Module:
    """Make a Gemma 2, which caps its logits behind the output layer."""
    # So low that it changes logits as small as those of random weights.
    base = built(
        "Gemma2ForCausalLM",
        num_key_value_heads=1,
        head_dim=4,
        final_logit_softcapping=0.5,
    )
    return with_lora(base, "q_proj", "lm_head").eval()


T5, BART = (partial(encoder_decoder, kind) for kind in ("t5", "bart"))


def first_batch() -> Batch:
    first, *_ = text_batches()
    return first


# --- curvature, loss and evidence -----------------------------------------------------


def test_a_fit_has_the_gradient_of_a_texts_whole_loss_at_drawn_labels(gpt2):
    la = fitted_text(gpt2, num_samples=2, rank=FULL_RANK)
    texts = [text for batch in text_batches() for text in unpadded_rows(batch)]
    gradients = []
    for place, text in enumerate(texts):
        logits, _ = token_logits(gpt2, [text])
        draws = Draws(0, torch.full((len(logits),), place))
        for labels in drawn_labels(logits.detach(), draws.uniform(2)):
            loss = cross_entropy(logits, labels, reduction="sum")
            weights = [block.weight for block in la.blocks]
            gradients.append(torch.autograd.grad(loss, weights, retain_graph=True))
    # As if each had one output, whose curvature is one; both draws are a mean.
    halves = torch.full((len(gradients), 1, 1), 0.5).double()
    expected = [
        dense.kronecker_block(torch.stack(of_block)[:, None], halves)
        for of_block in zip(*gradients, strict=True)
    ]
    assert_close(la.H.to_matrix(), torch.block_diag(*expected), rtol=1e-8, atol=1e-10)
    logits, labels = token_logits(gpt2, texts)
    assert_close(la.loss, cross_entropy(logits.detach(), labels, reduction="sum"))
    # Texts, and not tokens.
    assert la.n_data == 6


def test_labels_are_drawn_once():
    labels = LabelsOfTokens(torch.tensor([1]), torch.tensor([[0.9]]).double())
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    for f in (logits, -logits):  # of which others would be drawn
        assert_close(labels.read(f), f.log_softmax(-1)[:, 1:])


def test_a_text_by_itself_has_its_own_labels(adapted):
    batch = six_texts()
    _, y = adapted.split(batch)
    owners = (y != IGNORED).nonzero()[:, 0]
    numbers = torch.linspace(0, 0.99, len(owners)).double()[None]
    outputs = LANGUAGE_MODELING.outputs(adapted, y, lambda: numbers)
    alone = [
        outputs(text, owners == row) for row, text in enumerate(unpadded_rows(batch))
    ]
    assert_close(torch.cat(alone), outputs(batch, None))


# --- what classes and texts refuse each other -----------------------------------------


def test_what_reads_texts_refuses_a_classifier(gpt2):
    la = make(gpt2, class_token_ids=[1, 2, 3])
    with pytest.raises(ValueError, match="language_modeling"):
        la.draw_logits(first_batch())


def test_what_needs_jacobians_of_the_vocabulary_is_refused():
    la, batch = fitted_text(), first_batch()
    for differentiate in (
        lambda: la(batch),
        lambda: la(batch, pred_type="nn"),
        lambda: la.predictive_statistics([batch]),
        lambda: GridSearch(val_loader=[batch])(la),
    ):
        with pytest.raises(NotImplementedError, match=r"la\.score"):
            differentiate()


# --- scores ---------------------------------------------------------------------------


N_DRAWS = 4


def scored(la, batches):
    """Score six texts by some draws, and the labelled tokens of each."""
    parts = defaultdict(list)
    for batch in batches:
        of_batch = la.score(batch, N_DRAWS, generator())
        parts["text"].append(of_batch.log_prob)
        of_tokens = of_batch.tokens._asdict()
        for name, numbers in of_tokens.items():
            of_labelled = numbers[of_batch.labelled]
            parts[name].append(of_labelled)
    return {name: torch.cat(numbers) for name, numbers in parts.items()}


def test_scores_are_those_of_a_mixture_of_drawn_models():
    la = fitted_text(prior_precision=3.0)
    found = scored(la, text_batches())
    with torch.no_grad():
        trained = la.model.model
        logits, labels = token_logits(trained, text_batches())
        models = drawn_models(la, N_DRAWS, generator())
        f = torch.stack([token_logits(model, text_batches())[0] for model in models])
    draws = [la.draw_logits(each, N_DRAWS, generator()) for each in text_batches()]
    assert_close(torch.cat(draws, dim=1), f, rtol=1e-8, atol=1e-10)
    of_map = logits.log_softmax(-1)
    mixture = f.softmax(-1).mean(0)
    tokens = torch.arange(len(labels))
    of_labels = mixture[tokens, labels]
    # `tests/predictive/test_scores.py` has the others.
    expected = {
        "log_prob": of_labels.log(),
        "map_log_prob": of_map[tokens, labels],
        "total": entr(mixture).sum(-1),
    }
    found = {name: found[name] for name in expected}
    assert_close(found, expected, rtol=1e-8, atol=1e-10)


WIDE = {"batch_size": 6, "padded_to": 12}
ON_THE_LEFT = {"batch_size": 4, "padding_side": "left", "padded_to": 9}


def test_batch_size_and_padding_change_neither_fit_nor_score(gpt2):
    def figures(**ragged):
        batches = text_batches(**ragged)
        for batch in batches:
            # All tokens have labels, and nothing predicts a text's first one.
            is_padding = batch["attention_mask"] == 0
            batch["labels"] = batch["input_ids"].masked_fill(is_padding, IGNORED)
        la = fitted_text(gpt2, batches, rank=FULL_RANK)
        return {"H": la.H.to_matrix(), "loss": la.loss, **scored(la, batches)}

    expected = figures()
    found = figures(**ON_THE_LEFT)
    assert_close(found, expected, rtol=1e-8, atol=1e-8)


# --- few rows of logits at once -------------------------------------------------------

A_FEW_ROWS = 6


# Gemma's LoRA is in the output layer as well.
@pytest.mark.parametrize(
    ("make_model", "ragged"), [(T5, WIDE), (gemma2, WIDE), (overwriting, ON_THE_LEFT)]
)
def test_in_parts_all_is_the_same_by_as_many_passes_and_few_rows_of_logits(
    make_model, ragged, monkeypatch
):
    model = make_model()
    batches = text_batches(**ragged)
    calls: list[int] = []
    first_layer = next(m for name, m in model.named_modules() if name.endswith(".0"))

    def note(_, inputs, output) -> None:
        if inputs[0].shape[:-1].numel() > 1:
            calls.append(1)

    def measured():
        calls.clear()
        with NewTensors() as made:
            la = fitted_text(model, batches, rank=FULL_RANK, prior_precision=3.0)
            scores = scored(la, batches)
        of_words = [s[:-1].numel() for s in made.shapes if s[-1:] == (VOCABULARY,)]
        return la, scores, len(calls), max(of_words)

    # One seed at a time: several have as many times the rows.
    monkeypatch.setattr(graph, "_ROWS", 1)
    with first_layer.register_forward_hook(note):
        expected, scores, n_calls, n_at_once = measured()
        monkeypatch.setattr(language, "MOST_ROWS", A_FEW_ROWS)
        la, scores_in_parts, n_calls_in_parts, n_in_parts = measured()
    # Streaming factors may lose what is near rounding: 3e-11 is measured.
    assert_close(la.H.to_matrix(), expected.H.to_matrix(), rtol=1e-9, atol=1e-10)
    assert_close(la.loss, expected.loss, **EXACT)
    assert_close(scores_in_parts, scores, rtol=1e-7, atol=1e-9)
    assert not any(column.requires_grad for column in scores_in_parts.values())
    assert n_calls_in_parts == n_calls > 0
    # A text by itself has as few rows; LoRA of the output layer has more of its own.
    if make_model is not gemma2:
        assert n_in_parts == A_FEW_ROWS < n_at_once
    # Ranks that share a model make the same passes: they read all at once.
    monkeypatch.setattr(language, "is_shared", lambda model: True)
    assert len(la.model.parts(batches[0])) == 1


def test_speech_is_read_in_parts_too(monkeypatch):
    whisper = replace(FAMILIES["Whisper"], models="ForConditionalGeneration")
    batch = pairs_of_texts() | {"input_features": normal(3, 4, 16)}
    del batch["input_ids"], batch["attention_mask"]
    la = fitted_text(whisper.model(RIGHT), [batch])
    expected = scored(la, [batch])
    monkeypatch.setattr(language, "MOST_ROWS", A_FEW_ROWS)
    assert_close(scored(la, [batch]), expected)


# --- what is refused ------------------------------------------------------------------


def test_settings_that_do_not_fit_are_refused(gpt2):
    for settings, message in (
        ({"backend_kwargs": {"kfac_approx": "expand"}}, "gradient"),
        ({"structure": "diag"}, "hessian_structure"),
        ({"backend_kwargs": {"stochastic": False}}, "exact Fisher"),
        ({"backend_kwargs": {"draws": "signs"}}, "and signs as many"),
    ):
        with pytest.raises((NotImplementedError, ValueError), match=message):
            make(gpt2, likelihood="language_modeling", **settings).fit(text_batches())


def test_labels_of_no_word_are_refused(gpt2):
    batch = first_batch()
    batch["labels"][0, -1] = VOCABULARY
    with pytest.raises(ValueError, match="labels must be from 0"):
        fitted_text(gpt2, [batch])


def test_a_model_that_has_changed_is_refused():
    la = fitted_text()
    _, second_block, *_ = la.blocks
    # By so little that it would hardly be seen in what is predicted.
    second_block.weight.data.mul_(1.01)
    with pytest.raises(RuntimeError, match="have changed since the fit"):
        la.draw_logits(first_batch())
    with pytest.raises(RuntimeError, match="have changed since the fit"):
        la.optimize_prior_precision(method="gridsearch", val_loader=[first_batch()])
    assert la.prior_precision == 1


# --- batches and their logits ---------------------------------------------------------


@pytest.fixture
def adapted(gpt2: nn.Module) -> TokensModel:
    """GPT-2, whose logits are those of labelled tokens."""
    return TokensModel(gpt2)


# --- decoders -------------------------------------------------------------------------


def six_texts() -> Batch:
    """Make a batch of six texts of seven positions."""
    (batch,) = text_batches(batch_size=6)
    return batch


def test_a_gap_in_a_text_predicts_what_follows_as_in_training():
    model = lora_model("gpt_neox").eval()
    batch = six_texts()
    batch["attention_mask"][0, 3] = 0
    batch["labels"][0, 3] = IGNORED
    labels = batch["labels"]
    adapted = TokensModel(model)
    assert torch.equal(adapted.labelled(batch), labels != IGNORED)
    found = cross_entropy(adapted(batch), labels[labels != IGNORED])
    assert_close(found, model(**batch).loss.to(found))


# --- encoder-decoders -----------------------------------------------------------------


def test_an_encoder_reads_left_and_right_padded_texts_alike():
    # As many labels as positions.
    labels = pairs_of_texts()["labels"]
    adapted = TokensModel(BART())
    logits = {}
    for side in ("left", "right"):
        (texts,) = ragged_batches(lengths=(4, 3, 2), padded_to=4, padding_side=side)
        logits[side] = adapted(texts | {"labels": labels})
    assert_close(logits["left"], logits["right"])


@pytest.mark.parametrize("make_model", [fsmt, BART])
def test_labels_of_an_encoder_decoder_are_predicted_at_their_own_place(
    make_model, monkeypatch
):
    model = make_model()
    batch = pairs_of_texts()
    labels = batch["labels"].clone()
    adapted = TokensModel(model)
    found = adapted(batch)
    # FSMT writes to what it is given.
    assert torch.equal(batch["labels"], labels)
    assert torch.equal(adapted.labelled(batch), labels != IGNORED)
    prepare = adapted.transformer.prepare_decoder_input_ids_from_labels
    # As collators do that are given the model.
    decoded = {"decoder_input_ids": prepare(labels.clone())}
    output = model(**without_labels(batch), **decoded, use_cache=False)
    assert_close(found, output.logits[labels != IGNORED])
    for given in (decoded, {"decoder_input_ids": None}):
        assert_close(adapted(batch | given), found)
    # In parts, too, where the output layer is also the embedding.
    own = labels[labels != IGNORED]
    of_data = LabelsOfTokens(own, torch.empty(0, len(own)))
    monkeypatch.setattr(language, "MOST_ROWS", A_FEW_ROWS)
    with adapted.prepared():
        log_p = adapted.log_probs_of(batch, of_data)
    assert_close(log_p, found.log_softmax(-1).gather(1, own[:, None]))


def test_an_encoder_decoder_may_have_no_method_that_shifts_labels(monkeypatch):
    model = BART()
    base = model.get_base_model()
    # Then the configuration is all that says what a decoder begins with.
    base.config.decoder_start_token_id = 2
    batch = pairs_of_texts()
    expected = TokensModel(model)(batch)
    monkeypatch.delattr(type(base), "prepare_decoder_input_ids_from_labels")
    assert_close(TokensModel(model)(batch), expected, rtol=0, atol=0)
    base.generation_config.decoder_start_token_id = 2
    base.config.decoder_start_token_id = None
    assert_close(TokensModel(model)(batch), expected, rtol=0, atol=0)
    base.generation_config.decoder_start_token_id = None
    with pytest.raises(ValueError, match="add decoder_input_ids"):
        TokensModel(model)(batch)


# --- refused --------------------------------------------------------------------------


def test_labels_that_do_not_fit_are_refused(adapted):
    batch = six_texts()
    for labels, message in (
        (torch.full((6, 7), IGNORED), "no token is labelled"),
        (batch["input_ids"], "attention_mask is 0"),
        (None, "No labels 'labels'"),
    ):
        with pytest.raises(ValueError, match=message):
            adapted(batch | {"labels": labels})
    with pytest.raises(TypeError, match="mapping"):
        adapted((batch, batch["labels"]))


def test_models_that_do_not_fit_are_refused(bert, gpt2):
    with pytest.raises(ValueError, match="generates text"):
        TokensModel(bert)
    for keywords in ({"mask_token_id": 1}, {"normalised": True}):
        with pytest.raises(ValueError, match="leave out class_token_ids"):
            TokensModel(gpt2, **keywords)

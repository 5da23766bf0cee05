"""Language models that write: their fit, and what the class offers and refuses."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.special import entr
from torch.testing import assert_close
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BertModel,
    EncoderDecoderModel,
    GPT2LMHeadModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import laplace_lora_ext
import tests.support.dense as dense
from laplace_lora_ext.draws import Draws
from laplace_lora_ext.models import output_layer
from laplace_lora_ext.passes import graph
from laplace_lora_ext.saving import write_state
from laplace_lora_ext.tasks.classification import drawn_labels
from tests.support.cases import Case, Dense, Softmax, unpadded_rows
from tests.support.cases import dense as dense_of
from tests.support.dense import EXACT
from tests.support.models import VOCABULARY, Batch, built, llama, lora_model
from tests.support.new_tensors import NewTensors
from tests.support.posteriors import count_forward_passes, generator, make, normal
from tests.support.texts import (
    drawn_models,
    encoder_decoder,
    fitted_text,
    text_batches,
    token_logits,
)

# Of no factor more columns than the vocabulary has words.
FULL_RANK = VOCABULARY


# --- tiny models that write, in float64 -----------------------------------------------


def with_lora(base: nn.Module, target_modules: list[str]) -> nn.Module:
    """Add LoRA weights that are not 0."""
    lora = LoraConfig(
        r=2,
        target_modules=target_modules,
        # With B at 0, as PEFT begins, the gradient of A would be 0 everywhere.
        init_lora_weights=False,
    )
    model = get_peft_model(base.double(), lora)
    return model.eval()


def gpt2_model() -> nn.Module:
    return lora_model("gpt2").eval()


def with_lora_of_the_embedding() -> nn.Module:
    model = lora_model("gpt2", target_modules=["c_attn", "wte"])
    return model.eval()


class WithModuleBehind(GPT2LMHeadModel):
    """A model with another module behind its output layer."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = self.behind(output.logits)
        return output


def with_a_module_behind() -> nn.Module:
    model = lora_model("gpt2")
    base = model.get_base_model()
    base.__class__ = WithModuleBehind
    layer = nn.Linear(VOCABULARY, VOCABULARY)
    base.behind = layer.double()
    return model.eval()


def overwriting() -> nn.Module:
    """Make a model that overwrites what its output layer is given."""
    model = gpt2_model()

    def double(layer: nn.Module, args: tuple[Tensor]) -> None:
        args[0].mul_(2)

    model.get_output_embeddings().register_forward_pre_hook(double)
    return model


def llama_with_checkpoints() -> nn.Module:
    base = llama()
    base.gradient_checkpointing_enable()
    return with_lora(base, ["q_proj", "down_proj"])


def two_models() -> nn.Module:
    """Join an encoder and a decoder, which have layers of the same names."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    of_encoder = BertConfig(**sizes)
    of_decoder = BertConfig(**sizes, is_decoder=True, add_cross_attention=True)
    base = EncoderDecoderModel(
        encoder=BertModel(of_encoder), decoder=BertLMHeadModel(of_decoder)
    )
    base.config.decoder_start_token_id = 1
    base.config.pad_token_id = 0
    return with_lora(base, ["query"])


def gemma2() -> nn.Module:
    """Make a Gemma 2, which caps its logits behind the output layer."""
    # So low that it changes logits as small as those of random weights.
    base = built(
        "Gemma2ForCausalLM",
        num_key_value_heads=1,
        head_dim=4,
        final_logit_softcapping=0.5,
    )
    return with_lora(base, ["q_proj", "lm_head"])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2_model,
    "embedding": with_lora_of_the_embedding,
    "behind": with_a_module_behind,
    "overwriting": overwriting,
    "llama": llama_with_checkpoints,
    "t5": partial(encoder_decoder, "t5"),
    "two models": two_models,
    "gemma2": gemma2,
}


@pytest.fixture
def gpt2() -> nn.Module:
    return gpt2_model()


def first_batch() -> Batch:
    first, *_ = text_batches()
    return first


def make_of_texts(model: nn.Module, **settings: Any) -> Any:
    """Make a posterior of a language model that is not fitted."""
    return make(model, likelihood="language_modeling", **settings)


# --- curvature, loss and evidence -----------------------------------------------------


def of_labelled_tokens(model: nn.Module, text: Batch) -> Tensor:
    """Compute logits `(tokens, V)` that predict the labels of an unpadded text."""
    logits = model(text["input_ids"], use_cache=False).logits
    return logits[:, :-1][text["labels"][:, 1:] != -100]


def of_gpt2(model: nn.Module) -> Dense:
    """Differentiate the logits of all labelled tokens."""
    batches = text_batches()
    return dense_of(
        Case(model, batches, {}, Softmax(), unpadded_rows, of_labelled_tokens)
    )


def test_a_fit_has_the_gradient_of_a_texts_whole_loss_at_drawn_labels(gpt2):
    la = make_of_texts(gpt2, backend_kwargs={"rank": FULL_RANK})
    la.fit(text_batches())

    tokens = of_gpt2(gpt2)
    p = tokens.logits.softmax(-1)
    n_tokens = []
    for batch in text_batches():
        n_tokens += numbers_of_labels(batch)
    owners = torch.arange(len(n_tokens)).repeat_interleave(torch.tensor(n_tokens))
    (labels,) = drawn_labels(tokens.logits, Draws(0, owners).uniform(1))
    slopes = p - one_hot(labels, VOCABULARY)
    of_tokens = torch.einsum("nv,nvp->np", slopes, tokens.jacobian)
    of_texts = []
    for of_text in of_tokens.split(n_tokens):
        of_texts.append(of_text.sum(0))
    gradients = torch.stack(of_texts)
    # As if a text had one output, whose curvature is one.
    Js = tokens.case.dense(gradients, gradients[:, None]).Js
    ones = torch.ones(len(of_texts), 1, 1).double()
    expected = torch.block_diag(*[dense.kronecker_block(J, ones) for J in Js])
    found = la.H.to_matrix()
    assert_close(found, expected, rtol=1e-8, atol=1e-10)


def numbers_of_labels(batch: Batch) -> list[int]:
    """Count the labelled tokens of each text."""
    is_label = batch["labels"] != -100
    n_labels = is_label.sum(1)
    return n_labels.tolist()


def test_the_loss_and_the_evidence_are_those_of_all_labelled_tokens(gpt2):
    la = fitted_text(gpt2)
    logits, labels = token_logits(gpt2, text_batches())
    loss = cross_entropy(logits.detach(), labels, reduction="sum")
    assert_close(la.loss, loss)
    # Texts, and not tokens.
    assert la.n_data == 6
    prior_precision = torch.tensor([2.0])
    of_weights = prior_precision.to(la.mean).expand_as(la.mean)
    expected = dense.evidence(
        la.H.to_matrix(), log_likelihood=-loss, mean=la.mean, prior_precision=of_weights
    )
    found = la.log_marginal_likelihood(prior_precision)
    assert_close(found, expected)


# --- files ----------------------------------------------------------------------------


def some_score(la):
    """Score a batch by two draws, which are the same each time."""
    return la.score(first_batch(), 2, generator()).log_prob


def test_files_are_read(gpt2, tmp_path):
    la = fitted_text(gpt2, prior_precision=20.0)
    write_state(la.state_dict(), tmp_path)
    again = laplace_lora_ext.from_pretrained(gpt2, tmp_path)
    assert again.likelihood == "language_modeling"
    assert_close(some_score(again), some_score(la))


# --- what classes and texts refuse each other -----------------------------------------


def draw_logits(la, batch):
    la.draw_logits(batch)


def score(la, batch):
    la.score(batch, n_samples=2)


@pytest.mark.parametrize("read", [score, draw_logits])
def test_what_reads_texts_refuses_a_classifier(read, gpt2):
    la = make(gpt2, class_token_ids=[1, 2, 3])
    with pytest.raises(ValueError, match="language_modeling"):
        read(la, first_batch())
    with pytest.raises(ValueError, match="likelihood"):
        la.load_state_dict(fitted_text(gpt2).state_dict())


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda la, batch: la(batch),
        lambda la, batch: la(batch, pred_type="nn"),
        lambda la, batch: la.predictive_moments(batch),
        lambda la, batch: la.predictive_statistics([batch]),
    ],
)
def test_what_needs_jacobians_of_the_vocabulary_is_refused(differentiate):
    with pytest.raises(NotImplementedError, match=r"la\.score"):
        differentiate(fitted_text(), first_batch())


# --- scores ---------------------------------------------------------------------------


N_DRAWS = 4


def scored(la, **ragged):
    """Score six texts by some draws, and the labelled tokens of each."""
    parts = defaultdict(list)
    for batch in text_batches(**ragged):
        of_batch = la.score(batch, N_DRAWS, generator())
        parts["text"].append(of_batch.log_prob)
        of_tokens = of_batch.tokens._asdict()
        for name, numbers in of_tokens.items():
            of_labelled = numbers[of_batch.labelled]
            parts[name].append(of_labelled)
    return {name: torch.cat(numbers) for name, numbers in parts.items()}


def test_scores_are_those_of_a_mixture_of_drawn_models():
    la = fitted_text(prior_precision=3.0)
    found = scored(la)
    with torch.no_grad():
        trained = la.model.model
        logits, labels = token_logits(trained, text_batches())
        drawn = []
        for model in drawn_models(la, N_DRAWS, generator()):
            of_model, _ = token_logits(model, text_batches())
            drawn.append(of_model.softmax(-1))
    of_map = logits.log_softmax(-1)
    mixture = torch.stack(drawn).mean(0)
    tokens = torch.arange(len(labels))
    of_labels = mixture[tokens, labels]
    # `tests/text/test_scores.py` has the others.
    expected = {
        "log_prob": of_labels.log(),
        "map_log_prob": of_map[tokens, labels],
        "total": entr(mixture).sum(-1),
    }
    found = {name: found[name] for name in expected}
    assert_close(found, expected, rtol=1e-8, atol=1e-10)


PADDINGS = [
    {"batch_size": 1},
    {"batch_size": 6, "padded_to": 12},
    {"batch_size": 4, "padding_side": "left", "padded_to": 9},
]


@pytest.mark.parametrize("ragged", PADDINGS)
def test_batch_size_and_padding_change_neither_fit_nor_score(gpt2, ragged):
    def figures(**ragged):
        la = make_of_texts(gpt2, backend_kwargs={"rank": FULL_RANK})
        la.fit(text_batches(**ragged))
        return {"H": la.H.to_matrix(), "loss": la.loss, **scored(la, **ragged)}

    expected = figures()
    found = figures(**ragged)
    assert_close(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("n_samples", [0, 3])
def test_a_score_takes_a_pass_a_draw_and_one_more(n_samples):
    la = fitted_text()
    passes = count_forward_passes(la)
    scores = la.score(first_batch(), n_samples)
    assert len(passes) == 1 + n_samples
    tokens = scores.tokens
    # Without draws it is the model's own.
    is_own = torch.equal(tokens.log_prob, tokens.map_log_prob)
    assert is_own == (n_samples == 0)
    assert tokens.epistemic.any() == (n_samples > 0)


# --- few rows of logits at once -------------------------------------------------------

A_FEW_ROWS = 6


def record_calls(layer: nn.Module, calls: list[int]):
    """Note each call with more than one token from now on."""

    def note(_, inputs, output):
        states, *_ = inputs
        if states.shape[:-1].numel() > 1:
            calls.append(1)

    return layer.register_forward_hook(note)


def assert_same_fit(la, expected) -> None:
    found_H = la.H.to_matrix()
    expected_H = expected.H.to_matrix()
    # Streaming factors may lose what is near rounding: 3e-11 is measured.
    assert_close(found_H, expected_H, rtol=1e-9, atol=1e-10)
    assert_close(la.loss, expected.loss, **EXACT)


def first_layer_of(model: nn.Module) -> nn.Module:
    """Find the first of a list of layers."""
    for name, module in model.named_modules():
        if name.endswith(".0"):
            return module
    raise AssertionError("no list of layers")


# Gemma's LoRA is in the output layer as well, and so is that of an embedding which is
# tied to it.
@pytest.mark.parametrize(
    ("kind", "ragged"),
    [
        ("gpt2", PADDINGS[2]),
        ("t5", PADDINGS[0]),
        ("gemma2", PADDINGS[1]),
        ("two models", PADDINGS[2]),
        ("behind", PADDINGS[2]),
        ("overwriting", PADDINGS[1]),
        ("embedding", PADDINGS[1]),
        ("llama", PADDINGS[2]),
    ],
)
def test_in_parts_all_is_the_same_by_as_many_passes_and_few_rows_of_logits(
    kind, ragged, monkeypatch
):
    model = MODELS[kind]()
    batches = text_batches(**ragged)
    calls: list[int] = []

    def measured():
        calls.clear()
        with NewTensors() as made:
            la = fitted_text(model, batches, rank=FULL_RANK, prior_precision=3.0)
            scores = scored(la, **ragged)
        of_words = [s[:-1].numel() for s in made.shapes if s[-1:] == (VOCABULARY,)]
        return la, scores, len(calls), max(of_words)

    # One seed at a time: several have as many times the rows.
    monkeypatch.setattr(graph, "_ROWS", 1)
    with record_calls(first_layer_of(model), calls):
        expected, scores, n_calls, n_at_once = measured()
        monkeypatch.setattr(output_layer, "MOST_ROWS", A_FEW_ROWS)
        la, scores_in_parts, n_calls_in_parts, n_in_parts = measured()
    assert_same_fit(la, expected)
    assert_close(scores_in_parts, scores, rtol=1e-7, atol=1e-9)
    assert not any(column.requires_grad for column in scores_in_parts.values())
    assert n_calls_in_parts == n_calls > 0
    # A text by itself has as few rows; LoRA of the output layer has more of its own.
    if kind not in ("gemma2", "embedding"):
        assert n_in_parts == min(A_FEW_ROWS, n_at_once)


def test_speech_that_is_transcribed_is_fitted_in_parts_too(monkeypatch):
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=30,
        pad_token_id=0,
        decoder_start_token_id=1,
    )
    model = with_lora(WhisperForConditionalGeneration(config), ["q_proj"])
    batch = {
        "input_features": normal(3, 8, 40),
        "labels": torch.randint(3, VOCABULARY, (3, 6)),
    }
    expected = fitted_text(model, [batch], rank=FULL_RANK)
    monkeypatch.setattr(output_layer, "MOST_ROWS", 4)
    la = fitted_text(model, [batch], rank=FULL_RANK)
    assert_same_fit(la, expected)


# --- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend_kwargs": {"kfac_approx": "expand"}}, "gradient"),
        ({"structure": "kron"}, "hessian_structure"),
        ({"class_token_ids": [1, 2]}, "whole vocabulary"),
        ({"backend_kwargs": {"stochastic": False}}, "exact Fisher"),
        ({"backend_kwargs": {"draws": "signs"}}, "and signs as many"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message, gpt2):
    with pytest.raises((NotImplementedError, ValueError), match=message):
        make_of_texts(gpt2, **settings).fit(text_batches())


def test_one_label_is_drawn_for_each_token_by_default(gpt2):
    settings = make_of_texts(gpt2).backend.settings
    drawn = {"stochastic": True, "draws": "labels", "num_samples": 1}
    assert {name: settings[name] for name in drawn} == drawn


def test_texts_are_no_choices(gpt2):
    # Without answers, a model waits for batches that bring choices.
    with pytest.raises(ValueError, match="language_modeling"):
        make(gpt2).fit(text_batches())


def gridsearch(la, batch):
    la.optimize_prior_precision(method="gridsearch", val_loader=[batch])


@pytest.mark.parametrize("use", [score, draw_logits, gridsearch])
def test_a_model_that_has_changed_is_refused(use):
    la = fitted_text()
    _, second_block, *_ = la.blocks
    # By so little that it would hardly be seen in what is predicted.
    second_block.weight.data.mul_(1.01)
    with pytest.raises(RuntimeError, match="have changed since the fit"):
        use(la, first_batch())
    assert la.prior_precision == 1

"""Language models that write: their fit, and what the class offers and refuses."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import cross_entropy, one_hot
from torch.testing import assert_close
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BertModel,
    EncoderDecoderModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

import laplace_lora_ext
import tests.support.dense as dense
from laplace_lora_ext.curvature.backend import LowRankKronEF, LowRankKronGGN
from laplace_lora_ext.models import vocabulary
from laplace_lora_ext.passes import graph
from laplace_lora_ext.saving import write_state
from tests.support.dense import EXACT
from tests.support.models import VOCABULARY, llama, lora_model
from tests.support.posteriors import count_forward_passes, generator, make
from tests.support.texts import (
    RowsOfTheVocabulary,
    drawn_models,
    fitted_text,
    text_batches,
    token_logits,
)

FULL_RANK = 60  # that of the vocabulary
SOME_FIT = {"num_samples": 3, "rank": 3, "seed": 0}
"""Settings of `fitted_text`."""


# --- tiny models that write, in float64 -----------------------------------------------


def with_lora(base: nn.Module, target_modules: list[str]) -> nn.Module:
    """Add LoRA weights that are not 0."""
    lora = LoraConfig(r=2, target_modules=target_modules, init_lora_weights=False)
    return get_peft_model(base.double(), lora).eval()


def gpt2_model() -> nn.Module:
    return lora_model("gpt2").eval()


def with_lora_of_the_embedding() -> nn.Module:
    return lora_model("gpt2", target_modules=["c_attn", "wte"]).eval()


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
    base.behind = nn.Linear(VOCABULARY, VOCABULARY).double()
    return model.eval()


def llama_with_checkpoints() -> nn.Module:
    base = llama()
    base.gradient_checkpointing_enable()
    return with_lora(base, ["q_proj", "down_proj"])


def t5() -> nn.Module:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=8,
        d_kv=4,
        d_ff=12,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return with_lora(T5ForConditionalGeneration(config), ["q", "v"])


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
    of_decoder = BertConfig(**sizes, is_decoder=True, add_cross_attention=True)
    base = EncoderDecoderModel(
        encoder=BertModel(BertConfig(**sizes)),
        decoder=BertLMHeadModel(of_decoder),
    )
    base.config.decoder_start_token_id = 1
    base.config.pad_token_id = 0
    return with_lora(base, ["query"])


def gemma2() -> nn.Module:
    """Make a Gemma 2, which caps its logits behind the output layer."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        final_logit_softcapping=0.5,
        pad_token_id=0,
    )
    return with_lora(Gemma2ForCausalLM(config), ["q_proj", "lm_head"])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2_model,
    "embedding": with_lora_of_the_embedding,
    "behind": with_a_module_behind,
    "llama": llama_with_checkpoints,
    "t5": t5,
    "two models": two_models,
    "gemma2": gemma2,
}


@pytest.fixture
def gpt2() -> nn.Module:
    return gpt2_model()


def make_of_texts(model: nn.Module, **settings: Any) -> Any:
    """Make a posterior of a language model that is not fitted."""
    return make(model, likelihood="language_modeling", **settings)


# --- curvature, loss and evidence -----------------------------------------------------


def token_jacobians(
    model: nn.Module,
    batches: Sequence[Mapping[str, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Differentiate logits of labelled tokens, each text by itself.

    Returns Jacobians `(N, V, parameters)`, logits `(N, V)` and labels `(N,)`.
    """

    def forward(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        def of_weights(**inputs: Any) -> Any:
            return torch.func.functional_call(model, weights, (), inputs)

        logits, _ = token_logits(of_weights, batches)
        return logits

    Js = torch.func.jacrev(forward)(dense.lora_weights(model))
    J = torch.cat([of_weight.flatten(2) for of_weight in Js.values()], dim=2)
    logits, labels = token_logits(model, batches)
    return J, logits.detach(), labels


def test_the_error_of_the_sampled_factors_falls_with_the_root_of_the_number_of_draws(
    gpt2,
):
    J, logits, _ = token_jacobians(gpt2, text_batches())
    exact = dense.gradient_curvature(gpt2, J, dense.softmax_fisher(logits))

    def error(n_draws):
        """Compute the mean relative error of twelve seeds."""
        norms = []
        for seed in range(12):
            la = fitted_text(
                gpt2,
                num_samples=n_draws,
                rank=FULL_RANK,
                seed=seed,
            )
            difference = la.H.to_matrix() - exact
            norms.append(difference.norm())
        return torch.stack(norms).mean() / exact.norm()

    of_few = error(8)
    of_many = error(512)
    slope = math.log(of_many / of_few) / math.log(512 / 8)
    assert slope == pytest.approx(-0.5, abs=0.1)
    assert of_many < 0.1


def make_without_draws(model):
    """Make a posterior by the full-rank empirical Fisher, which draws no labels."""
    return make_of_texts(
        model,
        backend=LowRankKronEF,
        backend_kwargs={"rank": FULL_RANK},
    )


def test_the_empirical_fisher_has_a_texts_whole_gradient(gpt2):
    la = make_without_draws(gpt2)
    la.fit(text_batches())

    J, logits, labels = token_jacobians(gpt2, text_batches())
    slopes = logits.softmax(-1) - one_hot(labels, VOCABULARY)
    of_tokens = torch.einsum("nv,nvp->np", slopes, J)
    n_tokens = []
    for batch in text_batches():
        is_label = batch["labels"] != -100
        n_tokens += is_label.sum(1).tolist()
    of_texts = [of_text.sum(0) for of_text in of_tokens.split(n_tokens)]
    # As if a text had one output, whose curvature is one.
    gradients = torch.stack(of_texts)[:, None]
    ones = torch.ones(len(of_texts), 1, 1).double()
    expected = dense.gradient_curvature(gpt2, gradients, ones)
    assert_close(la.H.to_matrix(), expected, rtol=1e-8, atol=1e-10)


def test_the_loss_and_the_evidence_are_those_of_all_labelled_tokens(gpt2):
    la = fitted_text(gpt2)
    logits, labels = token_logits(gpt2, text_batches())
    loss = cross_entropy(logits.detach(), labels, reduction="sum")
    assert_close(la.loss, loss)
    assert la.n_data == 6
    expected = dense.evidence(
        la.H.to_matrix(),
        log_likelihood=-loss,
        mean=la.mean,
        prior_precision=torch.full_like(la.mean, 2.0),
    )
    assert_close(la.log_marginal_likelihood(torch.tensor([2.0])), expected)


# --- files ----------------------------------------------------------------------------


def test_a_posterior_on_disk_is_that_of_texts_again_and_of_no_classifier(
    gpt2,
    tmp_path,
):
    la = fitted_text(gpt2, prior_precision=20.0)
    la.save_pretrained(tmp_path)
    again = laplace_lora_ext.from_pretrained(gpt2, tmp_path)
    assert again.likelihood == "language_modeling"
    batch = text_batches()[0]
    expected = la.score(batch, 2, generator())
    found = again.score(batch, 2, generator())
    assert_close(found.tokens.total, expected.tokens.total)

    classifier = make(gpt2, class_token_ids=[1, 2, 3])
    with pytest.raises(ValueError, match="likelihood='language_modeling', not 'class"):
        classifier.load_state_dict(la.state_dict())
    assert copy.deepcopy(la).likelihood == "language_modeling"


def test_files_of_releases_that_had_a_class_for_texts_are_read(gpt2, tmp_path):
    la = fitted_text(gpt2, prior_precision=20.0)
    of_then = la.state_dict() | {"cls_name": "LanguageModelLaplace"}
    write_state(of_then, tmp_path)
    from_file = laplace_lora_ext.from_pretrained(gpt2, tmp_path)
    from_state = make_of_texts(gpt2, backend_kwargs=SOME_FIT)
    from_state.load_state_dict(of_then)
    batch = text_batches()[0]
    expected = la.score(batch, 2, generator())
    for again in (from_file, from_state):
        found = again.score(batch, 2, generator())
        assert_close(found.log_prob, expected.log_prob)


# --- what classes and texts refuse each other -----------------------------------------


def test_what_reads_texts_refuses_a_classifier(gpt2):
    la = make(gpt2, class_token_ids=[1, 2, 3])
    batch = text_batches()[0]
    with pytest.raises(ValueError, match="language_modeling"):
        la.score(batch)
    with pytest.raises(ValueError, match="language_modeling"):
        la.draw_logits(batch)
    with pytest.raises(ValueError, match="language_modeling"):
        la.tokens(batch)
    with pytest.raises(ValueError, match="language_modeling"):
        la.generate(input_ids=batch["input_ids"])


def test_what_needs_jacobians_of_the_vocabulary_is_refused():
    la = fitted_text()
    batch = text_batches()[0]
    with pytest.raises(NotImplementedError, match=r"la\.score"):
        la(batch)
    with pytest.raises(NotImplementedError, match=r"la\.score"):
        la(batch, pred_type="nn")
    with pytest.raises(NotImplementedError, match=r"la\.score"):
        la.predictive_moments(batch)
    with pytest.raises(NotImplementedError, match=r"la\.score"):
        la.predictive_statistics([batch])


# --- scores ---------------------------------------------------------------------------


def scored(la, **ragged):
    """Score six texts by four draws, and the labelled tokens of each."""
    of_texts = []
    of_tokens = {}
    for batch in text_batches(**ragged):
        score = la.score(batch, 4, generator())
        of_texts.append(score.log_prob)
        for name, numbers in score.tokens._asdict().items():
            labelled = numbers[score.labelled]
            of_tokens.setdefault(name, []).append(labelled)
    joined = {name: torch.cat(parts) for name, parts in of_tokens.items()}
    return joined | {"text": torch.cat(of_texts)}


def test_scores_are_those_of_a_mixture_of_drawn_models():
    la = fitted_text(prior_precision=3.0)
    found = scored(la)
    with torch.no_grad():
        logits, labels = token_logits(la.model.model, text_batches())
        drawn = []
        for model in drawn_models(la, 4, generator()):
            of_model, _ = token_logits(model, text_batches())
            drawn.append(of_model.softmax(-1))
    of_map = logits.log_softmax(-1)
    mixture = torch.stack(drawn).mean(0)
    tokens = torch.arange(len(labels))
    # `tests/text/test_scores.py` has the others.
    expected = {
        "log_prob": mixture[tokens, labels].log(),
        "map_log_prob": of_map[tokens, labels],
        "total": torch.special.entr(mixture).sum(-1),
    }
    for name, numbers in expected.items():
        assert_close(found[name], numbers, rtol=1e-8, atol=1e-10)


PADDINGS = [
    {"batch_size": 1},
    {"batch_size": 6, "padded_to": 12},
    {"batch_size": 4, "padding_side": "left", "padded_to": 9},
]


@pytest.mark.parametrize("ragged", PADDINGS)
def test_batch_size_and_padding_change_neither_fit_nor_score(gpt2, ragged):
    def figures(**ragged):
        la = make_without_draws(gpt2)
        la.fit(text_batches(**ragged))
        return {
            "H": la.H.to_matrix(),
            "loss": la.loss,
            **scored(la, **ragged),
        }

    assert_close(figures(), figures(**ragged), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("n_samples", [0, 3])
def test_a_score_takes_a_pass_a_draw_and_one_more(n_samples):
    la = fitted_text()
    passes = count_forward_passes(la)
    la.score(text_batches()[0], n_samples)
    assert len(passes) == 1 + n_samples


def test_a_score_without_draws_is_the_models_own():
    la = fitted_text()
    tokens = la.score(text_batches()[0], n_samples=0).tokens
    assert torch.equal(tokens.log_prob, tokens.map_log_prob)
    assert not tokens.epistemic.any()


# --- few rows of logits at once -------------------------------------------------------


def assert_no_forward_is_left(model):
    """Demand that no module's `forward` is still another one's."""
    for module in model.modules():
        assert "forward" not in vars(module)


@pytest.mark.parametrize("ragged", PADDINGS)
@pytest.mark.parametrize("kind", ["gpt2", "t5", "gemma2", "two models", "behind"])
def test_scores_in_parts_are_the_same_and_hold_few_rows_of_logits(
    kind,
    ragged,
    monkeypatch,
):
    model = MODELS[kind]()
    la = fitted_text(model, prior_precision=3.0)

    def figures():
        chosen = copy.copy(la)
        method = laplace_lora_ext.TokenAgreement(
            train_loader=text_batches(**ragged),
            generator=generator(),
        )
        chosen.optimize_prior_precision(method=method)
        return {"agreement": chosen.prior_precision, **scored(la, **ragged)}

    expected = figures()
    rows: list[int] = []
    output_layer = la.model.transformer.get_output_embeddings()

    def note_rows(_, inputs, output):
        rows.append(output.shape[:-1].numel())

    monkeypatch.setattr(vocabulary, "MOST_ROWS", 6)
    with output_layer.register_forward_hook(note_rows):
        found = figures()
    assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert max(rows) <= 6
    assert_no_forward_is_left(model)


@pytest.mark.parametrize("ragged", PADDINGS)
@pytest.mark.parametrize("kind", ["gpt2", "t5", "gemma2", "two models", "behind"])
def test_scores_in_parts_run_the_layers_before_the_output_layer_once(
    kind,
    ragged,
    monkeypatch,
):
    la = fitted_text(MODELS[kind](), prior_precision=3.0)
    monkeypatch.setattr(vocabulary, "MOST_ROWS", 6)
    calls: list[int] = []
    first_layer = la.blocks[0].module
    with first_layer.register_forward_hook(lambda *_: calls.append(1)):
        scored(la, **ragged)
    n_parts = sum(parts_of(batch) for batch in text_batches(**ragged))
    # Once for the trained model, and once a draw.
    assert len(calls) == 5 * n_parts


def parts_of(batch):
    """Count parts of a batch of at most six labelled tokens, or of one text."""
    is_label = batch["labels"] != -100
    n_parts = 0
    n_tokens = 0
    for n_more in is_label.sum(1).tolist():
        if n_parts == 0 or n_tokens + n_more > 6:
            n_parts += 1
            n_tokens = 0
        n_tokens += n_more
    return n_parts


LONG = {"lengths": (21, 18, 12, 26, 3, 20), "batch_size": 6, "padded_to": 26}


@pytest.mark.parametrize("backend", [LowRankKronGGN, LowRankKronEF])
@pytest.mark.parametrize("kind", ["gpt2", "t5", "llama"])
def test_a_fit_in_parts_is_the_same_and_holds_few_rows_of_the_vocabulary(
    kind,
    backend,
    monkeypatch,
):
    model = MODELS[kind]()

    def fit():
        la = make_of_texts(model, backend=backend, backend_kwargs={"rank": FULL_RANK})
        with RowsOfTheVocabulary(model) as rows:
            la.fit(text_batches(**LONG))
        return la, rows.most

    # One seed at a time: several have as many times the rows.
    monkeypatch.setattr(graph, "_ROWS", 1)
    expected, n_at_once = fit()
    assert n_at_once > 80
    monkeypatch.setattr(vocabulary, "MOST_ROWS", 12)
    la, n_in_parts = fit()
    assert n_in_parts == 12
    assert_close(la.H.to_matrix(), expected.H.to_matrix(), **EXACT)
    assert_close(la.loss, expected.loss, **EXACT)


# Gemma's LoRA is in the output layer as well, and so is that of an embedding which is
# tied to it.
@pytest.mark.parametrize("ragged", PADDINGS)
@pytest.mark.parametrize(
    "kind",
    ["gpt2", "gemma2", "embedding", "two models", "behind"],
)
def test_draws_of_a_fit_do_not_depend_on_its_parts(kind, ragged, monkeypatch):
    model = MODELS[kind]()
    batches = text_batches(**ragged)
    calls: list[int] = []

    def fit():
        calls.clear()
        la = fitted_text(model, batches, rank=FULL_RANK)
        return la, len(calls)

    first_layer, *_ = [
        module for name, module in model.named_modules() if name.endswith(".0")
    ]
    with first_layer.register_forward_hook(lambda *_: calls.append(1)):
        expected, n_calls = fit()
        monkeypatch.setattr(vocabulary, "MOST_ROWS", 3)
        la, n_calls_in_parts = fit()
    # The layers before the output layer run as often.
    assert n_calls_in_parts == n_calls > 0
    assert_close(la.H.to_matrix(), expected.H.to_matrix(), **EXACT)
    assert_close(la.loss, expected.loss, **EXACT)
    assert_no_forward_is_left(model)


def test_a_model_that_overwrites_what_is_remembered_is_refused(gpt2, monkeypatch):
    la = fitted_text(gpt2)
    monkeypatch.setattr(vocabulary, "MOST_ROWS", 2)

    def overwrite(_, inputs):
        with torch.no_grad():
            inputs[0].mul_(2)

    output_layer = gpt2.get_output_embeddings()
    output_layer.register_forward_pre_hook(overwrite, prepend=True)
    with pytest.raises(NotImplementedError, match="x = x"):
        la.score(text_batches()[0])


# --- what is refused ------------------------------------------------------------------


def test_settings_that_do_not_fit_are_refused(gpt2):
    with pytest.raises(NotImplementedError, match="gradient"):
        make_of_texts(gpt2, backend_kwargs={"kfac_approx": "expand"})
    with pytest.raises(ValueError, match='needs hessian_structure="lowrank_kron"'):
        make_of_texts(gpt2, structure="kron")
    with pytest.raises(ValueError, match="whole vocabulary"):
        make_of_texts(gpt2, class_token_ids=[1, 2])
    la = make_of_texts(gpt2, backend_kwargs={"stochastic": False})
    with pytest.raises(NotImplementedError, match="a backward pass for each word"):
        la.fit(text_batches())
    # Without answers, a model waits for batches that bring choices.
    of_choices = make(gpt2)
    with pytest.raises(ValueError, match="language_modeling"):
        of_choices.fit(text_batches())


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="'marginal' is none of"):
        fitted_text().optimize_prior_precision(method="marginal")


def score(la, texts):
    la.score(texts[0], n_samples=2)


def agreement(la, texts):
    la.optimize_prior_precision(method="agreement", train_loader=texts)


def gridsearch(la, texts):
    la.optimize_prior_precision(method="gridsearch", val_loader=texts)


@pytest.mark.parametrize("use", [score, agreement, gridsearch])
def test_a_model_that_has_changed_is_refused(use):
    la = fitted_text()
    la.blocks[1].weight.data.mul_(1.01)
    with pytest.raises(RuntimeError, match="have changed since the fit"):
        use(la, text_batches())
    assert la.prior_precision.item() == 1

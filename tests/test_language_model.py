"""Language models that write: their fit, and what the class offers and refuses."""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import cross_entropy
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
from tests.support.posteriors import (
    count_forward_passes,
    generator,
    make,
)
from tests.support.texts import (
    RowsOfTheVocabulary,
    drawn_models,
    fitted_text,
    text_batches,
    token_logits,
)

FULL_RANK = 60


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

        return token_logits(of_weights, batches)[0]

    Js = torch.func.jacrev(forward)(dense.lora_weights(model))
    logits, labels = token_logits(model, batches)
    of_all_weights = torch.cat(
        [J.flatten(2) for J in Js.values()],
        dim=2,
    )
    return of_all_weights, logits.detach(), labels


def test_the_error_of_the_sampled_factors_falls_with_the_root_of_the_number_of_draws():
    model = lora_model("gpt2").eval()
    J, logits, _ = token_jacobians(model, text_batches())
    exact = dense.gradient_curvature(model, J, dense.softmax_fisher(logits))

    def error(n_draws):
        """Relative error of a sampled curvature, the mean of twelve seeds."""
        norms = []
        for seed in range(12):
            la = fitted_text(
                model,
                num_samples=n_draws,
                rank=FULL_RANK,
                seed=seed,
            )
            norms.append((la.H.to_matrix() - exact).norm())
        return torch.stack(norms).mean() / exact.norm()

    of_few = error(8)
    of_many = error(512)
    slope = math.log(of_many / of_few) / math.log(512 / 8)
    assert slope == pytest.approx(-0.5, abs=0.1)
    assert of_many < 0.1


def make_without_draws(model):
    """Make a posterior by the full-rank empirical Fisher, which draws no labels."""
    return make(
        model,
        likelihood="language_modeling",
        backend=LowRankKronEF,
        backend_kwargs={"rank": FULL_RANK},
    )


def test_the_empirical_fisher_has_a_texts_whole_gradient():
    model = lora_model("gpt2").eval()
    la = make_without_draws(model)
    la.fit(text_batches())
    J, logits, labels = token_jacobians(model, text_batches())
    slopes = logits.softmax(-1) - torch.nn.functional.one_hot(labels, VOCABULARY)
    of_token = torch.einsum("nv,nvp->np", slopes, J)
    n_tokens = []
    for batch in text_batches():
        is_label = batch["labels"] != -100
        n_tokens += is_label.sum(1).tolist()
    of_texts = [of_tokens.sum(0) for of_tokens in of_token.split(n_tokens)]
    # One output a text, whose curvature is one.
    of_text = torch.stack(of_texts)[:, None]
    ones = torch.ones(len(of_text), 1, 1).double()
    expected = dense.gradient_curvature(model, of_text, ones)
    assert_close(la.H.to_matrix(), expected, rtol=1e-8, atol=1e-10)


def test_the_loss_and_the_evidence_are_those_of_all_labelled_tokens():
    model = lora_model("gpt2").eval()
    la = fitted_text(model)
    _, logits, labels = token_jacobians(model, text_batches())
    loss = cross_entropy(logits, labels, reduction="sum")
    assert_close(la.loss, loss)
    assert la.n_data == 6
    expected = dense.evidence(
        la.H.to_matrix(),
        -loss,
        la.mean,
        torch.full_like(la.mean, 2.0),
    )
    assert_close(la.log_marginal_likelihood(torch.tensor([2.0])), expected)


def test_a_posterior_on_disk_is_that_of_texts_again_and_of_no_classifier(
    tmp_path,
):
    model = lora_model("gpt2").eval()
    la = fitted_text(model, prior_precision=20.0)
    la.save_pretrained(tmp_path)
    again = laplace_lora_ext.from_pretrained(model, tmp_path)
    assert again.likelihood == "language_modeling"
    batch = text_batches()[0]
    expected = la.score(batch, 2, generator())
    found = again.score(batch, 2, generator())
    assert_close(found.tokens.total, expected.tokens.total)
    classifier = make(model, class_token_ids=[1, 2, 3])
    with pytest.raises(ValueError, match="likelihood='language_modeling', not 'class"):
        classifier.load_state_dict(la.state_dict())
    assert copy.deepcopy(la).likelihood == "language_modeling"


def test_files_of_releases_that_had_a_class_for_texts_are_read(tmp_path):
    model = lora_model("gpt2").eval()
    la = fitted_text(model, prior_precision=20.0)
    of_then = la.state_dict() | {"cls_name": "LanguageModelLaplace"}
    write_state(of_then, tmp_path)
    from_file = laplace_lora_ext.from_pretrained(model, tmp_path)
    from_state = make(
        model,
        likelihood="language_modeling",
        backend_kwargs={"num_samples": 3, "rank": 3, "seed": 0},
    )
    from_state.load_state_dict(of_then)
    batch = text_batches()[0]
    expected = la.score(batch, 2, generator()).log_prob
    for again in (from_file, from_state):
        assert_close(again.score(batch, 2, generator()).log_prob, expected)


def test_what_reads_texts_refuses_a_classifier():
    la = make(lora_model("gpt2"), class_token_ids=[1, 2, 3])
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


def scored(la, n_samples=4, **ragged):
    """Score six texts, and the labelled tokens of each."""
    scores = [
        la.score(batch, n_samples, generator()) for batch in text_batches(**ragged)
    ]
    of_texts = {"text": torch.cat([score.log_prob for score in scores])}
    for name in scores[0].tokens._fields:
        of_tokens = [getattr(score.tokens, name)[score.labelled] for score in scores]
        of_texts[name] = torch.cat(of_tokens)
    return of_texts


def test_scores_are_those_of_a_mixture_of_drawn_models():
    la = fitted_text(prior_precision=3.0)
    found = scored(la)
    with torch.no_grad():
        logits, labels = token_logits(la.model.model, text_batches())
        drawn = []
        for model in drawn_models(la, 4, generator()):
            of_model, _ = token_logits(model, text_batches())
            drawn.append(of_model)
    of_map = logits.log_softmax(-1)
    mixture = torch.stack(drawn).softmax(-1).mean(0)
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
def test_batch_size_and_padding_change_neither_fit_nor_score(
    ragged,
):
    model = lora_model("gpt2").eval()

    def figures(**ragged):
        la = make_without_draws(model)
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
    found = la.score(text_batches()[0], n_samples)
    assert len(passes) == 1 + n_samples
    if not n_samples:
        assert torch.equal(found.tokens.log_prob, found.tokens.map_log_prob)
        assert not found.tokens.epistemic.any()


@pytest.mark.parametrize("ragged", PADDINGS)
@pytest.mark.parametrize("kind", ["gpt2", "t5", "gemma2", "two models", "behind"])
def test_scores_in_parts_are_the_same_and_hold_few_rows_of_logits(
    kind, ragged, monkeypatch
):
    model = model_that_writes(kind)
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
    layer_calls: list[int] = []
    first_layer = la.blocks[0].module
    output_layer = la.model.transformer.get_output_embeddings()

    def note_rows(_, inputs, output):
        rows.append(output.shape[:-1].numel())

    def note_call(*_):
        layer_calls.append(1)

    monkeypatch.setattr(vocabulary, "MOST_ROWS", 6)
    with output_layer.register_forward_hook(note_rows):
        found = figures()
    assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert max(rows) <= 6
    with first_layer.register_forward_hook(note_call):
        scored(la, n_samples=4, **ragged)
    # The layers before the output layer run once for the trained model, and once a
    # draw.
    n_batches = sum(map(n_batches_of_texts, text_batches(**ragged)))
    assert len(layer_calls) == 5 * n_batches
    assert all("forward" not in vars(module) for module in model.modules())


def n_batches_of_texts(batch):
    """As few as have six labelled tokens each, or one text."""
    n_batches = 0
    n_tokens = 6
    for n_more in (batch["labels"] != -100).sum(1).tolist():
        if n_tokens + n_more > 6:
            n_batches += 1
            n_tokens = 0
        n_tokens += n_more
    return n_batches


LONG = {"lengths": (21, 18, 12, 26, 3, 20), "batch_size": 6, "padded_to": 26}


@pytest.mark.parametrize("backend", [LowRankKronGGN, LowRankKronEF])
@pytest.mark.parametrize("kind", ["gpt2", "t5", "llama"])
def test_a_fit_in_parts_is_the_same_and_holds_few_rows_of_the_vocabulary(
    kind, backend, monkeypatch
):
    model = model_that_writes(kind)

    def fit():
        la = make(
            model,
            likelihood="language_modeling",
            backend=backend,
            backend_kwargs={"rank": FULL_RANK},
        )
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


@pytest.mark.parametrize("ragged", PADDINGS)
@pytest.mark.parametrize(
    "kind", ["gpt2", "gemma2", "embedding", "two models", "behind"]
)
def test_draws_of_a_fit_do_not_depend_on_its_parts(kind, ragged, monkeypatch):
    """Also where LoRA is in the output layer, and where texts come one at a time."""
    model = model_that_writes(kind)
    batches = text_batches(**ragged)
    layer_calls: list[int] = []

    def note_call(*_):
        layer_calls.append(1)

    def fit():
        layer_calls.clear()
        la = fitted_text(model, batches, rank=FULL_RANK)
        return la, len(layer_calls)

    (first_layer, *_) = [
        module for name, module in model.named_modules() if name.endswith(".0")
    ]
    with first_layer.register_forward_hook(note_call):
        expected, n_calls = fit()
        monkeypatch.setattr(vocabulary, "MOST_ROWS", 3)
        la, n_calls_in_parts = fit()
    # The layers before the output layer run as often.
    assert n_calls_in_parts == n_calls > 0
    assert_close(la.H.to_matrix(), expected.H.to_matrix(), **EXACT)
    assert_close(la.loss, expected.loss, **EXACT)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_model_that_overwrites_what_is_remembered_is_refused(monkeypatch):
    model = lora_model("gpt2").eval()
    la = fitted_text(model)
    monkeypatch.setattr(vocabulary, "MOST_ROWS", 2)

    def overwrite(_, inputs):
        with torch.no_grad():
            inputs[0].mul_(2)

    output_layer = model.get_output_embeddings()
    output_layer.register_forward_pre_hook(overwrite, prepend=True)
    with pytest.raises(NotImplementedError, match="x = x"):
        la.score(text_batches()[0])


class WithModuleBehind(GPT2LMHeadModel):
    """A model with another module behind its output layer."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = self.behind(output.logits)
        return output


def model_that_writes(kind):
    """A tiny model in float64; Gemma 2 caps its logits behind the output layer."""
    if kind == "gpt2":
        return lora_model(kind).eval()
    if kind == "behind":
        model = lora_model("gpt2")
        model.get_base_model().__class__ = WithModuleBehind
        model.get_base_model().behind = nn.Linear(VOCABULARY, VOCABULARY).double()
        return model.eval()
    if kind == "embedding":
        return lora_model("gpt2", target_modules=["c_attn", "wte"]).eval()
    torch.manual_seed(0)
    if kind == "llama":
        base = llama()
        base.gradient_checkpointing_enable()
        return with_lora(base, ["q_proj", "down_proj"])
    if kind == "two models":
        sizes = {
            "vocab_size": VOCABULARY,
            "hidden_size": 8,
            "intermediate_size": 12,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        base = EncoderDecoderModel(
            encoder=BertModel(BertConfig(**sizes)),
            decoder=BertLMHeadModel(
                BertConfig(**sizes, is_decoder=True, add_cross_attention=True)
            ),
        )
        base.config.decoder_start_token_id = 1
        base.config.pad_token_id = 0
        return with_lora(base, ["query"])
    if kind == "t5":
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


def with_lora(base, target_modules):
    """Add LoRA weights that are not 0."""
    lora = LoraConfig(r=2, target_modules=target_modules, init_lora_weights=False)
    return get_peft_model(base.double(), lora).eval()


def test_settings_that_do_not_fit_are_refused():
    model = lora_model("gpt2")
    with pytest.raises(NotImplementedError, match="gradient"):
        make(
            model,
            likelihood="language_modeling",
            backend_kwargs={"kfac_approx": "expand"},
        )
    la = make(
        model,
        likelihood="language_modeling",
        backend_kwargs={"stochastic": False},
    )
    with pytest.raises(NotImplementedError, match="a backward pass for each word"):
        la.fit(text_batches())
    # Without answers, a model waits for batches that bring choices.
    of_choices = make(model)
    with pytest.raises(ValueError, match="language_modeling"):
        of_choices.fit(text_batches())
    with pytest.raises(ValueError, match='needs hessian_structure="lowrank_kron"'):
        make(model, "kron", likelihood="language_modeling")
    with pytest.raises(ValueError, match="whole vocabulary"):
        make(
            model,
            likelihood="language_modeling",
            class_token_ids=[1, 2],
        )
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

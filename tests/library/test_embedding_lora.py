"""LoRA of embeddings: posteriors, and what is done with them, against dense computations."""

from __future__ import annotations

import pytest
import torch
from laplace.curvature.curvlinops import CurvlinopsGGN
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

import laplace_lora_ext
from laplace_lora_ext.models.weights import LoRAWeights
from laplace_lora_ext.text.draws import Noise
from tests.support.dense import (
    as_padded,
    evidence,
    exact_ggn,
    gradient_blocks,
    gradient_curvature,
    jacobian,
    jacobians,
    logits_of,
    softmax_fisher,
    unpadded,
)
from tests.support.models import (
    CLASS_TOKEN_IDS,
    VOCABULARY,
    base_model,
    llama,
    lora_model,
    ragged_batches,
    with_lora,
)
from tests.support.posteriors import KFAC_APPROX, fitted, generator, make
from tests.support.texts import encoder_decoder, fitted_text, text_batches, token_jacobians

EXACT = {"rtol": 1e-6, "atol": 1e-9}
EVERYTHING = {
    "bert": [
        *("word_embeddings", "position_embeddings", "token_type_embeddings"),
        *("query", "key", "value", "dense"),
    ],
    "gpt2": ["wte", "wpe", "c_attn", "c_proj", "c_fc"],
    "gpt_neox": ["embed_in", "query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
}


def of_rows(model, batches, kind: str, side: str):
    """Logits `(N, C)` and Jacobians `(N, C, parameters)` of each example, without padding.

    A BERT that is padded on the left reads it.
    """
    alone = as_padded if (kind, side) == ("bert", "left") else unpadded
    rows = [alone(batch, row) for batch in batches for row in range(len(batch["labels"]))]
    logits = torch.stack([logits_of(model, row).detach() for row in rows])
    return logits, torch.stack([jacobian(model, row) for row in rows])


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", EVERYTHING)
def test_all_linear_layers_and_embeddings_together(kind, side):
    """Position embeddings are rows that all examples share."""
    model = lora_model(kind, target_modules=EVERYTHING[kind]).eval()
    batches = ragged_batches(padding_side=side)
    la = fitted(kind, batches, model=model, rank=100)
    logits, Js = of_rows(model, batches, kind, side)
    H = gradient_curvature(model, Js, softmax_fisher(logits))
    torch.testing.assert_close(la.H.to_matrix(), H, **EXACT)
    covariance = Js @ torch.linalg.inv(H + torch.eye(len(H)).double()) @ Js.mT
    moments = [la.predictive_moments(batch) for batch in batches]
    torch.testing.assert_close(torch.cat([m.f_mu for m in moments]), logits, **EXACT)
    torch.testing.assert_close(torch.cat([m.f_var for m in moments]), covariance, **EXACT)
    labels = torch.cat([batch["labels"] for batch in batches])
    log_likelihood = -cross_entropy(logits, labels, reduction="sum")
    expected = evidence(H, log_likelihood, la.mean, torch.ones_like(la.mean))
    torch.testing.assert_close(la.log_marginal_likelihood(), expected, **EXACT)


def trained_looking(base: nn.Module, *target_modules: str) -> PeftModel:
    """In float64, though some norms run in float32."""
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(r=2, lora_alpha=6, target_modules=[*target_modules]))
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def llama_lora() -> PeftModel:
    return trained_looking(llama(), "embed_tokens", "q_proj", "lm_head")


def gemma_lora() -> PeftModel:
    """Its embedding is scaled, and tied to the output layer."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        query_pre_attn_scalar=4,
        pad_token_id=0,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    base = transformers.Gemma3ForCausalLM(config)
    assert base.lm_head.weight is base.model.embed_tokens.weight
    return trained_looking(base, "embed_tokens", "q_proj")


def t5_lora() -> PeftModel:
    """One embedding of the encoder, and one of the decoder, tied to each other."""
    pytest.importorskip("transformers", minversion="5.0")  # before, they are one module
    base = encoder_decoder("t5").get_base_model()
    return trained_looking(base_of(base), "embed_tokens", "wi")


def base_of(model: nn.Module) -> nn.Module:
    """A model of the same configuration without adapters."""
    torch.manual_seed(0)
    return type(model)(model.config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("build", [llama_lora, gemma_lora, t5_lora])
def test_families(build):
    model = build()
    batches = ragged_batches()
    la = make(model, class_token_ids=CLASS_TOKEN_IDS, backend_kwargs={"rank": 100})
    la.fit(batches)
    logits, Js = [], []
    for batch in batches:
        for row in range(len(batch["labels"])):
            inputs = unpadded(batch, row)
            if model.config.is_encoder_decoder:
                inputs["decoder_input_ids"] = torch.zeros(1, 1).long()
            logits.append(logits_of(model, inputs).detach())
            Js.append(jacobian(model, inputs))
    logits, Js = torch.stack(logits), torch.stack(Js)
    blocks = gradient_blocks(model, Js, softmax_fisher(logits))
    H = torch.block_diag(*blocks)
    norms = {"rtol": 1e-5, "atol": 1e-6 * float(H.abs().max())}  # in float32
    torch.testing.assert_close(la.H.to_matrix(), H, **norms)
    f_var = torch.cat([la.predictive_moments(batch).f_var for batch in batches])
    covariance = Js @ torch.linalg.inv(H + torch.eye(len(H)).double()) @ Js.mT
    torch.testing.assert_close(f_var, covariance, rtol=1e-5, atol=1e-7)
    assert any("lora_embedding_A" in block.name for block in la.blocks)


class Reader(nn.Module):
    """Reads tokens by an embedding that it calls twice, or by a linear layer of one-hot tokens."""

    def __init__(self, is_linear: bool = False) -> None:
        super().__init__()
        self.words = nn.Linear(9, 4, bias=False) if is_linear else nn.Embedding(9, 4)
        self.last = nn.Linear(4, 3)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        is_linear = isinstance(getattr(self.words, "base_layer", self.words), nn.Linear)
        return self.words(one_hot(ids, 9).double() if is_linear else ids)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first, rest = self.rows(ids[:, :2]).tanh(), self.rows(ids[:, 2:])
        return self.last((first.mean(1)[:, None] * rest).tanh().mean(1))


def tokens(n: int = 5, length: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(9, (n, length), generator=generator()), torch.arange(n) % 3


def reader() -> nn.Module:
    return with_lora(Reader(), "words", "last")


def one_hot_reader() -> nn.Module:
    """The same function as `reader()`."""
    model, other = with_lora(Reader(is_linear=True), "words", "last"), reader()
    model.last.load_state_dict(other.last.state_dict())
    words = other.words
    model.words.weight.data.copy_(words.weight.T)
    model.words.lora_A["default"].weight.data.copy_(words.lora_embedding_A["default"])
    model.words.lora_B["default"].weight.data.copy_(words.lora_embedding_B["default"])
    return model


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_factors_are_those_of_a_linear_layer_of_one_hot_tokens(kfac_approx):
    settings = {"backend_kwargs": {"rank": 100, "kfac_approx": kfac_approx}}
    found, expected = (make(model, **settings) for model in (reader(), one_hot_reader()))
    for la in (found, expected):
        la.fit([tokens()])
    X, _ = tokens()
    torch.testing.assert_close(found.model(X), expected.model(X))
    torch.testing.assert_close(found.H.to_matrix(), expected.H.to_matrix())
    torch.testing.assert_close(found.log_marginal_likelihood(), expected.log_marginal_likelihood())


class TwoReaders(nn.Module):
    """Of the same tokens, by embeddings of their own, with other tokens for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(9, 4, padding_idx=3)
        self.two = nn.Embedding(9, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last((self.one(ids).tanh() * self.two(ids)).tanh().mean(1))


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
def test_embeddings_of_one_input_have_rows_of_their_own(kfac_approx):
    settings = {"backend_kwargs": {"rank": 100, "kfac_approx": kfac_approx}}
    model = with_lora(TwoReaders(), "one", "two")
    together = make(model, **settings)
    together.fit([tokens()])
    for place, name in enumerate(("one", "two")):
        alone = make(model, target_modules=[name], **settings)
        alone.fit([tokens()])
        for block, other in zip(
            together.H_facs.blocks[2 * place :], alone.H_facs.blocks, strict=False
        ):
            torch.testing.assert_close(
                block.input_factor.to_matrix(), other.input_factor.to_matrix()
            )


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_the_hosts_structures(structure):
    model, (X, y) = reader(), tokens()
    la = make(model, structure)
    la.fit([(X, y)])
    Js = jacobians(model, X)
    H = exact_ggn(Js, softmax_fisher(model(X).detach()))
    torch.testing.assert_close(la.H, H if structure == "full" else H.diagonal())
    P = la.H if structure == "full" else la.H.diag()
    expected = Js @ torch.linalg.inv(P + torch.eye(len(P)).double()) @ Js.mT
    torch.testing.assert_close(la.predictive_moments(X).f_var, expected)


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_the_hosts_backends_do_not_know_embeddings(structure):
    with pytest.raises(
        NotImplementedError, match=r"don't support LoRA of embeddings.*words\.lora_embedding_A"
    ):
        make(reader(), structure, backend=CurvlinopsGGN)
    la = make(reader(), structure, target_modules=["last"], backend=CurvlinopsGGN)
    la.fit([tokens()])


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
def test_shared_rows_count_for_each_example(kfac_approx):
    matrices = []
    for batch_size in (1, 3):
        model = lora_model("bert", target_modules=["position_embeddings", "query"])
        batches = ragged_batches(batch_size=batch_size)
        la = fitted(batches=batches, model=model, kfac_approx=kfac_approx, rank=100)
        matrices.append(la.H.to_matrix())
    torch.testing.assert_close(*matrices, **EXACT)


@pytest.mark.parametrize("method", ["marglik", "gridsearch", "agreement"])
def test_a_prior_is_chosen_as_for_one_hot_tokens(method):
    chosen, data = [], [tokens()]
    for model in (reader(), one_hot_reader()):
        la = make(model, backend_kwargs={"rank": 3})
        la.fit(data)
        loader = "val_loader" if method == "gridsearch" else "train_loader"
        options = {} if method == "marglik" else {loader: data}
        if method == "gridsearch":
            options["grid_size"] = 5
        la.optimize_prior_precision(method=method, **options)
        X, _ = tokens()
        shares = torch.tensor([*la.variance_by_layer(X).values()])
        chosen.append((la.prior_precision, la(X), shares))
    for found, expected in zip(*chosen, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag"])
def test_it_is_saved_drawn_from_and_guarded(structure, tmp_path):
    targets = ["word_embeddings", "query"]
    la = fitted(
        structure=structure,
        model=lora_model("bert", target_modules=targets),
        prior_precision=20.0,
    )
    batch = ragged_batches(lengths=(5, 5, 5), padded_to=5)[0]
    folder = tmp_path / "posterior"
    la.save_pretrained(folder)
    la.model.model.save_pretrained(folder)
    again = laplace_lora_ext.from_pretrained(reloaded(folder), folder)
    torch.testing.assert_close(again(batch), la(batch))
    before = {name: value.clone() for name, value in la.model.state_dict().items()}
    folders = la.sample_adapters(3, tmp_path / "samples", generator=generator())
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    draws = torch.stack([reloaded(folder)(**inputs).logits.softmax(-1) for folder in folders])
    assert not torch.allclose(draws[0], draws[1], atol=1e-4)
    expected = la(batch, pred_type="nn", link_approx="mc", n_samples=3, generator=generator())
    torch.testing.assert_close(draws.mean(0), expected)
    assert all(torch.equal(v, before[n]) for n, v in la.model.state_dict().items())
    with torch.no_grad():
        la.blocks[0].weight[0, 7] += 1e-3
    with pytest.raises(RuntimeError, match=r"word_embeddings\.lora_embedding_A\.default have chan"):
        la(batch)


def reloaded(folder) -> PeftModel:
    torch.manual_seed(0)  # the base model of `lora_model`
    base = base_model("bert").double()
    return PeftModel.from_pretrained(base, str(folder)).double().eval()


def test_a_posterior_follows_its_model_into_another_precision():
    la = fitted(model=lora_model("bert", target_modules=["word_embeddings", "query"]))
    expected = la(ragged_batches()[0])
    la.model.model.float()
    found = la(ragged_batches()[0])
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def padded_reader() -> PeftModel:
    """A GPT-2 whose padding token also stands in texts, as where it ends them."""
    model = lora_model("gpt2", target_modules=["wte", "c_attn"]).eval()
    model.base_model.model.transformer.wte.base_layer.padding_idx = 0
    return model


def texts() -> list[dict[str, torch.Tensor]]:
    batches = text_batches()
    for batch in batches:
        batch["input_ids"][:, 1] = 0
    return batches


def test_products_with_draws_are_those_of_the_jacobian_at_padding_too():
    """Forward-mode derivatives and differences know the embedding of padding as any other."""
    model = padded_reader()
    la = fitted_text(model, texts())
    (batch, *_) = texts()
    direction = Noise(1, 5).direction(0, la._precision, la.blocks)
    weights = LoRAWeights(la.model, la.blocks)
    way = la.way(batch)
    with la.model.prepared(), way.passes():
        f = weights.run(batch, weights.values)
        draw = way.draw(weights.values, direction)
        found = draw.combine(f, [weights.run(batch, values) for values in draw.weights]) - f
    J, _, _ = token_jacobians(model, [batch])
    delta = torch.cat([part.flatten() for part in direction])
    assert not J[..., : 2 * VOCABULARY].unflatten(-1, (2, VOCABULARY))[..., 0].any()
    torch.testing.assert_close(found, J @ delta, rtol=1e-4, atol=1e-5)
    scores = la.score(batch, n_samples=2, generator=generator())
    assert torch.isfinite(scores.log_prob).all()

"""Heads beside LoRA weights: exact where mathematics says so, by every public call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import laplace_lora_ext
from laplace_lora_ext.models.weights import Block
from tests.support.dense import evidence, exact_ggn, softmax_fisher, unpadded
from tests.support.heads import PARTS, dense_of, plain, trained, weights_of
from tests.support.models import (
    N_CLASSES,
    VOCABULARY,
    TwoLinear,
    base_model,
    lora_model,
    pairs,
    ragged_batches,
)
from tests.support.posteriors import (
    count_forward_passes,
    fitted,
    generator,
    make,
    stock,
)

EXACT = {"rtol": 1e-8, "atol": 1e-11}


def classifier(name: str, *target_modules: str) -> PeftModel:
    """Make a one-layer classifier whose head PEFT trains by itself."""
    torch.manual_seed(0)
    family = name.partition("For")[0]
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY,
        hidden_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        num_labels=N_CLASSES,
        pad_token_id=0,
    )
    adapter = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=list(target_modules))
    return trained(getattr(transformers, name)(config), adapter)


@dataclass(frozen=True)
class Case:
    """A model with a head, batches of labelled examples, and each example alone."""

    build: Callable[[], nn.Module]
    batches: list[Any]

    def examples(self) -> list[Any]:
        """Take each example without padding."""
        examples: list[Any] = []
        for batch in self.batches:
            if isinstance(batch, Mapping):
                n_examples = len(batch["input_ids"])
                examples += [unpadded(batch, row) for row in range(n_examples)]
            else:
                X, _ = batch
                examples += list(X.split(1))
        return examples

    def labels(self) -> torch.Tensor:
        """Join the labels of all batches."""
        labels: list[torch.Tensor] = []
        for batch in self.batches:
            of_batch = batch["labels"] if isinstance(batch, Mapping) else batch[1]
            labels.append(of_batch)
        return torch.cat(labels)


def bert() -> nn.Module:
    return lora_model("bert").eval()


def roberta() -> PeftModel:
    return classifier("RobertaForSequenceClassification", "query", "value")


def gpt_neox() -> PeftModel:
    return classifier("GPTNeoXForSequenceClassification", "query_key_value")


CASES = {
    "one layer with a bias": Case(bert, ragged_batches()),
    "two layers with biases": Case(roberta, ragged_batches()),
    "three layers of a plain module": Case(plain, pairs(2)),
    "a layer that all tokens go through": Case(gpt_neox, ragged_batches()),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def around(case: Case, structure: str = "lowrank_kron", **keywords):
    la = make(case.build(), structure, modules_to_save=True, **keywords)
    la.fit(case.batches)
    return la


def names_of(la) -> list[str]:
    return [block.name for block in la.blocks]


def kinds_of(la) -> list[str]:
    return [block.kind for block in la.blocks]


def heads_of(la) -> list[str]:
    """Names of the head's weights and biases."""
    return [block.name for block in la.blocks if block.kind == "head"]


def sizes_of(la) -> torch.Tensor:
    return torch.tensor([block.weight.numel() for block in la.blocks])


def parts_of(la) -> list[tuple[Block, slice]]:
    """Where each block's weights are among all parameters."""
    parts = []
    end = 0
    for block in la.blocks:
        start = end
        end += block.weight.numel()
        parts.append((block, slice(start, end)))
    return parts


def kronecker_blocks(
    model: nn.Module,
    Js: torch.Tensor,
    H: torch.Tensor,
) -> list[torch.Tensor]:
    """Compute `Σ G Gᵀ ⊗ Σ Gᵀ G / Σ ‖G‖²` of each weight or bias."""
    blocks = []
    weights = weights_of(model).values()
    sizes = [weight.numel() for weight in weights]
    for weight, J in zip(weights, Js.split(sizes, dim=-1), strict=True):
        G = J.unflatten(-1, (len(weight), -1))
        weighted = torch.einsum("bcd,bdij->bcij", H, G)
        F_out = torch.einsum("bcij,bckj->ik", G, weighted)
        F_in = torch.einsum("bcij,bcik->jk", G, weighted)
        blocks.append(torch.kron(F_out, F_in) / F_out.trace())
    return blocks


# --- exactness ------------------------------------------------------------------------


@cases
def test_blocks_are_the_weights_and_biases_of_adapter_and_head(case):
    la = around(case)
    weights = weights_of(la.model.model)
    assert names_of(la) == list(weights)
    for block, weight in zip(la.blocks, weights.values(), strict=True):
        assert block.weight.shape == weight.shape
    assert set(kinds_of(la)) == {"lora", "head"}
    values = [weight.flatten() for weight in weights.values()]
    assert torch.equal(la.mean, torch.cat(values))


@cases
def test_curvature_predictive_and_evidence_are_the_dense_ones_at_full_rank(case):
    la = around(case, backend_kwargs={"rank": 100})
    la.prior_precision = torch.linspace(0.3, 3, len(la.blocks)).double()
    model = la.model.model
    f_mu, Js = dense_of(model, case.examples())
    H = torch.block_diag(*kronecker_blocks(model, Js, softmax_fisher(f_mu)))
    assert_close(la.H.to_matrix(), H, **EXACT)

    prior = la.prior_precision.repeat_interleave(sizes_of(la))
    posterior = torch.linalg.inv(H + prior.diag())
    covariance = Js @ posterior @ Js.mT
    moments = [la.predictive_moments(la.model.inputs(batch)) for batch in case.batches]
    f_var = torch.cat([of_batch.f_var for of_batch in moments])
    assert_close(f_var, covariance, **EXACT)
    log_likelihood = -cross_entropy(f_mu, case.labels(), reduction="sum")
    expected = evidence(H, log_likelihood, la.mean, prior)
    assert_close(la.log_marginal_likelihood(), expected, **EXACT)
    statistics = la.predictive_statistics(case.batches, dtype=torch.float64)
    assert_close(statistics.moments(la.prior_precision).f_var, covariance, **EXACT)


@cases
def test_full_and_diag_are_the_exact_ggn(case):
    full = around(case, "full")
    f_mu, Js = dense_of(full.model.model, case.examples())
    ggn = exact_ggn(Js, softmax_fisher(f_mu))
    assert_close(full.H, ggn, **EXACT)
    assert_close(around(case, "diag").H, ggn.diagonal(), **EXACT)


@cases
def test_a_bias_has_its_exact_block_of_the_ggn(case):
    la = around(case, backend_kwargs={"rank": 100})
    f_mu, Js = dense_of(la.model.model, case.examples())
    ggn = exact_ggn(Js, softmax_fisher(f_mu))
    found = la.H.to_matrix()
    for block, part in parts_of(la):
        if block.parameter == "bias":
            assert_close(found[part, part], ggn[part, part], **EXACT)


@pytest.mark.parametrize("rank", [1, 3])
def test_the_smaller_factor_is_dense_and_the_larger_one_has_the_rank(rank):
    la = around(CASES["two layers with biases"], backend_kwargs={"rank": rank})
    for block, factors in zip(la.blocks, la.H.blocks, strict=True):
        smaller, larger = sorted(block.shape)
        assert factors.small.vectors.shape == (smaller, smaller)
        assert factors.large.vectors.shape == (larger, min(rank, larger))


def test_expand_is_kfac_of_a_head_that_examples_go_through_once():
    case = CASES["three layers of a plain module"]
    la = around(case, backend_kwargs={"rank": 100, "kfac_approx": "expand"})
    f_mu, Js = dense_of(la.model.model, case.examples())
    ggn = exact_ggn(Js, softmax_fisher(f_mu))
    found = la.H.to_matrix()
    for block, part in parts_of(la):
        of_block = found[part, part]
        if block.parameter == "bias":  # ones: nothing is approximated
            assert_close(of_block, ggn[part, part], **EXACT)
        else:
            assert of_block.trace() > 0


def test_the_hosts_kron_is_stock_krons_over_the_same_weights():
    case = CASES["one layer with a bias"]
    la = around(case, "kron")
    theirs = stock(case.build(), "bert", "kron", case.batches, PARTS)
    for ours, of_host in zip(la.H_facs.kfacs, theirs.H_facs.kfacs, strict=True):
        assert len(ours) == len(of_host)
        assert_close(ours[0], of_host[0], **EXACT)


# --- everything else ------------------------------------------------------------------


def test_lora_alone_is_the_default():
    la = make(lora_model("bert"))
    assert set(kinds_of(la)) == {"lora"}


def test_a_fit_with_the_head_takes_no_further_passes(monkeypatch):
    grad = torch.autograd.grad
    backward: list[int] = []

    def counting(*args, **kwargs):
        backward.append(1)
        return grad(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counting)
    taken = []
    for modules_to_save in (False, True):
        la = make(lora_model("bert"), modules_to_save=modules_to_save)
        forward = count_forward_passes(la)
        backward.clear()
        la.fit(ragged_batches())
        taken.append((len(forward), len(backward)))
    assert taken[0] == taken[1]
    assert all(taken[0])


def test_samples_of_the_head_are_saved_and_predict_as_drawn(tmp_path):
    la = fitted("bert", modules_to_save=True, dtype=torch.float32)
    la.prior_precision = 5.0
    batch = ragged_batches()[0]
    drawn = {"n_samples": 3, "generator": generator()}
    expected = la(batch, pred_type="nn", link_approx="mc", **drawn)
    folders = la.sample_adapters(3, tmp_path, generator=generator())
    probabilities = []
    biases = []
    for folder in folders:
        torch.manual_seed(0)
        model = PeftModel.from_pretrained(base_model("bert"), folder).eval()
        probabilities.append(model(**batch).logits.softmax(-1))
        biases.append(model.base_model.classifier.modules_to_save["default"].bias)
    assert_close(torch.stack(probabilities).mean(0), expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(biases[0], biases[1])


def test_a_file_keeps_the_choice_of_heads(tmp_path):
    case = CASES["two layers with biases"]
    la = make(case.build(), modules_to_save=["classifier.out_proj"])
    la.fit(case.batches)
    la.prior_precision = torch.linspace(0.5, 2, len(la.blocks)).double()
    la.amortize(case.batches)
    la.save_pretrained(tmp_path)
    loaded = laplace_lora_ext.from_pretrained(la.model.model, tmp_path)
    assert names_of(loaded) == names_of(la)
    batch = case.batches[0]
    assert torch.equal(loaded(batch), la(batch))
    learnt = loaded(batch, pred_type="amortized")
    assert torch.equal(learnt, la(batch, pred_type="amortized"))
    loaded.fit(case.batches, override=False)
    assert loaded.n_data == 2 * la.n_data


def test_a_changed_head_is_another_model():
    la = fitted("bert", modules_to_save=True)
    head = la.model.model.base_model.classifier.modules_to_save["default"]
    head.bias.data[0] += 1
    with pytest.raises(RuntimeError, match=r"classifier\S*\.bias have changed since"):
        la(ragged_batches()[0])


def test_a_mixture_of_adapters_has_each_ones_head():
    model = lora_model("bert")
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])
    members = [fitted(model=model, modules_to_save=True)]
    model.add_adapter("second", config)
    model.set_adapter("second")
    for name, weight in model.named_parameters():
        if ".second" in name:
            nn.init.normal_(weight, std=0.3)
    members.append(fitted(model=model, modules_to_save=True))
    first, second = map(heads_of, members)
    assert second == [name.replace("default", "second") for name in first]
    mixture = laplace_lora_ext.LaplaceMixture(members)
    batch = ragged_batches()[0]
    expected = torch.stack([la(batch) for la in members]).mean(0)
    assert_close(mixture(batch), expected)


def test_another_posterior_of_the_same_choice_has_the_same_heads():
    la = fitted("bert", modules_to_save=True)
    other = la.for_model(lora_model("bert"))
    assert names_of(other) == names_of(la)


# --- selected -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        pytest.param(["classifier"], ["dense", "out_proj"], id="what PEFT wraps"),
        pytest.param("classifier", ["dense", "out_proj"], id="a single name"),
        pytest.param(["classifier.out_proj"], ["out_proj"], id="a layer within"),
        pytest.param(
            ["out_proj", "dense"], ["dense", "out_proj"], id="names of layers"
        ),
        pytest.param([], [], id="no name"),
    ],
)
def test_names_select_heads(names, expected):
    model = CASES["two layers with biases"].build()
    la = make(model, modules_to_save=names)
    wanted = []
    for layer in expected:
        site = f"base_model.model.classifier.modules_to_save.default.{layer}"
        wanted += [f"{site}.weight", f"{site}.bias"]
    assert heads_of(la) == wanted


def test_what_is_frozen_in_a_head_is_left_out_unless_all_of_it_is():
    model = CASES["two layers with biases"].build()
    head = model.base_model.classifier.modules_to_save["default"]
    head.dense.requires_grad_(False)
    some = heads_of(make(model, modules_to_save=True))
    layers = [name.split(".")[-2] for name in some]
    assert layers == ["out_proj", "out_proj"]
    model.requires_grad_(False)  # as adapters that were loaded for inference
    every = heads_of(make(model, modules_to_save=True))
    assert len(every) == 4


# --- refused --------------------------------------------------------------------------


class WithNorm(nn.Module):
    """Its head is not of linear layers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(5, 6)
        self.head = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


def with_norm() -> nn.Module:
    return trained(
        WithNorm(), LoraConfig(target_modules=["encoder"], modules_to_save=["head"])
    )


def too_large() -> nn.Module:
    layers = nn.Sequential(
        nn.Linear(5, 6),
        nn.Linear(6, 2100),
        nn.Linear(2100, 2100),
    )
    return get_peft_model(
        layers, LoraConfig(target_modules=["0"], modules_to_save=["2"])
    )


def headless() -> nn.Module:
    return get_peft_model(TwoLinear(), LoraConfig(target_modules=["first"]))


def tied() -> nn.Module:
    model = plain()
    head = model.base_model.model.head.modules_to_save["default"]
    model.base_model.model.spare = nn.Linear(4, 3)
    model.base_model.model.spare.weight = head[4].weight
    return model


@pytest.mark.parametrize(
    ("model", "selection", "message"),
    [
        (
            plain,
            ["score"],
            r"no modules_to_save score: it has .*head\.0, .*head\.2, .*head\.4\.",
        ),
        (headless, True, "trained without any: leave it out"),
        (headless, ["head"], "no modules_to_save head: it has none"),
        (with_norm, True, r"head\.0\.weight is a weight of LayerNorm, .* name these"),
        (
            too_large,
            True,
            r"2,100 x 2,100, .* factor has 2,100 x 2,100 numbers \(17 MiB\)",
        ),
        (tied, True, r"share weights: .* leave out \S*head\S*\.4\.weight"),
    ],
)
def test_heads_that_can_not_take_part_are_refused_by_name(model, selection, message):
    with pytest.raises((NotImplementedError, ValueError), match=message):
        make(model(), modules_to_save=selection)


def test_the_linear_layer_of_a_head_takes_part_by_its_name():
    la = make(with_norm(), modules_to_save=["head.1"])
    assert len(heads_of(la)) == 2


def test_the_hosts_kron_refuses_a_layer_without_its_bias():
    model = lora_model("bert")
    model.base_model.classifier.modules_to_save["default"].bias.requires_grad_(False)
    la = make(model, "kron", modules_to_save=True)
    with pytest.raises(
        NotImplementedError, match=r"biases of 1 layers .*classifier\S*\.weight"
    ):
        la.fit(ragged_batches())


# --- regression: the calls of a surrogate for Bayesian optimisation -------------------


def test_the_calls_of_a_surrogate_with_a_head_of_three_layers():
    model = plain(n_outputs=1)
    X = torch.randn(10, 5, generator=generator()).double()
    y = torch.randn(10, 1, generator=generator(1)).double()  # labels (B, 1)
    batches = [
        {"x": X[:6], "labels": y[:6]},
        {"x": X[6:], "labels": y[6:]},
    ]

    class OfMapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, batch) -> torch.Tensor:
            return self.inner(batch["x"])

    la = make(OfMapping(), likelihood="regression", modules_to_save=True)
    la.fit(batches)
    assert len(heads_of(la)) == 5
    log_prior = torch.zeros(len(la.blocks), dtype=torch.float64, requires_grad=True)
    log_sigma = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([log_prior, log_sigma], lr=0.1)
    evidences = []
    for _ in range(20):
        optimizer.zero_grad()
        evidence_now = la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())
        (-evidence_now).backward()
        optimizer.step()
        evidences.append(evidence_now.item())
    assert evidences[-1] > evidences[0] + 1
    assert (log_prior.grad != 0).all()

    f_mu, f_var = la(batches[0])
    assert f_mu.shape == (6, 1)
    assert f_var.shape == (6, 1, 1)
    logits, Js = dense_of(model, list(X[:6].split(1)))
    assert_close(f_mu, logits, **EXACT)
    prior = la.prior_precision.detach()
    P = la.H.to_matrix() / la.sigma_noise.detach() ** 2
    P = P + prior.repeat_interleave(sizes_of(la)).diag()
    covariance = Js @ torch.linalg.solve(P, Js.mT)
    assert_close(f_var.detach(), covariance, **EXACT)

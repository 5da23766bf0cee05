"""Heads beside LoRA weights: exact where mathematics says so, by every public call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import laplace_lora_ext
from laplace_lora_ext.models.weights import Block
from tests.support.dense import (
    evidence,
    exact_ggn,
    full_rank,
    glm_covariance,
    kronecker_block,
    labels_of,
    predicted,
    softmax_fisher,
    unpadded,
)
from tests.support.heads import PARTS, dense_of, plain, trained, weights_of
from tests.support.models import (
    TwoLinear,
    base_model,
    built,
    first_batch,
    head_of,
    lora_model,
    pairs,
    ragged_batches,
)
from tests.support.posteriors import (
    count_backward_passes,
    count_forward_passes,
    fitted,
    generator,
    make,
    normal,
    priors_of_blocks,
    sizes,
    stock,
)

EXACT = {"rtol": 1e-8, "atol": 1e-11}


# --- models with heads ----------------------------------------------------------------


def classifier(name: str, target_modules: list[str]) -> PeftModel:
    """Make a one-layer classifier whose head PEFT trains by itself."""
    adapter = LoraConfig(
        task_type="SEQ_CLS",
        r=2,
        target_modules=target_modules,
    )
    return trained(built(name), adapter)


@dataclass(frozen=True)
class Case:
    """A model with a head, and batches of labelled examples."""

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


def bert() -> nn.Module:
    return lora_model("bert").eval()


def roberta() -> PeftModel:
    return classifier("RobertaForSequenceClassification", ["query", "value"])


def gpt_neox() -> PeftModel:
    return classifier("GPTNeoXForSequenceClassification", ["query_key_value"])


CASES = {
    "one layer with a bias": Case(bert, ragged_batches()),
    "two layers with biases": Case(roberta, ragged_batches()),
    "three layers of a plain module": Case(plain, pairs(2)),
    "a layer that all tokens go through": Case(gpt_neox, ragged_batches()),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def around(case: Case, structure: str = "lowrank_kron", **keywords):
    """Fit a posterior of a case's adapter and head."""
    la = make(case.build(), structure, modules_to_save=True, **keywords)
    la.fit(case.batches)
    return la


def names_of(la) -> list[str]:
    return [block.name for block in la.blocks]


def kinds_of(la) -> list[str]:
    return [block.kind for block in la.blocks]


def heads_of(la) -> list[str]:
    """Name the head's weights and biases."""
    return [block.name for block in la.blocks if block.kind == "head"]


def for_each_weight(
    la,
    prior_precision: torch.Tensor,
) -> torch.Tensor:
    """Repeat each block's prior precision for all of its weights."""
    n_weights = torch.tensor(sizes(la))
    return prior_precision.repeat_interleave(n_weights)


def parts_of(la) -> list[tuple[Block, slice]]:
    """Tell where each block's weights are among all parameters."""
    parts = []
    start = 0
    for block, size in zip(la.blocks, sizes(la), strict=True):
        end = start + size
        parts.append((block, slice(start, end)))
        start = end
    return parts


def kronecker(
    model: nn.Module,
    Js: torch.Tensor,
    H: torch.Tensor,
) -> torch.Tensor:
    """Compute the curvature of `kfac_approx="gradient"`, a bias being `(m, 1)`."""
    weights = weights_of(model).values()
    n_weights = [weight.numel() for weight in weights]
    Js_of_weights = Js.split(n_weights, dim=-1)
    blocks = []
    for weight, J in zip(weights, Js_of_weights, strict=True):
        n_rows = len(weight)
        as_matrices = J.unflatten(-1, (n_rows, -1))
        blocks.append(kronecker_block(as_matrices, H))
    return torch.block_diag(*blocks)


def ggn(
    model: nn.Module,
    case: Case,
) -> torch.Tensor:
    """Compute the exact generalised Gauss-Newton matrix of adapter and head."""
    logits, Js = dense_of(model, case.examples())
    fisher = softmax_fisher(logits)
    return exact_ggn(Js, fisher)


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
    la = around(case, **full_rank())
    prior_precision = priors_of_blocks(la)
    la.prior_precision = prior_precision
    model = la.model.model
    logits, Js = dense_of(model, case.examples())
    H = kronecker(model, Js, softmax_fisher(logits))
    assert_close(la.H.to_matrix(), H, **EXACT)

    # Each block has another, which for a head must not be the adapter's.
    prior = for_each_weight(la, prior_precision)
    covariance = glm_covariance(Js, H, prior)
    inputs = [la.model.inputs(batch) for batch in case.batches]
    _, of_inputs = predicted(la, inputs)
    assert_close(of_inputs, covariance, **EXACT)
    statistics = la.predictive_statistics(case.batches, dtype=torch.float64)
    of_statistics = statistics.moments(prior_precision).f_var
    assert_close(of_statistics, covariance, **EXACT)

    labels = labels_of(case.batches)
    log_likelihood = -cross_entropy(logits, labels, reduction="sum")
    expected = evidence(H, log_likelihood, la.mean, prior)
    assert_close(la.log_marginal_likelihood(), expected, **EXACT)


@cases
def test_full_and_diag_are_the_exact_ggn(case):
    full = around(case, "full")
    expected = ggn(full.model.model, case)
    assert_close(full.H, expected, **EXACT)
    diag = around(case, "diag")
    assert_close(diag.H, expected.diagonal(), **EXACT)


@cases
def test_a_bias_has_its_exact_block_of_the_ggn(case):
    la = around(case, **full_rank())
    expected = ggn(la.model.model, case)
    found = la.H.to_matrix()
    for block, part in parts_of(la):
        # Its input is 1: the Kronecker product of its factors is no approximation.
        if block.parameter == "bias":
            assert_close(found[part, part], expected[part, part], **EXACT)


@pytest.mark.parametrize("rank", [1, 3])
def test_the_smaller_factor_is_dense_and_the_larger_one_has_the_rank(rank):
    case = CASES["two layers with biases"]
    la = around(case, backend_kwargs={"rank": rank})
    for block, factors in zip(la.blocks, la.H.blocks, strict=True):
        smaller, larger = sorted(block.shape)
        assert factors.small.vectors.shape == (smaller, smaller)
        # No more than the factor has.
        n_columns = min(rank, larger)
        assert factors.large.vectors.shape == (larger, n_columns)


def test_expand_is_kfac_of_a_head_that_examples_go_through_once():
    case = CASES["three layers of a plain module"]
    la = around(case, **full_rank(kfac_approx="expand"))
    expected = ggn(la.model.model, case)
    found = la.H.to_matrix()
    for block, part in parts_of(la):
        of_block = found[part, part]
        if block.parameter == "bias":
            # Its inputs are ones, so that nothing is approximated.
            assert_close(of_block, expected[part, part], **EXACT)
        else:
            # Of a weight, KFAC is an approximation: it must be there at least.
            assert of_block.trace() > 0


def test_the_hosts_kron_is_stock_krons_over_the_same_weights():
    case = CASES["one layer with a bias"]
    ours = around(case, "kron")
    theirs = stock(case.build(), "bert", "kron", case.batches, PARTS)
    blocks = zip(ours.H_facs.kfacs, theirs.H_facs.kfacs, strict=True)
    for factors, of_host in blocks:
        # A bias has no factor of inputs.
        F_out, *F_in = factors
        host_out, *host_in = of_host
        assert_close(F_out, host_out, **EXACT)
        # The host has divided the factor of the inputs by the number of examples.
        mean_in = [factor / ours.n_data for factor in F_in]
        assert_close(mean_in, host_in, **EXACT)


# --- everything else ------------------------------------------------------------------


def test_lora_alone_is_the_default():
    la = make(lora_model("bert"))
    assert set(kinds_of(la)) == {"lora"}


def passes_of_a_fit(modules_to_save: bool, monkeypatch) -> tuple[int, int]:
    """Count forward and backward passes."""
    la = make(lora_model("bert"), modules_to_save=modules_to_save)
    forward = count_forward_passes(la)
    with monkeypatch.context() as patch:
        backward = count_backward_passes(patch)
        la.fit(ragged_batches())
    return len(forward), len(backward)


def test_a_fit_with_the_head_takes_no_further_passes(monkeypatch):
    of_adapter = passes_of_a_fit(False, monkeypatch)
    with_head = passes_of_a_fit(True, monkeypatch)
    assert with_head == of_adapter
    # Passes were counted at all.
    assert all(of_adapter)


def test_samples_of_the_head_are_saved_and_predict_as_drawn(tmp_path):
    la = fitted("bert", modules_to_save=True, dtype=torch.float32)
    # So broad a posterior that its samples differ by more than rounding.
    la.prior_precision = 5.0
    batch = first_batch()
    expected = la(
        batch,
        pred_type="nn",
        link_approx="mc",
        n_samples=3,
        generator=generator(),
    )
    probabilities = []
    biases = []
    for folder in la.sample_adapters(3, tmp_path, generator=generator()):
        # The base model of `lora_model`.
        torch.manual_seed(0)
        base = base_model("bert")
        model = PeftModel.from_pretrained(base, folder).eval()
        probabilities.append(model(**batch).logits.softmax(-1))
        biases.append(head_of(model).bias)
    mean = torch.stack(probabilities).mean(0)
    # Files are of float32.
    assert_close(mean, expected, rtol=1e-5, atol=1e-6)
    first, second, _ = biases
    assert not torch.equal(first, second)


def test_a_file_keeps_the_choice_of_heads(tmp_path):
    case = CASES["two layers with biases"]
    la = make(case.build(), modules_to_save=["classifier.out_proj"])
    la.fit(case.batches)
    la.prior_precision = priors_of_blocks(la)
    la.amortize(case.batches)
    la.save_pretrained(tmp_path)
    loaded = laplace_lora_ext.from_pretrained(la.model.model, tmp_path)
    assert names_of(loaded) == names_of(la)
    batch = first_batch()
    assert torch.equal(loaded(batch), la(batch))
    by_loaded = loaded(batch, pred_type="amortized")
    by_learnt = la(batch, pred_type="amortized")
    assert torch.equal(by_loaded, by_learnt)
    # More data are added to what the file says of the first.
    loaded.fit(case.batches, override=False)
    assert loaded.n_data == 2 * la.n_data


def test_a_changed_head_is_another_model():
    la = fitted("bert", modules_to_save=True)
    head_of(la.model.model).bias.data[0] += 1
    with pytest.raises(RuntimeError, match=r"classifier\S*\.bias have changed since"):
        la(first_batch())


def test_a_mixture_of_adapters_has_each_ones_head():
    model = lora_model("bert")
    first = fitted(model=model, modules_to_save=True)
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])
    model.add_adapter("second", config)
    model.set_adapter("second")
    for name, weight in model.named_parameters():
        # An adapter as PEFT begins it has a B of zeros, and the base model's head.
        if ".second" in name:
            nn.init.normal_(weight, std=0.3)
    second = fitted(model=model, modules_to_save=True)
    expected = [name.replace("default", "second") for name in heads_of(first)]
    assert heads_of(second) == expected
    mixture = laplace_lora_ext.LaplaceMixture([first, second])
    batch = first_batch()
    of_first = first(batch)
    of_second = second(batch)
    mean = (of_first + of_second) / 2
    assert_close(mixture(batch), mean)


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
        # In the order of the model, whatever that of the names.
        pytest.param(["out_proj", "dense"], ["dense", "out_proj"], id="two layers"),
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
    head_of(model).dense.requires_grad_(False)
    trainable = heads_of(make(model, modules_to_save=True))
    layers = [name.split(".")[-2] for name in trainable]
    # Weight and bias of one layer.
    assert layers == ["out_proj", "out_proj"]
    # As adapters that were loaded for inference.
    model.requires_grad_(False)
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
    config = LoraConfig(target_modules=["encoder"], modules_to_save=["head"])
    return trained(WithNorm(), config)


def too_large() -> nn.Module:
    """Make a model whose head is a square, of which no factor is small."""
    layers = nn.Sequential(
        nn.Linear(5, 6),
        nn.Linear(6, 2100),
        nn.Linear(2100, 2100),
    )
    config = LoraConfig(target_modules=["0"], modules_to_save=["2"])
    return get_peft_model(layers, config)


def headless() -> nn.Module:
    return get_peft_model(TwoLinear(), LoraConfig(target_modules=["first"]))


def tied() -> nn.Module:
    """Make a model in which another layer has the weight of the head's last one."""
    model = plain()
    spare = nn.Linear(4, 3)
    spare.weight = head_of(model)[4].weight
    model.base_model.model.spare = spare
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
    head_of(model).bias.requires_grad_(False)
    la = make(model, "kron", modules_to_save=True)
    message = r"biases of 1 layers .*classifier\S*\.weight"
    with pytest.raises(NotImplementedError, match=message):
        la.fit(ragged_batches())


# --- regression: the calls of a surrogate for Bayesian optimisation -------------------


class OfMolecules(nn.Module):
    """Takes a whole batch, as the surrogate's wrapper does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.model(batch["x"])


def evidences_of_training(la) -> list[float]:
    """Learn prior precisions and noise by the evidence; return it at each step."""
    log_prior = torch.zeros(len(la.blocks)).double().requires_grad_()
    log_sigma = torch.zeros(1).double().requires_grad_()
    optimizer = torch.optim.Adam([log_prior, log_sigma], lr=0.1)
    evidences = []
    for _ in range(20):
        optimizer.zero_grad()
        now = la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())
        (-now).backward()
        optimizer.step()
        evidences.append(now.item())
    assert (log_prior.grad != 0).all()
    return evidences


def test_the_calls_of_a_surrogate_with_a_head_of_three_layers():
    model = plain(n_outputs=1)
    X = normal(6, 5)
    batches = [
        {"x": X, "labels": normal(6, 1, seed=1)},
        {"x": normal(4, 5, seed=2), "labels": normal(4, 1, seed=3)},
    ]
    la = make(OfMolecules(model), likelihood="regression", modules_to_save=True)
    la.fit(batches)
    assert len(heads_of(la)) == 5
    evidences = evidences_of_training(la)
    assert evidences[-1] > evidences[0] + 1

    first, _ = batches
    f_mu, f_var = la(first)
    assert f_mu.shape == (6, 1)
    assert f_var.shape == (6, 1, 1)
    examples = list(X.split(1))
    expected, Js = dense_of(model, examples)
    assert_close(f_mu, expected, **EXACT)
    # The evidence has chosen the noise and the prior precisions.
    variance_of_noise = la.sigma_noise.detach() ** 2
    H = la.H.to_matrix() / variance_of_noise
    prior = for_each_weight(la, la.prior_precision.detach())
    covariance = glm_covariance(Js, H, prior)
    assert_close(f_var.detach(), covariance, **EXACT)

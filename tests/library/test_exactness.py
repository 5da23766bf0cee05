"""With rank >= d nothing is approximated but the Kronecker form: equality with dense formulas."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import cross_entropy

import laplace_lora_ext
from tests.support.dense import (
    alone,
    as_padded,
    block_diagonal_covariance,
    blocks,
    evidence,
    gradient_blocks,
    jacobian,
    logits_of,
    lora_layers,
    softmax_fisher,
    unpadded,
)
from tests.support.models import (
    CLASS_TOKEN_IDS,
    VOCABULARY,
    lora_model,
    ragged_batches,
)
from tests.support.posteriors import KFAC_APPROX, fitted, make, sizes, stock

EXACT = {"rtol": 1e-6, "atol": 1e-9}


def dense_examples(model, kind, side, batches):
    """Each example without padding, where that is the same function.

    A BERT that is padded on the left counts positions, and pools, from the padding on.
    """
    for batch in batches:
        for row in range(len(batch["labels"])):
            if kind == "bert" and side == "left":
                mask = batch["attention_mask"][row].bool()
                yield as_padded(batch, row), mask, batch["labels"][row]
            else:
                inputs = unpadded(batch, row)
                yield inputs, torch.ones(inputs["input_ids"].shape[1]).bool(), batch["labels"][row]


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["bert", "gpt2", "gpt_neox"])
def test_covariance_and_evidence_equal_dense_formulas(kind, side, kfac_approx):
    model = lora_model(kind).eval()
    batches = ragged_batches(padding_side=side)
    n_blocks = len(lora_layers(model))
    prior_precision = torch.linspace(0.3, 2.0, n_blocks).double()
    la = fitted(
        kind,
        batches,
        model=model,
        rank=100,
        kfac_approx=kfac_approx,
        prior_precision=prior_precision,
    )

    examples = list(dense_examples(model, kind, side, batches))
    dense_blocks = blocks(model, [e[:2] for e in examples], kfac_approx)
    H = torch.block_diag(*dense_blocks)
    torch.testing.assert_close(la.H.to_matrix(), H, **EXACT)

    sizes = torch.tensor([len(block) for block in dense_blocks])
    prior = prior_precision.repeat_interleave(sizes)
    Js = torch.stack([jacobian(model, inputs) for inputs, _, _ in examples])
    logits = torch.stack([logits_of(model, inputs) for inputs, _, _ in examples])
    labels = torch.stack([label for _, _, label in examples])
    covariance = Js @ torch.linalg.inv(H + prior.diag()) @ Js.mT
    moments = [la.predictive_moments(batch) for batch in batches]
    torch.testing.assert_close(torch.cat([f_mu for f_mu, _ in moments]), logits, **EXACT)
    torch.testing.assert_close(torch.cat([f_var for _, f_var in moments]), covariance, **EXACT)
    torch.testing.assert_close(la.functional_variance(Js), covariance, **EXACT)

    log_likelihood = -cross_entropy(logits, labels, reduction="sum")
    weights = torch.cat([p.detach().flatten() for n, p in model.named_parameters() if "lora_" in n])
    expected = evidence(H, log_likelihood, weights, prior)
    torch.testing.assert_close(la.log_marginal_likelihood(), expected, **EXACT)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_expand_on_one_unpadded_batch_equals_stock_kron(kind):
    model = lora_model(kind)
    batch = ragged_batches(lengths=[6] * 5, batch_size=5, padded_to=6)
    ours = fitted(kind, batch, model=model, rank=100, kfac_approx="expand")
    theirs = stock(model, kind, "kron", batch)
    torch.testing.assert_close(
        ours.posterior_precision.to_matrix(), theirs.posterior_precision.to_matrix(), **EXACT
    )
    torch.testing.assert_close(
        ours.log_marginal_likelihood(), theirs.log_marginal_likelihood(), **EXACT
    )
    for link_approx in ("probit", "bridge", "bridge_norm"):
        torch.testing.assert_close(
            ours(batch[0], link_approx=link_approx),
            theirs(batch[0], link_approx=link_approx),
            **EXACT,
        )


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_tail_keeps_the_trace_of_each_block_and_its_absence_loses_it(kind):
    model = lora_model(kind).eval()
    batches = ragged_batches()
    rows = [unpadded(batch, row) for batch in batches for row in range(len(batch["labels"]))]
    Js = torch.stack([jacobian(model, inputs) for inputs in rows])
    logits = torch.stack([logits_of(model, inputs) for inputs in rows]).detach()
    diagonal = torch.einsum("bcp,bcd,bdp->p", Js, softmax_fisher(logits), Js)
    with_tail, without = (fitted(kind, model=model, rank=1, tail=tail) for tail in (True, False))
    traces, kept, cut = (
        torch.stack([part.sum() for part in of_weights.split(sizes(with_tail))])
        for of_weights in (diagonal, with_tail.H.diag(), without.H.diag())
    )
    torch.testing.assert_close(kept, traces, **EXACT)
    assert (cut < traces).all()


def test_paper_settings_are_those_of_the_paper():
    la = make(lora_model("bert", hidden_size=16), backend_kwargs=laplace_lora_ext.PAPER_SETTINGS)
    la.fit(ragged_batches())
    for block in la.H.blocks:
        assert block.large.values.shape == (10,)
        assert block.large.tail == 0
    # KFAC-expand counts positions, "gradient" the energy of gradients.
    n_positions = sum(batch["attention_mask"].sum() for batch in ragged_batches())
    assert all(block.normalizer == n_positions for block in la.H_facs.blocks)


class Choices(nn.Module):
    """Scores each of an example's K answers, of several tokens, by its summed log-probability.

    A batch has `input_ids`, `attention_mask` and `is_answer`, all `(B, K, T)`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        ids = batch["input_ids"].flatten(0, 1)
        logits = self.model(ids, attention_mask=batch["attention_mask"].flatten(0, 1)).logits
        log_p = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        of_answers = (log_p * batch["is_answer"].flatten(0, 1)[:, 1:]).sum(-1)
        return of_answers.unflatten(0, batch["input_ids"].shape[:2])


class Prompts(nn.Module):
    """Tokenises prompts, one token a letter, and reads the answer behind them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        texts = [[ord(letter) % VOCABULARY for letter in prompt] for prompt in batch["prompt"]]
        lengths = torch.tensor([len(text) for text in texts])
        ids = torch.tensor([text + [0] * (int(lengths.max()) - len(text)) for text in texts])
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        logits = self.model(ids, attention_mask=mask.long()).logits
        return logits[range(len(ids)), lengths - 1][:, CLASS_TOKEN_IDS]


def of_choices() -> tuple[nn.Module, list[dict[str, Any]]]:
    (texts,) = ragged_batches(lengths=(7, 4, 5, 7, 3, 6) * 2, batch_size=12)
    batch = {name: texts[name].unflatten(0, (4, 3)) for name in ("input_ids", "attention_mask")}
    is_answer = batch["attention_mask"] * (torch.arange(7) >= 2)  # of one to five tokens
    batch |= {"is_answer": is_answer, "labels": texts["labels"][:4]}
    return Choices(lora_model("gpt2")), [parts(batch, slice(0, 3)), parts(batch, slice(3, 4))]


def of_prompts() -> tuple[nn.Module, list[dict[str, Any]]]:
    first = {"prompt": ["Is it?", "Or not to be?", "Why"], "labels": torch.tensor([0, 2, 1])}
    second = {"prompt": ["A question", "No"], "labels": torch.tensor([1, 1])}
    return Prompts(lora_model("gpt2")), [first, second]


def multiple_choice() -> tuple[nn.Module, list[dict[str, Any]]]:
    """A model of transformers, of inputs `(B, K, T)`."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        attn_implementation="eager",
    )
    base = transformers.BertForMultipleChoice(config)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["query", "value"]))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    _, batches = of_choices()
    for batch in batches:
        del batch["is_answer"]
    return model.double(), batches


def parts(batch: Mapping[str, Any], rows: slice) -> dict[str, Any]:
    """Some examples of a batch."""
    return {name: column[rows] for name, column in batch.items()}


OF_WRAPPERS = {
    "choices of several tokens": of_choices,
    "prompts as strings": of_prompts,
    "multiple choice": multiple_choice,
}


@pytest.mark.parametrize("name", OF_WRAPPERS)
def test_batches_that_are_no_rows_of_tokens(name):
    model, batches = OF_WRAPPERS[name]()

    def own_logits(model: nn.Module, example: Mapping[str, Any]) -> torch.Tensor:
        inputs = {key: column for key, column in example.items() if key != "labels"}
        return (model(**inputs).logits if name == "multiple choice" else model(inputs))[0]

    la = make(model, likelihood="classification", backend_kwargs={"rank": 100})
    la.fit(batches)
    examples = [
        parts(batch, slice(row, row + 1))
        for batch in batches
        for row in range(len(batch["labels"]))
    ]
    logits, Js = alone(model.eval(), own_logits, examples)
    dense = gradient_blocks(model, Js, softmax_fisher(logits))
    torch.testing.assert_close(la.H.to_matrix(), torch.block_diag(*dense), **EXACT)
    expected = logits, block_diagonal_covariance(dense, Js)
    moments = [la.predictive_moments(batch) for batch in batches]
    for found, of_logits in zip(zip(*moments, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(found), of_logits, **EXACT)

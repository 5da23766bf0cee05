"""With rank >= d only the Kronecker form approximates: dense equality."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import laplace_lora_ext
from tests.support.dense import (
    alone,
    as_padded,
    block_diagonal_covariance,
    evidence,
    gradient_blocks,
    jacobian,
    logits_of,
    lora_layers,
    lora_weights,
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

# --- dense Kronecker blocks -----------------------------------------------------------


@dataclass(frozen=True)
class Labelled:
    """An example as a batch of one, which positions `(T,)` count, and its label."""

    inputs: dict[str, torch.Tensor]
    is_valid: torch.Tensor
    label: torch.Tensor


def dense_examples(
    kind: str,
    side: str,
    batches: Sequence[Mapping],
) -> Iterator[Labelled]:
    """Take each example without padding, where that is the same function."""
    # A BERT that is padded on the left counts positions, and pools, from the padding
    # on.
    keeps_padding = kind == "bert" and side == "left"
    for batch in batches:
        for row, label in enumerate(batch["labels"]):
            if keeps_padding:
                is_valid = batch["attention_mask"][row].bool()
                yield Labelled(as_padded(batch, row), is_valid, label)
            else:
                inputs = unpadded(batch, row)
                is_valid = torch.ones(inputs["input_ids"].shape[1]).bool()
                yield Labelled(inputs, is_valid, label)


def inputs_and_gradients(
    model: nn.Module, inputs: Mapping[str, torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Find each LoRA layer's inputs `(T, n)` and derivatives `(C, T, m)`.

    The derivatives are those in shifts of the layers' outputs.
    """
    layers = [layer for _, layer in lora_layers(model)]
    read: dict[int, torch.Tensor] = {}
    written: dict[int, torch.Tensor] = {}

    def record(layer, args, output):
        read[id(layer)] = args[0].detach()[0]
        written[id(layer)] = output.detach()[0]

    handles = [layer.register_forward_hook(record) for layer in layers]
    logits_of(model, inputs)
    for handle in handles:
        handle.remove()

    def logits_after(*shifts):
        handles = []
        for layer, shift in zip(layers, shifts, strict=True):
            hook = lambda _, __, output, shift=shift: output + shift  # noqa: E731
            handles.append(layer.register_forward_hook(hook))
        logits = logits_of(model, inputs)
        for handle in handles:
            handle.remove()
        return logits

    no_shifts = tuple(torch.zeros_like(written[id(layer)]) for layer in layers)
    gradients = torch.autograd.functional.jacobian(logits_after, no_shifts)
    inputs_of_layers = [read[id(layer)] for layer in layers]
    return list(zip(inputs_of_layers, gradients, strict=True))


def expand_blocks(
    model: nn.Module,
    examples: Sequence[Labelled],
) -> list[torch.Tensor]:
    """Compute dense Kronecker blocks of `kfac_approx="expand"`."""
    n_blocks = len(lora_layers(model))
    F_out: list[Any] = [0.0] * n_blocks
    F_in: list[Any] = [0.0] * n_blocks
    n_positions = 0
    for example in examples:
        H = softmax_fisher(logits_of(model, example.inputs).detach())
        values, vectors = torch.linalg.eigh(H)
        # (C, C), another factor than the library's.
        root = vectors * values.clamp_min(0).sqrt()
        of_layers = inputs_and_gradients(model, example.inputs)
        for index, (a, g) in enumerate(of_layers):
            a = a[example.is_valid]
            g = torch.einsum("cs,ctm->stm", root, g)[:, example.is_valid]
            F_out[index] = F_out[index] + torch.einsum("stm,stk->mk", g, g)
            F_in[index] = F_in[index] + a.T @ a
        n_positions += int(example.is_valid.sum())
    pairs = zip(F_out, F_in, strict=True)
    return [torch.kron(outputs, inputs) / n_positions for outputs, inputs in pairs]


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

    examples = list(dense_examples(kind, side, batches))
    Js = torch.stack([jacobian(model, example.inputs) for example in examples])
    logits = torch.stack([logits_of(model, example.inputs) for example in examples])
    if kfac_approx == "gradient":
        blocks = gradient_blocks(model, Js, softmax_fisher(logits.detach()))
    else:
        blocks = expand_blocks(model, examples)
    H = torch.block_diag(*blocks)
    assert_close(la.H.to_matrix(), H, **EXACT)

    n_weights = torch.tensor([len(block) for block in blocks])
    prior = prior_precision.repeat_interleave(n_weights)
    covariance = Js @ torch.linalg.inv(H + prior.diag()) @ Js.mT
    moments = [la.predictive_moments(batch) for batch in batches]
    f_mu = torch.cat([of_batch.f_mu for of_batch in moments])
    f_var = torch.cat([of_batch.f_var for of_batch in moments])
    assert_close(f_mu, logits, **EXACT)
    assert_close(f_var, covariance, **EXACT)
    assert_close(la.functional_variance(Js), covariance, **EXACT)

    labels = torch.stack([example.label for example in examples])
    log_likelihood = -cross_entropy(logits, labels, reduction="sum")
    weights = [weight.flatten() for weight in lora_weights(model).values()]
    expected = evidence(H, log_likelihood, torch.cat(weights), prior)
    assert_close(la.log_marginal_likelihood(), expected, **EXACT)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_expand_on_one_unpadded_batch_equals_stock_kron(kind):
    model = lora_model(kind)
    batches = ragged_batches(lengths=[6] * 5, batch_size=5, padded_to=6)
    ours = fitted(kind, batches, model=model, rank=100, kfac_approx="expand")
    theirs = stock(model, kind, "kron", batches)

    found = ours.posterior_precision.to_matrix()
    expected = theirs.posterior_precision.to_matrix()
    assert_close(found, expected, **EXACT)
    found = ours.log_marginal_likelihood()
    expected = theirs.log_marginal_likelihood()
    assert_close(found, expected, **EXACT)
    for link_approx in ("probit", "bridge", "bridge_norm"):
        found = ours(batches[0], link_approx=link_approx)
        expected = theirs(batches[0], link_approx=link_approx)
        assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_tail_keeps_the_trace_of_each_block_and_its_absence_loses_it(kind):
    model = lora_model(kind).eval()
    batches = ragged_batches()
    examples = list(dense_examples(kind, "right", batches))
    Js = torch.stack([jacobian(model, example.inputs) for example in examples])
    logits = torch.stack([logits_of(model, example.inputs) for example in examples])
    diagonal = torch.einsum("bcp,bcd,bdp->p", Js, softmax_fisher(logits.detach()), Js)
    with_tail = fitted(kind, model=model, rank=1, tail=True)
    without = fitted(kind, model=model, rank=1, tail=False)

    def traces(diagonal: torch.Tensor) -> torch.Tensor:
        of_blocks = diagonal.split(sizes(with_tail))
        return torch.stack([part.sum() for part in of_blocks])

    assert_close(traces(with_tail.H.diag()), traces(diagonal), **EXACT)
    assert (traces(without.H.diag()) < traces(diagonal)).all()


def test_paper_settings_are_those_of_the_paper():
    model = lora_model("bert", hidden_size=16)
    la = make(model, backend_kwargs=laplace_lora_ext.PAPER_SETTINGS)
    la.fit(ragged_batches())
    for block in la.H.blocks:
        assert block.large.values.shape == (10,)
        assert block.large.tail == 0
    # KFAC-expand counts positions, "gradient" the energy of gradients.
    n_positions = sum(batch["attention_mask"].sum() for batch in ragged_batches())
    assert all(block.normalizer == n_positions for block in la.H_facs.blocks)


# --- batches that are no rows of tokens -----------------------------------------------


class Choices(nn.Module):
    """Scores an example's K answers by their summed log-probabilities.

    A batch has `input_ids`, `attention_mask` and `is_answer`, all `(B, K, T)`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        n_texts = batch["input_ids"].shape[:2]
        ids = batch["input_ids"].flatten(0, 1)
        mask = batch["attention_mask"].flatten(0, 1)
        is_answer = batch["is_answer"].flatten(0, 1)
        log_p = self.model(ids, attention_mask=mask).logits.log_softmax(-1)
        # The logits at a position are those of the next token.
        of_tokens = (
            log_p[:, :-1]
            .gather(
                -1,
                ids[:, 1:, None],
            )
            .squeeze(-1)
        )
        of_answers = (of_tokens * is_answer[:, 1:]).sum(-1)
        return of_answers.unflatten(0, n_texts)


class Prompts(nn.Module):
    """Tokenises prompts, one token a letter, and reads the answer behind them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        texts = []
        for prompt in batch["prompt"]:
            tokens = [ord(letter) % VOCABULARY for letter in prompt]
            texts.append(torch.tensor(tokens))
        lengths = torch.tensor([len(text) for text in texts])
        ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        logits = self.model(ids, attention_mask=mask.long()).logits
        return logits[range(len(ids)), lengths - 1][:, CLASS_TOKEN_IDS]


def rows_of(
    batch: Mapping[str, Any],
    rows: slice,
) -> dict[str, Any]:
    """Take some examples of a batch."""
    return {name: column[rows] for name, column in batch.items()}


def batches_of_choices() -> list[dict[str, Any]]:
    """Make two batches, of three examples and one, with three answers each."""
    (texts,) = ragged_batches(
        lengths=(7, 4, 5, 7, 3, 6) * 2,
        batch_size=12,
    )
    batch = {
        "input_ids": texts["input_ids"].unflatten(0, (4, 3)),
        "attention_mask": texts["attention_mask"].unflatten(0, (4, 3)),
        "labels": texts["labels"][:4],
    }
    # Two tokens are the question, the one to five others an answer.
    batch["is_answer"] = batch["attention_mask"] * (torch.arange(7) >= 2)
    return [
        rows_of(batch, slice(0, 3)),
        rows_of(batch, slice(3, 4)),
    ]


def multiple_choice_model() -> nn.Module:
    """Make a model of transformers that takes inputs `(B, K, T)`."""
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
    return model.double()


@dataclass(frozen=True)
class Case:
    """A model, its batches, and its logits of a batch without labels."""

    model: nn.Module
    batches: list[dict[str, Any]]
    logits: Callable[[nn.Module, dict[str, Any]], torch.Tensor]


def called_with_a_mapping(
    model: nn.Module,
    inputs: dict[str, Any],
) -> torch.Tensor:
    return model(inputs)


def called_with_keywords(
    model: nn.Module,
    inputs: dict[str, Any],
) -> torch.Tensor:
    return model(**inputs).logits


def choices_of_several_tokens() -> Case:
    model = Choices(lora_model("gpt2"))
    return Case(model, batches_of_choices(), called_with_a_mapping)


def prompts_as_strings() -> Case:
    model = Prompts(lora_model("gpt2"))
    first = {
        "prompt": ["Is it?", "Or not to be?", "Why"],
        "labels": torch.tensor([0, 2, 1]),
    }
    second = {
        "prompt": ["A question", "No"],
        "labels": torch.tensor([1, 1]),
    }
    return Case(model, [first, second], called_with_a_mapping)


def multiple_choice() -> Case:
    batches = batches_of_choices()
    for batch in batches:
        del batch["is_answer"]
    return Case(multiple_choice_model(), batches, called_with_keywords)


@pytest.mark.parametrize(
    "make_case",
    [
        pytest.param(choices_of_several_tokens, id="choices of several tokens"),
        pytest.param(prompts_as_strings, id="prompts as strings"),
        pytest.param(multiple_choice, id="multiple choice"),
    ],
)
def test_batches_that_are_no_rows_of_tokens(make_case: Callable[[], Case]):
    case = make_case()
    la = make(case.model, likelihood="classification", backend_kwargs={"rank": 100})
    la.fit(case.batches)

    examples = []
    for batch in case.batches:
        inputs = {key: column for key, column in batch.items() if key != "labels"}
        for row in range(len(batch["labels"])):
            examples.append(rows_of(inputs, slice(row, row + 1)))
    logits, Js = alone(
        case.model.eval(),
        lambda *args: case.logits(*args)[0],
        examples,
    )
    blocks = gradient_blocks(case.model, Js, softmax_fisher(logits))
    covariance = block_diagonal_covariance(blocks, Js)
    assert_close(la.H.to_matrix(), torch.block_diag(*blocks), **EXACT)

    moments = [la.predictive_moments(batch) for batch in case.batches]
    f_mu = torch.cat([of_batch.f_mu for of_batch in moments])
    f_var = torch.cat([of_batch.f_var for of_batch in moments])
    assert_close(f_mu, logits, **EXACT)
    assert_close(f_var, covariance, **EXACT)

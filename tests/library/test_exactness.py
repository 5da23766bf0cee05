"""With rank >= d only the Kronecker form approximates: dense equality."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    exact_ggn,
    full_rank,
    glm_covariance,
    gradient_blocks,
    jacobian,
    logits_of,
    lora_layers,
    lora_weights,
    power,
    predicted,
    softmax_fisher,
    unpadded,
)
from tests.support.models import (
    CLASS_TOKEN_IDS,
    VOCABULARY,
    lora_model,
    ragged_batches,
    without_labels,
)
from tests.support.posteriors import (
    KFAC_APPROX,
    fitted,
    make,
    priors_of_blocks,
    sizes,
    stock,
)

# Many entries of a Kronecker product are near 0, sums of larger ones that cancel.
EXACT = {"rtol": 1e-9, "atol": 1e-9}
LEAVES_NOTHING_OUT = 100

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
            mask = batch["attention_mask"][row].bool()
            if keeps_padding:
                yield Labelled(as_padded(batch, row), mask, label)
            else:
                all_of_them = mask[mask]
                yield Labelled(unpadded(batch, row), all_of_them, label)


@contextmanager
def hooks(
    layers: Sequence[nn.Module],
    of_layers: Sequence[Callable],
) -> Iterator[None]:
    """Register a forward hook on each layer, for a while."""
    handles = []
    for layer, hook in zip(layers, of_layers, strict=True):
        handle = layer.register_forward_hook(hook)
        handles.append(handle)
    yield
    for handle in handles:
        handle.remove()


def shifting(shift: torch.Tensor) -> Callable:
    """Make a hook that adds a shift to a layer's output."""
    return lambda layer, args, output: output + shift


@dataclass(frozen=True)
class OfLayer:
    """What one example's positions bring to a layer, `(T, n)` and `(C, T, m)`."""

    inputs: torch.Tensor
    gradients: torch.Tensor


def inputs_and_gradients(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
) -> list[OfLayer]:
    """Find each LoRA layer's inputs, and the logits' derivatives in its outputs."""
    layers = [layer for _, layer in lora_layers(model)]
    read: dict[nn.Module, torch.Tensor] = {}
    written: dict[nn.Module, torch.Tensor] = {}

    def record(layer, args, output):
        read[layer] = args[0].detach()[0]
        written[layer] = output.detach()[0]

    with hooks(layers, [record] * len(layers)):
        logits_of(model, inputs)

    # The derivative in a layer's output is that in a shift of it, at 0.
    def logits_after(*shifts):
        of_layers = [shifting(shift) for shift in shifts]
        with hooks(layers, of_layers):
            return logits_of(model, inputs)

    no_shifts = tuple(torch.zeros_like(written[layer]) for layer in layers)
    gradients = torch.autograd.functional.jacobian(logits_after, no_shifts)
    of_layers = []
    for layer, of_layer in zip(layers, gradients, strict=True):
        of_layers.append(OfLayer(read[layer], of_layer))
    return of_layers


def expand_blocks(
    model: nn.Module,
    examples: Sequence[Labelled],
) -> list[torch.Tensor]:
    """Compute dense Kronecker blocks of `kfac_approx="expand"`.

    Each is `(Σ g gᵀ) ⊗ (Σ a aᵀ) / T` over all T positions, with inputs a and gradients
    g of each of the Fisher's columns.
    """
    n_blocks = len(lora_layers(model))
    F_out: list[Any] = [0.0] * n_blocks
    F_in: list[Any] = [0.0] * n_blocks
    n_positions = 0
    for example in examples:
        logits = logits_of(model, example.inputs).detach()
        # H = root rootᵀ, another factor (C, C) than the library's.
        root = power(softmax_fisher(logits), 0.5)
        of_layers = inputs_and_gradients(model, example.inputs)
        for index, of_layer in enumerate(of_layers):
            a = of_layer.inputs[example.is_valid]
            gradients = of_layer.gradients[:, example.is_valid]
            g = torch.einsum("cs,ctm->stm", root, gradients)
            F_out[index] += torch.einsum("stm,stk->mk", g, g)
            F_in[index] += a.T @ a
        n_positions += int(example.is_valid.sum())
    blocks = []
    for outputs, inputs in zip(F_out, F_in, strict=True):
        block = torch.kron(outputs, inputs)
        blocks.append(block / n_positions)
    return blocks


@dataclass(frozen=True)
class Dense:
    """Logits, Jacobians `(N, C, parameters)` and the Fisher at each one's logits."""

    logits: torch.Tensor
    Js: torch.Tensor
    fisher: torch.Tensor

    @staticmethod
    def of(
        model: nn.Module,
        examples: Sequence[Labelled],
    ) -> "Dense":
        """Differentiate each example by itself."""
        logits = []
        Js = []
        for example in examples:
            of_example = logits_of(model, example.inputs)
            logits.append(of_example.detach())
            Js.append(jacobian(model, example.inputs))
        f = torch.stack(logits)
        return Dense(f, torch.stack(Js), softmax_fisher(f))


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["bert", "gpt2", "gpt_neox"])
def test_covariance_and_evidence_equal_dense_formulas(kind, side, kfac_approx):
    model = lora_model(kind).eval()
    batches = ragged_batches(padding_side=side)
    la = fitted(
        kind,
        batches,
        model=model,
        rank=LEAVES_NOTHING_OUT,
        kfac_approx=kfac_approx,
    )
    prior_precision = priors_of_blocks(la)
    la.prior_precision = prior_precision

    examples = list(dense_examples(kind, side, batches))
    dense = Dense.of(model, examples)
    if kfac_approx == "gradient":
        blocks = gradient_blocks(model, dense.Js, dense.fisher)
    else:
        blocks = expand_blocks(model, examples)
    H = torch.block_diag(*blocks)
    assert_close(la.H.to_matrix(), H, **EXACT)

    n_weights = torch.tensor([len(block) for block in blocks])
    prior = prior_precision.repeat_interleave(n_weights)
    covariance = glm_covariance(dense.Js, H, prior)
    f_mu, f_var = predicted(la, batches)
    assert_close(f_mu, dense.logits, **EXACT)
    assert_close(f_var, covariance, **EXACT)
    assert_close(la.functional_variance(dense.Js), covariance, **EXACT)

    labels = torch.stack([example.label for example in examples])
    log_likelihood = -cross_entropy(dense.logits, labels, reduction="sum")
    weights = [weight.flatten() for weight in lora_weights(model).values()]
    mean = torch.cat(weights)
    expected = evidence(H, log_likelihood, mean, prior)
    assert_close(la.log_marginal_likelihood(), expected, **EXACT)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_expand_on_one_unpadded_batch_equals_stock_kron(kind):
    model = lora_model(kind)
    # In one batch of texts of one length there is no padding that the host would count,
    # nor a mean over batches of other lengths.
    batches = ragged_batches(
        lengths=[6] * 5,
        batch_size=5,
        padded_to=6,
    )
    ours = fitted(
        kind,
        batches,
        model=model,
        rank=LEAVES_NOTHING_OUT,
        kfac_approx="expand",
    )
    theirs = stock(model, kind, "kron", batches)

    found = ours.posterior_precision.to_matrix()
    expected = theirs.posterior_precision.to_matrix()
    assert_close(found, expected, **EXACT)
    found = ours.log_marginal_likelihood()
    expected = theirs.log_marginal_likelihood()
    assert_close(found, expected, **EXACT)
    (batch,) = batches
    for link_approx in ("probit", "bridge", "bridge_norm"):
        found = ours(batch, link_approx=link_approx)
        expected = theirs(batch, link_approx=link_approx)
        assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_tail_keeps_the_trace_of_each_block_and_its_absence_loses_it(kind):
    model = lora_model(kind).eval()
    examples = list(dense_examples(kind, "right", ragged_batches()))
    dense = Dense.of(model, examples)
    diagonal = exact_ggn(dense.Js, dense.fisher).diagonal()
    with_tail = fitted(kind, model=model, rank=1, tail=True)
    without = fitted(kind, model=model, rank=1, tail=False)

    def traces(diagonal: torch.Tensor) -> torch.Tensor:
        of_blocks = diagonal.split(sizes(with_tail))
        return torch.stack([part.sum() for part in of_blocks])

    exact = traces(diagonal)
    kept = traces(without.H.diag())
    assert_close(traces(with_tail.H.diag()), exact, **EXACT)
    assert (kept < exact).all()


def test_paper_settings_are_those_of_the_paper():
    # Wider than the ten columns that the paper keeps.
    model = lora_model("bert", hidden_size=16)
    la = make(model, backend_kwargs=laplace_lora_ext.PAPER_SETTINGS)
    la.fit(ragged_batches())
    for block in la.H.blocks:
        assert block.large.values.shape == (10,)
        assert block.large.tail == 0
    # KFAC-expand counts positions, "gradient" the energy of gradients.
    n_positions = sum(batch["attention_mask"].sum() for batch in ragged_batches())
    for block in la.H_facs.blocks:
        assert block.normalizer == n_positions


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
        next_tokens = ids[:, 1:, None]
        of_tokens = log_p[:, :-1].gather(-1, next_tokens).squeeze(-1)
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
        at_last = logits[range(len(ids)), lengths - 1]
        return at_last[:, CLASS_TOKEN_IDS]


def rows_of(
    batch: Mapping[str, Any],
    rows: slice,
) -> dict[str, Any]:
    """Take some examples of a batch."""
    return {name: column[rows] for name, column in batch.items()}


def batches_of_choices() -> list[dict[str, Any]]:
    """Make two batches, of three examples and one, with three answers each."""
    n_questions = 4
    n_answers = 3
    (texts,) = ragged_batches(
        lengths=(7, 4, 5, 7, 3, 6) * 2,
        batch_size=n_questions * n_answers,
    )
    shape = (n_questions, n_answers)
    batch = {
        "input_ids": texts["input_ids"].unflatten(0, shape),
        "attention_mask": texts["attention_mask"].unflatten(0, shape),
        "labels": texts["labels"][:n_questions],
    }
    # Two tokens are the question, the one to five others an answer.
    behind_question = torch.arange(7) >= 2
    batch["is_answer"] = batch["attention_mask"] * behind_question
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
    lora = LoraConfig(r=2, target_modules=["query", "value"])
    model = get_peft_model(base, lora)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double()


@dataclass(frozen=True)
class Case:
    """A model, its batches, and how it is called with an example."""

    model: nn.Module
    batches: list[dict[str, Any]]
    logits_of: Callable[[nn.Module, dict[str, Any]], torch.Tensor]


def of_mapping(
    model: nn.Module,
    example: dict[str, Any],
) -> torch.Tensor:
    """Compute `(C,)` logits of one example by a model that takes mappings."""
    return model(example)[0]


def choices_of_several_tokens() -> Case:
    model = Choices(lora_model("gpt2"))
    return Case(model, batches_of_choices(), of_mapping)


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
    return Case(model, [first, second], of_mapping)


def multiple_choice() -> Case:
    batches = batches_of_choices()
    for batch in batches:
        del batch["is_answer"]
    return Case(multiple_choice_model(), batches, logits_of)


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
    la = make(case.model, **full_rank())
    la.fit(case.batches)

    examples = []
    for batch in case.batches:
        inputs = without_labels(batch)
        for row in range(len(batch["labels"])):
            example = rows_of(inputs, slice(row, row + 1))
            examples.append(example)
    model = case.model.eval()
    logits, Js = alone(model, case.logits_of, examples)
    blocks = gradient_blocks(model, Js, softmax_fisher(logits))
    assert_close(la.H.to_matrix(), torch.block_diag(*blocks), **EXACT)

    f_mu, f_var = predicted(la, case.batches)
    assert_close(f_mu, logits, **EXACT)
    assert_close(f_var, block_diagonal_covariance(blocks, Js), **EXACT)

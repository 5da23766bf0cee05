"""With rank >= d only the Kronecker form approximates: dense equality."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
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
    labels_of,
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
    fitted,
    make,
    priors_of_blocks,
    sizes,
    stock,
)

# Many entries of a Kronecker product are near 0, sums of larger ones that cancel.
assert_exact = partial(assert_close, rtol=1e-9, atol=1e-9)
LEAVES_NOTHING_OUT = 100

Batch = dict[str, Any]

# --- dense Kronecker blocks -----------------------------------------------------------


@dataclass(frozen=True)
class Labelled:
    """An example as a batch of one, which positions `(T,)` count, and its label."""

    inputs: Batch
    is_valid: Tensor
    label: Tensor


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
                inputs = as_padded(batch, row)
                is_valid = mask
            else:
                inputs = unpadded(batch, row)
                # All that are left.
                is_valid = mask[mask]
            yield Labelled(inputs, is_valid, label)


@contextmanager
def hooks(
    layers: Sequence[nn.Module],
    of_layers: Sequence[Callable],
) -> Iterator[None]:
    """Register a forward hook on each layer, for a while."""
    with ExitStack() as handles:
        for layer, hook in zip(layers, of_layers, strict=True):
            handle = layer.register_forward_hook(hook)
            handles.callback(handle.remove)
        yield


def shifting(shift: Tensor) -> Callable:
    """Make a hook that adds a shift to a layer's output."""

    def shifted(layer, args, output):
        return output + shift

    return shifted


@dataclass(frozen=True)
class OfLayer:
    """What one example's positions bring to a layer, `(T, n)` and `(C, T, m)`."""

    inputs: Tensor
    gradients: Tensor


def inputs_and_gradients(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
) -> list[OfLayer]:
    """Find each LoRA layer's inputs, and the logits' derivatives in its outputs."""
    layers = [layer for _, layer in lora_layers(model)]
    read: dict[nn.Module, Tensor] = {}
    no_shift: dict[nn.Module, Tensor] = {}

    def record(layer, args, output):
        (batch,) = args
        # A batch of one.
        read[layer] = batch[0].detach()
        no_shift[layer] = torch.zeros_like(output[0])

    with hooks(layers, [record] * len(layers)):
        logits_of(model, inputs)

    # The derivative in a layer's output is that in a shift of it, at 0.
    def logits_after(*shifts):
        of_layers = [shifting(shift) for shift in shifts]
        with hooks(layers, of_layers):
            return logits_of(model, inputs)

    no_shifts = tuple(no_shift[layer] for layer in layers)
    gradients = torch.autograd.functional.jacobian(logits_after, no_shifts)
    of_layers = []
    for layer, in_output in zip(layers, gradients, strict=True):
        of_layer = OfLayer(read[layer], in_output)
        of_layers.append(of_layer)
    return of_layers


def expand_blocks(
    model: nn.Module,
    examples: Sequence[Labelled],
) -> list[Tensor]:
    """Compute dense Kronecker blocks of `kfac_approx="expand"`.

    Each is `(Σ g gᵀ) ⊗ (Σ a aᵀ) / T` over all T positions, with inputs a and gradients
    g of each of the Fisher's columns.
    """
    n_blocks = len(lora_layers(model))
    F_out: list[Any] = [0.0] * n_blocks
    F_in: list[Any] = [0.0] * n_blocks
    n_positions = 0
    for example in examples:
        is_valid = example.is_valid
        logits = logits_of(model, example.inputs)
        fisher = softmax_fisher(logits.detach())
        # H = root rootᵀ, another factor (C, C) than the library's.
        root = power(fisher, 0.5)
        of_layers = inputs_and_gradients(model, example.inputs)
        for index, of_layer in enumerate(of_layers):
            a = of_layer.inputs[is_valid]
            gradients = of_layer.gradients[:, is_valid]
            g = torch.einsum("cs,ctm->stm", root, gradients)
            F_out[index] += torch.einsum("stm,stk->mk", g, g)
            F_in[index] += a.T @ a
        n_positions += int(is_valid.sum())
    blocks = []
    for outputs, inputs in zip(F_out, F_in, strict=True):
        block = torch.kron(outputs, inputs)
        blocks.append(block / n_positions)
    return blocks


@dataclass(frozen=True)
class Dense:
    """Logits, Jacobians `(N, C, parameters)` and the Fisher at each one's logits."""

    logits: Tensor
    Js: Tensor
    fisher: Tensor

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
            J = jacobian(model, example.inputs)
            Js.append(J)
        f = torch.stack(logits)
        return Dense(
            logits=f,
            Js=torch.stack(Js),
            fisher=softmax_fisher(f),
        )


@pytest.mark.parametrize(
    ("kind", "side", "kfac_approx"),
    [
        ("bert", "right", "gradient"),
        ("bert", "left", "expand"),
        ("gpt2", "right", "expand"),
        ("gpt2", "left", "gradient"),
        ("gpt_neox", "right", "gradient"),
        ("gpt_neox", "left", "expand"),
    ],
)
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
    found = la.H.to_matrix()
    assert_exact(found, H)

    n_weights = [len(block) for block in blocks]
    repeats = torch.tensor(n_weights)
    prior = prior_precision.repeat_interleave(repeats)
    covariance = glm_covariance(dense.Js, H, prior)
    f_mu, f_var = predicted(la, batches)
    assert_exact(f_mu, dense.logits)
    assert_exact(f_var, covariance)
    of_jacobians = la.functional_variance(dense.Js)
    assert_exact(of_jacobians, covariance)

    labels = labels_of(batches)
    loss = cross_entropy(dense.logits, labels, reduction="sum")
    weights = lora_weights(model).values()
    mean = nn.utils.parameters_to_vector(weights)
    expected = evidence(H, -loss, mean, prior)
    found = la.log_marginal_likelihood()
    assert_exact(found, expected)


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
    assert_exact(found, expected)
    found = ours.log_marginal_likelihood()
    expected = theirs.log_marginal_likelihood()
    assert_exact(found, expected)
    (batch,) = batches
    # The host's links that need no draws.
    for link_approx in ("probit", "bridge", "bridge_norm"):
        found = ours(batch, link_approx=link_approx)
        expected = theirs(batch, link_approx=link_approx)
        assert_exact(found, expected)


@pytest.mark.parametrize("kind", ["gpt2"])
def test_a_tail_keeps_the_trace_of_each_block_and_its_absence_loses_it(kind):
    model = lora_model(kind).eval()
    batches = ragged_batches()
    examples = list(dense_examples(kind, "right", batches))
    dense = Dense.of(model, examples)
    ggn = exact_ggn(dense.Js, dense.fisher)
    with_tail = fitted(
        model=model,
        kind=kind,
        rank=1,
        tail=True,
    )
    without = fitted(
        model=model,
        kind=kind,
        rank=1,
        tail=False,
    )

    def traces(diagonal: Tensor) -> Tensor:
        of_blocks = diagonal.split(sizes(with_tail))
        sums = [part.sum() for part in of_blocks]
        return torch.stack(sums)

    exact = traces(ggn.diagonal())
    found = traces(with_tail.H.diag())
    assert_exact(found, exact)
    kept = traces(without.H.diag())
    assert (kept < exact).all()


def test_paper_settings_are_those_of_the_paper():
    # Wider than the ten columns that the paper keeps.
    model = lora_model("bert", hidden_size=16)
    settings = laplace_lora_ext.PAPER_SETTINGS
    batches = ragged_batches()
    la = make(model, backend_kwargs=settings)
    la.fit(batches)
    for block in la.H.blocks:
        large = block.large
        assert large.values.shape == (10,)
        assert large.tail == 0
    # KFAC-expand counts positions, "gradient" the energy of gradients.
    masks = [batch["attention_mask"] for batch in batches]
    n_positions = sum(mask.sum() for mask in masks)
    for block in la.H_facs.blocks:
        assert block.normalizer == n_positions


# --- batches that are no rows of tokens -----------------------------------------------


class Prompts(nn.Module):
    """Tokenises prompts, one token a letter, and reads the answer behind them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        texts = []
        masks = []
        for prompt in batch["prompt"]:
            letters = [ord(letter) for letter in prompt]
            tokens = torch.tensor(letters) % VOCABULARY
            texts.append(tokens)
            masks.append(torch.ones_like(tokens))
        ids = pad_sequence(texts, batch_first=True)
        mask = pad_sequence(masks, batch_first=True)
        output = self.model(ids, attention_mask=mask)
        rows = torch.arange(len(ids))
        last = mask.sum(-1) - 1
        at_last = output.logits[rows, last]
        return at_last[:, CLASS_TOKEN_IDS]


def rows_of(
    batch: Mapping[str, Any],
    rows: slice,
) -> Batch:
    """Take some examples of a batch."""
    taken = {}
    for name, column in batch.items():
        taken[name] = column[rows]
    return taken


def batches_of_choices() -> list[Batch]:
    """Make two batches, of three examples and one, with three answers each."""
    n_questions = 4
    n_answers = 3
    (texts,) = ragged_batches(
        lengths=(7, 4, 5, 7, 3, 6) * 2,
        batch_size=n_questions * n_answers,
    )
    shape = (n_questions, n_answers)
    ids = texts["input_ids"].unflatten(0, shape)
    mask = texts["attention_mask"].unflatten(0, shape)
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": texts["labels"][:n_questions],
    }
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
    # Larger than weights begin, so that answers differ; and no B is 0.
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double()


@dataclass(frozen=True)
class Case:
    """A model, its batches, and how it is called with an example."""

    model: nn.Module
    batches: list[Batch]
    logits_of: Callable[[nn.Module, Batch], Tensor]


def of_mapping(
    model: nn.Module,
    example: Batch,
) -> Tensor:
    """Compute `(C,)` logits of one example by a model that takes mappings."""
    return model(example)[0]


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
    model = multiple_choice_model()
    return Case(model, batches_of_choices(), logits_of)


@pytest.mark.parametrize(
    "make_case",
    [
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
    fisher = softmax_fisher(logits)
    blocks = gradient_blocks(model, Js, fisher)
    H = torch.block_diag(*blocks)
    found = la.H.to_matrix()
    assert_exact(found, H)

    f_mu, f_var = predicted(la, case.batches)
    covariances = block_diagonal_covariance(blocks, Js)
    assert_exact(f_mu, logits)
    assert_exact(f_var, covariances)

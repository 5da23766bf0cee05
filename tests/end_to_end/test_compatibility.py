"""Curvature and covariances of many families of models, by each example alone."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from peft import PeftModel
from torch import Tensor, nn

from tests.compatibility.examples import Example, together
from tests.compatibility.families import (
    CLASSIFIER,
    COLUMNS,
    FAMILIES,
    LEFT,
    MISSING,
    NOT_FINITE,
    OWN_PADDING,
    TOKENS,
    Family,
)
from tests.compatibility.tables import tables
from tests.support.dense import (
    alone,
    block_diagonal_covariance,
    full_rank,
    gradient_blocks,
    matrix_places,
    predicted,
    softmax_fisher,
)
from tests.support.models import CLASS_TOKEN_IDS, N_CLASSES
from tests.support.posteriors import make

CASES = [
    pytest.param(family, column, id=f"{name}, {column}")
    for name, family in FAMILIES.items()
    for column in COLUMNS
    if family.outcome(column) != MISSING
]
# Four of the examples are in the first batch, two in the second.
N = 6
N_FIRST = 4
INSTALLED = Version(transformers.__version__)
TELLS_OF_TRANSFORMERS_5 = Version("5") <= INSTALLED
ROOT = Path(__file__).parents[2]


def own_logits(
    model: nn.Module,
    example: Example,
    column: str,
) -> Tensor:
    """Read `(C,)` logits of one example off the model's plain output."""
    if column == CLASSIFIER:
        # The others are wrappers, which take whole mappings.
        takes_keywords = isinstance(model, PeftModel)
        output = model(**example) if takes_keywords else model(example)
        logits = getattr(output, "logits", output)
        return logits[0]
    if model.config.is_encoder_decoder:
        token = model.config.decoder_start_token_id
        start = torch.tensor([[token]])
        example = example | {"decoder_input_ids": start}
    output = model(**example)
    return output.logits[0, -1, CLASS_TOKEN_IDS]


def alone_by_row(
    model: nn.Module,
    examples: list[Example],
    column: str,
) -> tuple[Tensor, Tensor]:
    """Compute logits `(N, C)` and Jacobians `(N, C, parameters)`, of tokens N rows."""
    if column != TOKENS:
        of_column = partial(own_logits, column=column)
        return alone(model, of_column, examples)

    def of_all_tokens(model: nn.Module, example: Example) -> Tensor:
        logits = model(**example).logits
        if "attention_mask" in example:
            is_real = example["attention_mask"].bool()
            logits = logits[is_real]
        return logits.flatten()

    logits = []
    Js = []
    # One by one: examples have as many tokens as they like.
    for example in examples:
        of_example, J = alone(model, of_all_tokens, [example])
        logits.append(of_example.reshape(-1, N_CLASSES))
        # (1, tokens x classes, parameters) to (tokens, classes, parameters)
        Js.append(J.reshape(-1, N_CLASSES, J.shape[-1]))
    return torch.cat(logits), torch.cat(Js)


def examples_of(family: Family) -> list[Example]:
    """Make a family's examples, numbers in the data type of its models."""
    examples = []
    for example in family.examples(N):
        in_dtype = {}
        for key, value in example.items():
            if value.is_floating_point():
                value = value.to(family.dtype)
            in_dtype[key] = value
        examples.append(in_dtype)
    return examples


@dataclass(frozen=True)
class Data:
    """A family's examples, each by itself and in two batches."""

    examples: list[Example]
    batches: list[Example]
    side: str

    def padded(self) -> list[Example]:
        """Make batches of one example each, padded as it is in its batch."""
        first, second = self.batches
        padded = []
        for place, example in enumerate(self.examples):
            batch = first if place < N_FIRST else second
            length = batch["input_ids"].shape[1]
            of_one = together([example], self.side, length)
            padded.append(of_one)
        return padded

    def labelled(self, column: str) -> list[Example]:
        """Label the examples, or all tokens but padding."""
        if column == TOKENS:
            return [with_labels_of_tokens(batch) for batch in self.batches]
        first, second = self.batches
        labels = torch.arange(N) % N_CLASSES
        return [
            first | {"labels": labels[:N_FIRST]},
            second | {"labels": labels[N_FIRST:]},
        ]


def data_of(
    family: Family,
    column: str,
) -> Data:
    """Make examples and batches, padded on the side that the column says."""
    side = "left" if column == LEFT else "right"
    examples = examples_of(family)
    batches = [
        together(examples[:N_FIRST], side),
        together(examples[N_FIRST:], side),
    ]
    return Data(examples, batches, side)


def with_labels_of_tokens(batch: Example) -> Example:
    tokens = batch["input_ids"]
    is_real = batch["attention_mask"].bool()
    # A label of -100 is none.
    labels = torch.where(is_real, tokens % N_CLASSES, -100)
    return batch | {"labels": labels}


def posterior(
    model: nn.Module,
    column: str,
):
    """Make the posterior that a column is about."""
    if column == CLASSIFIER:
        return make(model, **full_rank())
    if column == TOKENS:
        # By default labels of tokens are drawn.
        exactly = full_rank(stochastic=False)
        return make(
            model,
            likelihood="token_classification",
            **exactly,
        )
    return make(
        model,
        class_token_ids=CLASS_TOKEN_IDS,
        **full_rank(),
    )


def apart(
    found: Tensor,
    expected: Tensor,
) -> float:
    """Find the largest difference, relative to the largest number expected."""
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    found = found.double()
    expected = expected.double()
    difference = (found - expected).abs().max()
    largest = expected.abs().max()
    return (difference / largest).item()


def has_finite_gradients(
    model: nn.Module,
    batch: Example,
) -> bool:
    """Back-propagate a batch's loss by plain autograd."""
    model.requires_grad_(True)
    loss = model(**batch).loss
    loss.backward()
    gradients = [weight.grad for weight in model.parameters()]
    return all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not TELLS_OF_TRANSFORMERS_5, reason="tells of transformers 5")
@pytest.mark.parametrize(("family", "column"), CASES)
def test_each_family_has_the_outcome_of_the_table(family: Family, column: str):
    model = family.model(column)
    data = data_of(family, column)
    labelled = data.labelled(column)
    la = posterior(model, column)
    outcome = family.outcome(column)
    if outcome == NOT_FINITE:
        with pytest.raises(ValueError, match=r"batch 1: .* non-finite"):
            la.fit(labelled)
        assert not has_finite_gradients(model, labelled[1])
        return
    la.fit(labelled)
    f_mu, f_var = predicted(la, data.batches)

    logits, Js = alone_by_row(model, data.examples, column)
    if outcome == OWN_PADDING:
        # What the model says of an example depends on its padding.
        assert apart(f_mu, logits) > 0.1
        logits, Js = alone_by_row(model, data.padded(), column)
    logits = logits.double()
    Js = Js.double()
    fisher = softmax_fisher(logits)
    blocks = gradient_blocks(model, Js, fisher)
    H = torch.block_diag(*blocks)
    # The columns of an expert's matrix are not beside each other in `Js`.
    of_matrices = [matrix.flatten() for matrix in matrix_places(model)]
    places = torch.cat(of_matrices)
    covariance = block_diagonal_covariance(blocks, Js[..., places])
    # Of norms that run in float32.
    tolerance = 1e-5 if family.dtype is torch.float64 else 5e-3
    found = la.H.to_matrix()
    assert apart(found, H) < tolerance
    assert apart(f_mu, logits) < tolerance
    assert apart(f_var, covariance) < tolerance


def test_the_tables_are_those_of_the_benchmarks():
    page = ROOT / "benchmarks/results/compatibility.md"
    text = page.read_text(encoding="utf-8")
    for table in tables():
        assert table in text

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
    EXACT,
    FAMILIES,
    LEFT,
    MISSING,
    NOT_FINITE,
    OWN_PADDING,
    TOKENS,
    Family,
)
from tests.compatibility.tables import tables
from tests.support.cases import Case, Dense, dense
from tests.support.dense import full_rank, predicted
from tests.support.models import CLASS_TOKEN_IDS, N_CLASSES
from tests.support.posteriors import make

CASES = [
    pytest.param(family, column, id=f"{name}, {column}")
    for place, (name, family) in enumerate(FAMILIES.items())
    for column in COLUMNS
    if family.outcome(column) != MISSING
    # Labels of tokens take the longest, and the classifiers' path: every second family.
    if column != TOKENS or place % 2 == 0 or family.outcome(column) != EXACT
]
# Four of the examples are in the first batch, two in the second.
N = 6
N_FIRST = 4
INSTALLED = Version(transformers.__version__)
TELLS_OF_TRANSFORMERS_5 = Version("5") <= INSTALLED


def own_logits(model: nn.Module, example: Example, column: str) -> Tensor:
    """Read `(C,)` logits of one example off the model's plain output."""
    if column == CLASSIFIER:
        # The others are wrappers, which take whole mappings.
        takes_keywords = isinstance(model, PeftModel)
        output = model(**example) if takes_keywords else model(example)
        logits = getattr(output, "logits", output)
        return logits[0]
    if model.config.is_encoder_decoder:
        start = torch.tensor([[model.config.decoder_start_token_id]])
        example = example | {"decoder_input_ids": start}
    return model(**example).logits[0, -1, CLASS_TOKEN_IDS]


def of_all_tokens(model: nn.Module, example: Example) -> Tensor:
    """Read `(tokens, C)` logits of one example's real tokens."""
    logits = model(**example).logits
    if "attention_mask" in example:
        return logits[example["attention_mask"].bool()]
    return logits[0]


def dense_of(model: nn.Module, examples: list[Example], column: str) -> Dense:
    """Differentiate the logits of each example alone."""
    is_of_tokens = column == TOKENS
    logits_of = of_all_tokens if is_of_tokens else partial(own_logits, column=column)
    return dense(
        Case(model, examples, split=lambda example: [example], logits_of=logits_of)
    )


def examples_of(family: Family) -> list[Example]:
    """Make a family's examples, numbers in the data type of its models."""
    return [
        {
            key: value.to(family.dtype) if value.is_floating_point() else value
            for key, value in example.items()
        }
        for example in family.examples(N)
    ]


@dataclass(frozen=True)
class Data:
    """A family's examples, each by itself and in two batches."""

    examples: list[Example]
    batches: list[Example]
    side: str

    def padded(self) -> list[Example]:
        """Make batches of one example each, padded as it is in its batch."""
        first, second = self.batches
        lengths = [first["input_ids"].shape[1]] * N_FIRST
        lengths += [second["input_ids"].shape[1]] * (N - N_FIRST)
        return [
            together([example], self.side, length)
            for example, length in zip(self.examples, lengths, strict=True)
        ]

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


def data_of(family: Family, column: str) -> Data:
    """Make examples and batches, padded on the side that the column says."""
    side = "left" if column == LEFT else "right"
    examples = examples_of(family)
    batches = [
        together(part, side) for part in (examples[:N_FIRST], examples[N_FIRST:])
    ]
    return Data(examples, batches, side)


def with_labels_of_tokens(batch: Example) -> Example:
    tokens = batch["input_ids"]
    is_real = batch["attention_mask"].bool()
    # A label of -100 is none.
    labels = torch.where(is_real, tokens % N_CLASSES, -100)
    return batch | {"labels": labels}


def posterior(model: nn.Module, column: str):
    """Make the posterior that a column is about."""
    if column == CLASSIFIER:
        return make(model, **full_rank())
    if column == TOKENS:
        # By default labels of tokens are drawn.
        exactly = full_rank(stochastic=False)
        return make(model, likelihood="token_classification", **exactly)
    return make(model, class_token_ids=CLASS_TOKEN_IDS, **full_rank())


def apart(found: Tensor, expected: Tensor) -> float:
    """Find the largest difference, relative to the largest number expected."""
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    difference = (found.double() - expected.double()).abs().max()
    return (difference / expected.abs().max()).item()


def has_finite_gradients(model: nn.Module, batch: Example) -> bool:
    """Back-propagate a batch's loss by plain autograd."""
    model.requires_grad_(True)
    model(**batch).loss.backward()
    return all(weight.grad.isfinite().all() for weight in model.parameters())


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

    expected = dense_of(model, data.examples, column)
    if outcome == OWN_PADDING:
        # What the model says of an example depends on its padding.
        assert apart(f_mu, expected.logits) > 0.1
        expected = dense_of(model, data.padded(), column)
    H = expected.curvature("lowrank_kron")
    # Of norms that run in float32.
    tolerance = 1e-5 if family.dtype is torch.float64 else 5e-3
    assert apart(la.H.to_matrix(), H) < tolerance
    assert apart(f_mu, expected.logits) < tolerance
    assert apart(f_var, expected.posterior(H, torch.ones(1)).f_var) < tolerance


def test_the_tables_are_those_of_the_benchmarks():
    page = Path(__file__).parents[2] / "benchmarks/results/compatibility.md"
    text = page.read_text(encoding="utf-8")
    assert all(table in text for table in tables())

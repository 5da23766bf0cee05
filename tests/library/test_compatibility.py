"""Curvature and covariances of many families of models, by each example alone."""

from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from peft import PeftModel
from torch import nn

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
    gradient_blocks,
    matrix_places,
    softmax_fisher,
)
from tests.support.models import CLASS_TOKEN_IDS
from tests.support.posteriors import make

CASES = [
    pytest.param(family, column, id=f"{name}, {column}")
    for name, family in FAMILIES.items()
    for column in COLUMNS
    if family.outcome(column) != MISSING
]
N_FIRST = 4  # examples of the first batch
N = 6  # examples of both batches
TELLS_OF_TRANSFORMERS_5 = Version(transformers.__version__) >= Version("5")


def own_logits(
    model: nn.Module,
    example: Example,
    column: str,
) -> torch.Tensor:
    """Read `(C,)` logits of one example off the model's plain output."""
    if column == CLASSIFIER:
        output = model(**example) if isinstance(model, PeftModel) else model(example)
        return getattr(output, "logits", output)[0]
    if model.config.is_encoder_decoder:
        start = torch.full((1, 1), model.config.decoder_start_token_id)
        example = example | {"decoder_input_ids": start}
    return model(**example).logits[0, -1, CLASS_TOKEN_IDS]


def alone_by_row(
    model: nn.Module,
    examples: list[Example],
    column: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute logits `(N, C)` and Jacobians `(N, C, parameters)`, of tokens N rows."""
    if column != TOKENS:
        return alone(model, partial(own_logits, column=column), examples)

    def of_all_tokens(model: nn.Module, example: Example) -> torch.Tensor:
        mask = example.get("attention_mask", torch.ones_like(example["input_ids"]))
        return model(**example).logits[mask.bool()].flatten()

    logits = []
    Js = []
    for example in examples:
        of_example, J = alone(model, of_all_tokens, [example])
        logits.append(of_example.reshape(-1, 3))
        Js.append(J.reshape(-1, 3, J.shape[-1]))
    return torch.cat(logits), torch.cat(Js)


def examples_of(family: Family) -> list[Example]:
    """Make a family's examples, numbers in the data type of its models."""
    examples = []
    for example in family.examples(N):
        in_dtype = {}
        for key, value in example.items():
            in_dtype[key] = (
                value.to(family.dtype) if value.is_floating_point() else value
            )
        examples.append(in_dtype)
    return examples


def padded_alone(
    examples: list[Example],
    side: str,
    batch: Example,
) -> list[Example]:
    """Make batches of one example each, padded as they are in a batch."""
    length = batch["input_ids"].shape[1]
    return [together([example], side, length) for example in examples]


def labels_tokens(batch: Example) -> Example:
    """Label all tokens of a batch but padding."""
    tokens = batch["input_ids"]
    is_real = batch["attention_mask"].bool()
    return batch | {"labels": torch.where(is_real, tokens % 3, -100)}


def apart(
    found: torch.Tensor,
    expected: torch.Tensor,
) -> float:
    """Find the largest difference, relative to the largest number expected."""
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not TELLS_OF_TRANSFORMERS_5, reason="tells of transformers 5")
@pytest.mark.parametrize(("family", "column"), CASES)
def test_each_family_has_the_outcome_of_the_table(family: Family, column: str):
    model = family.model(column)
    side = "left" if column == LEFT else "right"
    examples = examples_of(family)
    first = together(examples[:N_FIRST], side)
    second = together(examples[N_FIRST:], side)
    outcome = family.outcome(column)
    options = {"rank": 1000}
    if column == TOKENS:
        data = [labels_tokens(first), labels_tokens(second)]
        exactly = {**options, "stochastic": False}
        la = make(model, likelihood="token_classification", backend_kwargs=exactly)
    else:
        labels = torch.arange(N) % 3
        data = [
            first | {"labels": labels[:N_FIRST]},
            second | {"labels": labels[N_FIRST:]},
        ]
        answers = {} if column == CLASSIFIER else {"class_token_ids": CLASS_TOKEN_IDS}
        la = make(model, backend_kwargs=options, **answers)
    if outcome == NOT_FINITE:
        with pytest.raises(ValueError, match=r"batch 1: .* non-finite"):
            la.fit(data)
        model.requires_grad_(True)
        model(**data[1]).loss.backward()
        assert not all(weight.grad.isfinite().all() for weight in model.parameters())
        return
    la.fit(data)
    moments = [la.predictive_moments(batch) for batch in (first, second)]
    f_mu = torch.cat([of_batch.f_mu for of_batch in moments]).double()
    f_var = torch.cat([of_batch.f_var for of_batch in moments]).double()

    expected, Js = alone_by_row(model, examples, column)
    if outcome == OWN_PADDING:
        assert apart(f_mu, expected.double()) > 0.1
        padded = padded_alone(examples[:N_FIRST], side, first)
        padded += padded_alone(examples[N_FIRST:], side, second)
        expected, Js = alone_by_row(model, padded, column)
    expected = expected.double()
    Js = Js.double()
    blocks = gradient_blocks(model, Js, softmax_fisher(expected))
    H = torch.block_diag(*blocks)
    places = torch.cat([matrix.flatten() for matrix in matrix_places(model)])
    covariance = block_diagonal_covariance(blocks, Js[..., places])
    # Of norms that run in float32.
    tolerance = 1e-5 if family.dtype is torch.float64 else 5e-3
    assert apart(f_mu, expected) < tolerance
    assert apart(la.H.to_matrix().double(), H) < tolerance
    assert apart(f_var, covariance) < tolerance


def test_the_tables_are_those_of_the_benchmarks():
    page = Path(__file__).parents[2] / "benchmarks" / "results" / "compatibility.md"
    text = page.read_text(encoding="utf-8")
    assert all(table in text for table in tables())

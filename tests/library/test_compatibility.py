"""Curvature and covariances of many families of models, by each example alone."""

from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from peft import PeftModel
from torch import nn

from tests.compatibility.examples import Example, together
from tests.compatibility.families import (
    CLASSIFIER,
    COLUMNS,
    FAMILIES,
    LEFT,
    MISSING,
    OWN_PADDING,
    REFUSALS,
    Family,
)
from tests.compatibility.tables import tables
from tests.support.dense import alone, block_diagonal_covariance, gradient_blocks, softmax_fisher
from tests.support.models import CLASS_TOKEN_IDS
from tests.support.posteriors import make

CASES = [
    pytest.param(family, column, id=f"{name}, {column}")
    for name, family in FAMILIES.items()
    for column in COLUMNS
    if family.outcome(column) != MISSING
]
N_FIRST = 4
N = 6  # examples of the first batch, and of both


def own_logits(model: nn.Module, example: Example, column: str) -> torch.Tensor:
    """`(C,)` of one example, from the model's plain output."""
    if column == CLASSIFIER:
        output = model(**example) if isinstance(model, PeftModel) else model(example)
        return getattr(output, "logits", output)[0]
    if model.config.is_encoder_decoder:
        start = torch.full((1, 1), model.config.decoder_start_token_id)
        example = example | {"decoder_input_ids": start}
    return model(**example).logits[0, -1, CLASS_TOKEN_IDS]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="tells of transformers 5"
)
@pytest.mark.parametrize(("family", "column"), CASES)
def test_each_family_has_the_outcome_of_the_table(family: Family, column: str):
    model = family.model(column)
    side = "left" if column == LEFT else "right"
    examples = [
        {k: v.to(family.dtype) if v.is_floating_point() else v for k, v in example.items()}
        for example in family.examples(N)
    ]
    batches = [together(examples[:N_FIRST], side), together(examples[N_FIRST:], side)]
    labels = torch.arange(N) % 3
    data = [
        batch | {"labels": of_batch}
        for batch, of_batch in zip(batches, labels.split(N_FIRST), strict=True)
    ]
    answers = {} if column == CLASSIFIER else {"class_token_ids": CLASS_TOKEN_IDS}
    outcome = family.outcome(column)
    if outcome in REFUSALS:
        with pytest.raises(NotImplementedError, match=REFUSALS[outcome]):
            make(model, **answers).fit(data)
        return
    la = make(model, backend_kwargs={"rank": 1000}, **answers)
    la.fit(data)
    moments = [la.predictive_moments(batch) for batch in batches]
    f_mu, f_var = (torch.cat(parts).double() for parts in zip(*moments, strict=True))

    tolerance = 1e-5 if family.dtype is torch.float64 else 5e-3  # of norms that run in float32
    own = partial(own_logits, column=column)
    expected, Js = (part.double() for part in alone(model, own, examples))
    if outcome == OWN_PADDING:
        assert apart(f_mu, expected) > 0.1
        padded = [
            together([example], side, batch["input_ids"].shape[1])
            for batch, part in zip(batches, (examples[:N_FIRST], examples[N_FIRST:]), strict=True)
            for example in part
        ]
        expected, Js = (part.double() for part in alone(model, own, padded))
    assert apart(f_mu, expected) < tolerance
    blocks = gradient_blocks(model, Js, softmax_fisher(expected))
    assert apart(la.H.to_matrix().double(), torch.block_diag(*blocks)) < tolerance
    assert apart(f_var, block_diagonal_covariance(blocks, Js)) < tolerance


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest number expected."""
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    return ((found - expected).abs().max() / expected.abs().max()).item()


def test_the_tables_are_those_of_the_benchmarks():
    page = Path(__file__).parents[2] / "benchmarks" / "results" / "compatibility.md"
    text = page.read_text(encoding="utf-8")
    assert all(table in text for table in tables())

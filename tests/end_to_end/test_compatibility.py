"""Families of models, adapters, wrappers and precisions have the tables' outcomes."""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from torch import Tensor, distributed, nn
from torch.testing import assert_close

from laplace_lora_ext.models.running import Tree, keep_derivatives
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
from tests.compatibility.kinds import (
    ADAPTERS,
    BOUNDS,
    PRECISIONS,
    QUANTIZERS,
    WRAPPERS,
    Kind,
)
from tests.compatibility.tables import tables
from tests.support.cases import (
    Case,
    assert_dense,
    assert_exact,
    assert_near,
    dense,
    rows_of,
)
from tests.support.dense import full_rank, logits_of, predicted
from tests.support.models import (
    CLASS_TOKEN_IDS,
    N_CLASSES,
    base_model,
    lora_model,
    ragged_batches,
    without_labels,
)
from tests.support.posteriors import make, normal

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_tables_are_those_of_the_benchmarks():
    page = Path(__file__).parents[2] / "benchmarks/results/compatibility.md"
    text = page.read_text(encoding="utf-8")
    assert all(table in text for table in tables())


# --- families -------------------------------------------------------------------------

OF_FAMILIES = [
    (name, column)
    for place, (name, family) in enumerate(FAMILIES.items())
    for column in COLUMNS
    if family.outcome(column) != MISSING
    # Labels of tokens take the longest, and the classifiers' path: every second family.
    if column != TOKENS or place % 2 == 0 or family.outcome(column) != EXACT
]
# Whose rows are not each example's own: every example takes a pass by itself.
ONE_BY_ONE = [
    "CLIP, texts as classes",
    "DeBERTa-v2",
    "DeBERTa-v3",
    "DeepSeek-V3",
    "LLaVA",
    "Longformer",
    "Mixtral",
    "Qwen2.5-VL",
    "Qwen3-MoE",
    "XLNet",
]
# Four of the examples are in the first batch, two in the second.
N = 6
N_FIRST = 4


def own_logits(model: nn.Module, example: Example, column: str) -> Tensor:
    """Read `(C,)` or `(tokens, C)` logits of one example off the plain output."""
    if column == TOKENS:
        return model(**example).logits[0]
    if column != CLASSIFIER and model.config.is_encoder_decoder:
        start = torch.tensor([[model.config.decoder_start_token_id]])
        example = example | {"decoder_input_ids": start}
    return logits_of(model, example)


KEYWORDS = {CLASSIFIER: {}, TOKENS: {"likelihood": "token_classification"}}


def case_of(family: Family, column: str) -> Case:
    """Make a family's model and examples, in batches and each by itself."""
    examples = [
        {
            key: value.to(family.dtype) if value.is_floating_point() else value
            for key, value in example.items()
        }
        for example in family.examples(N)
    ]
    parts = examples[:N_FIRST], examples[N_FIRST:]
    batches = []
    for part, labels in zip(parts, torch.arange(N).split(N_FIRST), strict=True):
        batch = together(part, "left" if column == LEFT else "right")
        if column == TOKENS:
            # All tokens but padding have a label.
            is_real = batch["attention_mask"].bool()
            labels = batch["input_ids"].masked_fill(~is_real, -100)
        labels = torch.where(labels < 0, labels, labels % N_CLASSES)
        batches.append(batch | {"labels": labels})
    return Case(
        family.model(column),
        batches,
        KEYWORDS.get(column, {"class_token_ids": CLASS_TOKEN_IDS}),
        split=lambda batch: parts[batch is batches[1]],
        logits_of=partial(own_logits, column=column),
        # Of norms that run in float32.
        tolerance=1e-5 if family.dtype is torch.float64 else 5e-3,
    )


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5"), reason="tells of transformers 5"
)
@pytest.mark.parametrize(("name", "column"), OF_FAMILIES)
def test_each_family_has_the_outcome_of_the_table(name: str, column: str):
    family = FAMILIES[name]
    case = case_of(family, column)
    outcome = family.outcome(column)
    if outcome == NOT_FINITE:
        with pytest.raises(ValueError, match=r"batch 1: .* non-finite"):
            case.fitted()
        return
    la = case.fitted()
    assert la.recorder.taps.examples_apart == (name in ONE_BY_ONE)
    fit = dense(case)
    if outcome == OWN_PADDING:
        # What the model says of an example depends on its padding.
        f_mu, _ = predicted(la, case.batches)
        assert (f_mu - fit.logits).abs().max() > 0.1 * fit.logits.abs().max()
        fit = dense(Case(**vars(case) | {"split": rows_of}))
    assert_dense(la, fit, fit.curvature("lowrank_kron"))


# --- adapters and wrappers ------------------------------------------------------------


def made(kind: Kind) -> nn.Module:
    """Make the model, or skip where this PEFT or torch has no such kind."""
    try:
        return kind.model()
    except ImportError as error:
        pytest.skip(f"this torch: {error}")
    except (AttributeError, TypeError, ValueError) as error:
        # From here on PEFT has all of them: such an error is a fault.
        if Version(peft.__version__) >= Version("0.21"):
            raise
        pytest.skip(f"this PEFT: {error}")


@pytest.mark.parametrize(
    ("name", "structure"),
    [*((name, "lowrank_kron") for name in ADAPTERS), ("DoRA", "diag")],
)
def test_each_kind_of_adapter(name: str, structure: str):
    kind = ADAPTERS[name]
    model = made(kind)
    if kind.refusal:
        with pytest.raises((ValueError, NotImplementedError), match=kind.refusal):
            make(model, structure)
        # There is no posterior to compare.
        return
    # DoRA's identity of `lora_A` has five rows, too, and must not count as an example.
    batches = [(normal(n, 5, seed=n), torch.arange(n) % 3) for n in (5, 1, 4)]
    la = make(model, structure, **full_rank(structure))
    la.fit(batches)
    assert_exact(la, batches)


@pytest.fixture
def process_group() -> Iterator[None]:
    """Begin a group of this process alone, for wrappers that ask for one."""
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", WRAPPERS)
def test_each_wrapper(name: str):
    kind = WRAPPERS[name]
    model = made(kind)
    if kind.refusal:
        with pytest.raises(NotImplementedError, match=kind.refusal):
            make(model)
        return
    # A wrapper must change nothing: what is expected is the model without it.
    case = Case(lora_model("bert").eval(), ragged_batches())
    fit = dense(case)
    assert_dense(Case(model, case.batches).fitted(), fit, fit.curvature("lowrank_kron"))


# --- precisions -----------------------------------------------------------------------


def covariances(model: nn.Module, autocast: torch.dtype | None = None) -> Tensor:
    """Fit a posterior, perhaps under autocast, and find covariances of its logits."""
    case = Case(model, ragged_batches())
    with torch.autocast("cpu", autocast) if autocast else nullcontext():
        try:
            la = case.fitted()
        except RuntimeError as error:
            # Older ones lack kernels of some data types.
            pytest.skip(f"this torch: {error}")
        return la.predictive_moments(case.batches[0]).f_var


@pytest.mark.parametrize("name", PRECISIONS)
def test_each_precision(name: str):
    precision = PRECISIONS[name]
    rounded = lora_model("bert").to(precision.base)
    for parameter_name, parameter in rounded.named_parameters():
        if ".lora_" in parameter_name:
            parameter.data = parameter.data.to(precision.lora)
    # The same rounded weights, with which float64 computes.
    expected = covariances(copy.deepcopy(rounded).double())
    found = covariances(rounded, precision.autocast)
    # Half precision is not enough for what is summed.
    assert found.dtype is torch.promote_types(precision.lora, torch.float32)
    # Relative to the largest number, which small ones are rounded like.
    assert_near(found, expected, precision.bound)


# --- quantized bases: curvature is that of the quantized model's gradients ------------


def quantized(name: str, dtype: torch.dtype) -> Case:
    """Make an encoder with LoRA beside quantized layers."""
    torch.manual_seed(0)
    quantize = QUANTIZERS[name]
    base = base_model("bert", hidden_size=64).to(dtype)
    for layer in base.bert.encoder.layer:
        attention = layer.attention.self
        attention.query = quantize(attention.query, dtype)
        attention.value = quantize(attention.value, dtype)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["query", "value"]))
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name or "classifier" in parameter_name:
            nn.init.normal_(parameter, std=0.4)
    return Case(model.eval(), ragged_batches())


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_posterior_of_a_quantized_base(name, dtype):
    case = quantized(name, dtype)
    f_mu, f_var = predicted(case.fitted(), case.batches)
    # Of the reference, too.
    keep_derivatives(Tree(case.model))
    fit = dense(case)
    expected = fit.posterior(fit.curvature("lowrank_kron"), torch.ones(1))
    # By one error for all numbers: small ones are rounded like large ones.
    assert_near(f_mu, fit.logits, BOUNDS[dtype])
    assert_near(f_var, expected.f_var, BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS)
def test_evaluating_a_four_bit_base_changes_no_gradient(dtype):
    case = quantized("bitsandbytes nf4", dtype)
    inputs = without_labels(case.batches[0])

    def evaluate() -> None:
        # On some CPUs this packs the weights for an operation without a derivative, and
        # rounds their scales the first time.
        with torch.no_grad():
            case.model(**inputs)

    evaluate()
    la = case.fitted()
    expected = la.predictive_moments(inputs)
    evidence = la.log_marginal_likelihood()
    # Without a derivative nothing would be in doubt, before as after.
    assert expected.f_var.diagonal(dim1=1, dim2=2).min() > 0
    evaluate()
    assert_close(tuple(la.predictive_moments(inputs)), tuple(expected))
    evaluate()
    la.fit(case.batches)
    assert_close(la.log_marginal_likelihood(), evidence, rtol=1e-5, atol=0)

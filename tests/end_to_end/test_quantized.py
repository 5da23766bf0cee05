"""Quantized bases: curvature is that of the quantized model's gradients."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_lora_ext.models.running import keep_derivatives
from tests.compatibility.quantizers import BOUNDS, QUANTIZERS
from tests.support.dense import (
    alone,
    as_padded,
    block_diagonal_covariance,
    full_rank,
    gradient_blocks,
    logits_of,
    softmax_fisher,
)
from tests.support.models import base_model, ragged_batches, without_labels
from tests.support.posteriors import make


def quantized(
    name: str,
    dtype: torch.dtype,
) -> nn.Module:
    """Make an encoder with LoRA beside quantized layers."""
    torch.manual_seed(0)
    quantize = QUANTIZERS[name]()
    base = base_model("bert", hidden_size=64).to(dtype)
    for layer in base.bert.encoder.layer:
        attention = layer.attention.self
        attention.query = quantize(attention.query, dtype)
        attention.value = quantize(attention.value, dtype)
    config = LoraConfig(r=2, target_modules=["query", "value"])
    model = get_peft_model(base, config)
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            nn.init.normal_(parameter, std=0.3)
        elif "classifier" in parameter_name:
            nn.init.normal_(parameter, std=0.5)
    return model.eval()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_posterior_of_a_quantized_base(name, dtype):
    model = quantized(name, dtype)
    batches = ragged_batches()
    la = make(model, **full_rank())
    la.fit(batches)
    first, *_ = batches
    found = la.predictive_moments(first)
    f_mu = found.f_mu.double()
    f_var = found.f_var.double()

    # Of the reference, too.
    keep_derivatives(model.modules())
    examples = []
    for batch in batches:
        for row in range(len(batch["labels"])):
            examples.append(as_padded(batch, row))
    logits, Js = alone(model, logits_of, examples)
    logits = logits.double()
    Js = Js.double()
    fisher = softmax_fisher(logits)
    blocks = gradient_blocks(model, Js, fisher)
    n = len(f_mu)
    covariance = block_diagonal_covariance(blocks, Js[:n])
    bound = BOUNDS[dtype]
    assert_near(f_mu, logits[:n], bound * largest_of(logits))
    assert_near(f_var, covariance, bound * largest_of(covariance))


def largest_of(numbers: Tensor) -> Tensor:
    return numbers.abs().max()


def assert_near(
    found: Tensor,
    expected: Tensor,
    error: Tensor,
) -> None:
    """Compare by one error for all numbers: small ones are rounded like large ones."""
    assert largest_of(found - expected) <= error


@pytest.mark.parametrize("dtype", BOUNDS)
def test_evaluating_a_four_bit_base_changes_no_gradient(dtype):
    model = quantized("bitsandbytes nf4", dtype)
    batches = ragged_batches()
    first, *_ = batches

    inputs = without_labels(first)

    def evaluate() -> None:
        # On some CPUs this packs the weights for an operation without a derivative, and
        # rounds their scales the first time.
        with torch.no_grad():
            model(**inputs)

    evaluate()
    la = make(model)
    la.fit(batches)
    expected = la.predictive_moments(first)
    evidence = la.log_marginal_likelihood()
    # Without a derivative nothing would be in doubt, before as after.
    variances = expected.f_var.diagonal(dim1=1, dim2=2)
    assert variances.min() > 0
    evaluate()
    found = la.predictive_moments(first)
    assert_close(found, expected)
    evaluate()
    la.fit(batches)
    found = la.log_marginal_likelihood()
    assert_close(found, evidence, rtol=1e-5, atol=0)

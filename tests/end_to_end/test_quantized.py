"""Quantized bases: curvature is that of the quantized model's gradients."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.testing import assert_close

from laplace_lora_ext.models.tree import Tree, keep_derivatives
from tests.compatibility.kinds import BOUNDS, QUANTIZERS
from tests.support.cases import Case, assert_near, dense
from tests.support.dense import full_rank
from tests.support.models import base_model, ragged_batches, without_labels
from tests.support.posteriors import make


def quantized(name: str, dtype: torch.dtype) -> nn.Module:
    """Make an encoder with LoRA beside quantized layers."""
    torch.manual_seed(0)
    quantize = QUANTIZERS[name]()
    base = base_model("bert", hidden_size=64).to(dtype)
    for layer in base.bert.encoder.layer:
        attention = layer.attention.self
        attention.query = quantize(attention.query, dtype)
        attention.value = quantize(attention.value, dtype)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["query", "value"]))
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
    found = la.predictive_moments(batches[0])

    # Of the reference, too.
    keep_derivatives(Tree(model))
    fit = dense(Case(model, batches))
    f_var = fit.posterior(fit.curvature("lowrank_kron"), torch.ones(1)).f_var
    n = len(found.f_mu)
    # By one error for all numbers: small ones are rounded like large ones.
    assert_near(found.f_mu.double(), fit.logits[:n], BOUNDS[dtype])
    assert_near(found.f_var.double(), f_var[:n], BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS)
def test_evaluating_a_four_bit_base_changes_no_gradient(dtype):
    model = quantized("bitsandbytes nf4", dtype)
    batches = ragged_batches()
    inputs = without_labels(batches[0])

    def evaluate() -> None:
        # On some CPUs this packs the weights for an operation without a derivative, and
        # rounds their scales the first time.
        with torch.no_grad():
            model(**inputs)

    evaluate()
    la = make(model)
    la.fit(batches)
    expected = la.predictive_moments(inputs)
    evidence = la.log_marginal_likelihood()
    # Without a derivative nothing would be in doubt, before as after.
    assert expected.f_var.diagonal(dim1=1, dim2=2).min() > 0
    evaluate()
    assert_close(la.predictive_moments(inputs), expected)
    evaluate()
    la.fit(batches)
    assert_close(la.log_marginal_likelihood(), evidence, rtol=1e-5, atol=0)

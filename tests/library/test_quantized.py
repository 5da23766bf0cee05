"""Quantized bases: the posterior is that of a dense base with the dequantized weights."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.support.models import base_model, ragged_batches
from tests.support.posteriors import make
from tests.support.quantizers import BOUNDS, QUANTIZERS


def bases(quantize: Callable, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """A quantized encoder, and a dense one with the weights that it stands for."""
    torch.manual_seed(0)
    quantized = base_model("bert", hidden_size=64).to(dtype)
    dense = copy.deepcopy(quantized)
    for layer, dense_layer in zip(
        quantized.bert.encoder.layer, dense.bert.encoder.layer, strict=True
    ):
        for name in ("query", "value"):
            attention = layer.attention.self
            new, weight = quantize(getattr(attention, name), dtype)
            setattr(attention, name, new)
            getattr(dense_layer.attention.self, name).weight.data = weight.to(dtype)
    return quantized, dense


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_posterior_of_a_quantized_base(name, dtype):
    quantize = QUANTIZERS[name]()
    batches = ragged_batches()
    moments = []
    for base in bases(quantize, dtype):
        torch.manual_seed(1)
        model = get_peft_model(base, LoraConfig(r=2, target_modules=["query", "value"]))
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                nn.init.normal_(parameter, std=0.3)
            elif "classifier" in parameter_name:
                nn.init.normal_(parameter, std=0.5)
        la = make(model)
        la.fit(batches)
        moments.append(la.predictive_moments(batches[0]))
    (f_mu, f_var), (expected_mu, expected_var) = moments
    assert (f_mu - expected_mu).abs().max() <= BOUNDS[dtype] * expected_mu.abs().max()
    assert (f_var - expected_var).abs().max() <= BOUNDS[dtype] * expected_var.abs().max()

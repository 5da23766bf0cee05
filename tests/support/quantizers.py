"""Ways to quantize a linear layer, each skipped where its package is missing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

# Of the largest number: twice what was measured with bitsandbytes 0.50, whose kernels on a CPU
# round otherwise than its dequantized weights (8e-5, 6.5e-3). The others are at 2e-7 in float32.
BOUNDS = {torch.float32: 1.6e-4, torch.bfloat16: 1.3e-2}


def bitsandbytes(bits: int) -> Callable[[nn.Linear, torch.dtype], tuple[nn.Module, torch.Tensor]]:
    """Quantizes a layer, and gives the weight that it stands for."""
    bnb = pytest.importorskip("bitsandbytes")

    def quantize(layer: nn.Linear, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
        sizes = layer.in_features, layer.out_features
        if bits == 4:
            new = bnb.nn.Linear4bit(*sizes, compute_dtype=dtype, quant_type="nf4")
            new.weight = bnb.nn.Params4bit(layer.weight.data, quant_type="nf4", module=new)
        else:
            new = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=0.0)
            new.weight = bnb.nn.Int8Params(
                layer.weight.data, requires_grad=False, has_fp16_weights=False
            )
        new.bias = layer.bias
        new = new.to("cpu")
        if bits == 4:
            return new, bnb.functional.dequantize_4bit(new.weight.data, new.weight.quant_state)
        scale = new.weight.SCB[:, None] / 127
        return new, (new.weight.CB * scale).to(layer.weight.dtype)

    return quantize


def torchao() -> Callable[[nn.Linear, torch.dtype], tuple[nn.Module, torch.Tensor]]:
    quantization = pytest.importorskip("torchao.quantization")

    def quantize(layer: nn.Linear, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
        new = nn.Sequential(copy.deepcopy(layer))
        quantization.quantize_(new, quantization.Int8WeightOnlyConfig())
        weight: Any = new[0].weight
        return new[0], weight.dequantize()

    return quantize


def quanto() -> Callable[[nn.Linear, torch.dtype], tuple[nn.Module, torch.Tensor]]:
    package = pytest.importorskip("optimum.quanto")

    def quantize(layer: nn.Linear, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
        new = package.QLinear.from_module(layer, weights=package.qint8)
        new.freeze()
        return new, new.weight.dequantize()

    return quantize


QUANTIZERS = {
    "bitsandbytes nf4": lambda: bitsandbytes(4),
    "bitsandbytes int8": lambda: bitsandbytes(8),
    "torchao int8": torchao,
    "quanto int8": quanto,
}

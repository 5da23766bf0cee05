"""Ways to quantize a linear layer, each skipped where its package is missing."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

Quantize = Callable[[nn.Linear, torch.dtype], nn.Module]

# Of the largest number; up to 4e-7 and 1.1e-3 were measured.
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 3e-3}


def bitsandbytes(bits: int) -> Quantize:
    bnb = pytest.importorskip("bitsandbytes")

    def quantize(layer: nn.Linear, dtype: torch.dtype) -> nn.Module:
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
        return new.to("cpu")

    return quantize


def torchao() -> Quantize:
    quantization = pytest.importorskip("torchao.quantization")

    def quantize(layer: nn.Linear, dtype: torch.dtype) -> nn.Module:
        new = nn.Sequential(copy.deepcopy(layer))
        quantization.quantize_(new, quantization.Int8WeightOnlyConfig())
        return new[0]

    return quantize


def quanto() -> Quantize:
    package = pytest.importorskip("optimum.quanto")

    def quantize(layer: nn.Linear, dtype: torch.dtype) -> nn.Module:
        new = package.QLinear.from_module(layer, weights=package.qint8)
        new.freeze()
        return new

    return quantize


QUANTIZERS = {
    "bitsandbytes nf4": lambda: bitsandbytes(4),
    "bitsandbytes int8": lambda: bitsandbytes(8),
    "torchao int8": torchao,
    "quanto int8": quanto,
}

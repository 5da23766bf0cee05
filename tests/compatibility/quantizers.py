"""Ways to quantize a linear layer, each skipped where its package is missing."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

Quantize = Callable[[nn.Linear, torch.dtype], nn.Module]

# Of the largest number; up to 4e-7 and 1.1e-3 were measured.
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 3e-3}


def bitsandbytes(bits: int) -> Quantize:
    bnb = pytest.importorskip("bitsandbytes")

    def in_four_bits(layer: nn.Linear, dtype: torch.dtype) -> nn.Module:
        new = bnb.nn.Linear4bit(
            layer.in_features, layer.out_features, compute_dtype=dtype, quant_type="nf4"
        )
        new.weight = bnb.nn.Params4bit(layer.weight.data, quant_type="nf4", module=new)
        return new

    def in_eight_bits(layer: nn.Linear) -> nn.Module:
        new = bnb.nn.Linear8bitLt(
            layer.in_features,
            layer.out_features,
            has_fp16_weights=False,
            # No column is left out as an outlier.
            threshold=0.0,
        )
        new.weight = bnb.nn.Int8Params(
            layer.weight.data, requires_grad=False, has_fp16_weights=False
        )
        return new

    def quantize(layer: nn.Linear, dtype: torch.dtype) -> nn.Module:
        new = in_four_bits(layer, dtype) if bits == 4 else in_eight_bits(layer)
        new.bias = layer.bias
        # The move is what quantizes it.
        return new.to("cpu")

    return quantize


def torchao() -> Quantize:
    quantization = pytest.importorskip("torchao.quantization")

    def quantize(layer: nn.Linear, dtype: torch.dtype) -> nn.Module:
        # It replaces layers within a module, and not the module itself.
        new = nn.Sequential(copy.deepcopy(layer))
        quantization.quantize_(new, quantization.Int8WeightOnlyConfig())
        return new[0]

    return quantize


def quanto() -> Quantize:
    package = pytest.importorskip("optimum.quanto")

    def quantize(layer: nn.Linear, dtype: torch.dtype) -> nn.Module:
        new = package.QLinear.from_module(layer, weights=package.qint8)
        # Until then its weight is quantized anew at each pass.
        new.freeze()
        return new

    return quantize


QUANTIZERS = {
    "bitsandbytes nf4": partial(bitsandbytes, 4),
    "bitsandbytes int8": partial(bitsandbytes, 8),
    "torchao int8": torchao,
    "quanto int8": quanto,
}

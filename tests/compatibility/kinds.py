"""Kinds of adapters, precisions and wrappers, and what becomes of them."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import accelerate
import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import OfBatches, TwoLinear, lora_model, plain_model

EXACT = "exact"


@dataclass(frozen=True)
class Kind:
    """A model, and what is expected of it; `refusal` matches an error.

    An older PEFT or torch, which has no such thing, raises `ValueError` or
    `AttributeError`.
    """

    model: Callable[[], nn.Module]
    outcome: str = EXACT
    refusal: str = ""


# --- adapters -------------------------------------------------------------------------


def with_dora() -> nn.Module:
    """Use DoRA, with other magnitudes than the norms that they begin with."""
    model = plain_model(use_dora=True)
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            # Another for each row, so that none passes for another.
            factors = torch.linspace(0.5, 2, len(parameter))
            parameter.data.mul_(factors.double())
    return model


def with_attention() -> nn.Module:
    """Adapt torch's attention, beside a linear layer."""
    layers = {"attention": nn.MultiheadAttention(4, 2), "last": nn.Linear(4, 3)}
    model = nn.ModuleDict(layers)
    return inject_adapter_in_model(LoraConfig(target_modules=list(layers)), model)


def with_frozen_a(model: nn.Module | None = None) -> nn.Module:
    """Freeze A, as LoRA-FA does."""
    if model is None:
        model = plain_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    return model


def with_bias() -> nn.Module:
    model = plain_model(lora_bias=True)
    for name, parameter in model.named_parameters():
        # It begins at 0, where it would not be missed.
        if "lora_B" in name and "bias" in name:
            nn.init.normal_(parameter)
    return model


def with_inactive() -> nn.Module:
    model = plain_model()
    config = LoraConfig(r=3, target_modules=["first"])
    inject_adapter_in_model(config, model, "second")
    # Which has made the second one active.
    for layer in (model.first, model.second):
        layer.set_adapter("default")
    return model


def with_two_active() -> nn.Module:
    model = with_inactive()
    model.first.set_adapter(["default", "second"])
    return model


def merged() -> nn.Module:
    model = plain_model()
    # One layer of two is enough.
    model.first.merge()
    return model


_BOTH = ["first", "second"]
ADAPTERS = {
    "LoRA": Kind(plain_model),
    "rsLoRA": Kind(partial(plain_model, use_rslora=True)),
    "rank and alpha patterns": Kind(
        partial(plain_model, rank_pattern={"first": 3}, alpha_pattern={"second": 1})
    ),
    "PiSSA, OLoRA and other beginnings": Kind(
        partial(plain_model, init_lora_weights="olora")
    ),
    "LoRA with a bias": Kind(with_bias, "exact, the bias held"),
    'bias="lora_only"': Kind(
        partial(plain_model, bias="lora_only"), "exact, the biases held"
    ),
    "LoRA-FA": Kind(with_frozen_a, "exact, over B alone"),
    "DoRA": Kind(with_dora, "exact, the magnitude held"),
    "beside an inactive adapter": Kind(with_inactive),
    "two active adapters": Kind(
        with_two_active, "refused", "default, second.*set_adapter"
    ),
    "merged": Kind(
        merged, "refused until unmerged", "first is merged .*unmerge_adapter"
    ),
    "LoRA of nn.MultiheadAttention": Kind(
        with_attention, "refused", r"nn\.MultiheadAttention.*attention\. Adapt other"
    ),
    "VeRA, LoHa, LoKr": Kind(
        lambda: get_peft_model(TwoLinear(), peft.VeraConfig(target_modules=_BOTH)),
        "refused; PEFT's `convert_to_lora` approximates it",
        r"No LoRA layer in the model.*VERA.*peft.save_as_lora makes LoRA",
    ),
    "IA3, OFT": Kind(
        lambda: get_peft_model(
            TwoLinear(), peft.IA3Config(target_modules=_BOTH, feedforward_modules=[])
        ),
        "refused",
        "No LoRA layer in the model.*IA3",
    ),
}

# --- wrappers, around `lora_model("bert")` --------------------------------------------


bert = partial(lora_model, "bert")


def compiled_in_place() -> nn.Module:
    model = bert()
    model.compile()
    return model


def checkpointed() -> nn.Module:
    model = bert()
    model.gradient_checkpointing_enable()
    return model


def checkpointed_as_by_qlora() -> nn.Module:
    """Leave a model as `peft.prepare_model_for_kbit_training` does, and a training."""
    model = checkpointed()
    model.enable_input_require_grads()
    return model.train()


def sharded() -> nn.Module:
    # Here, for older torch has none: an ImportError.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = bert()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def offloaded() -> nn.Module:
    model = bert()
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    return model


def hidden_by_fsdp1() -> nn.Module:
    # It is known by its name: a real one takes a process group, and hides weights.
    wrapper = type("FullyShardedDataParallel", (nn.Sequential,), {})
    return wrapper(bert())


def hidden_by_zero3() -> nn.Module:
    model = bert()
    # What DeepSpeed marks each of its parameters with.
    next(model.parameters()).ds_id = 0
    return model


WRAPPERS = {
    "none": Kind(bert),
    "a module of the user's": Kind(lambda: OfBatches(bert())),
    "DataParallel": Kind(lambda: nn.DataParallel(bert())),
    "DistributedDataParallel": Kind(lambda: DistributedDataParallel(bert())),
    "torch.compile": Kind(
        lambda: torch.compile(bert()), "exact, run eagerly with a warning"
    ),
    "model.compile()": Kind(compiled_in_place, "exact, run eagerly with a warning"),
    "gradient checkpointing": Kind(checkpointed),
    "gradient checkpointing with enable_input_require_grads, as QLoRA's": Kind(
        checkpointed_as_by_qlora
    ),
    "FSDP2 (fully_shard)": Kind(sharded, "exact, but for draws of the weights"),
    "Accelerate's offloading": Kind(offloaded, "exact, but for draws of the weights"),
    "FSDP1": Kind(hidden_by_fsdp1, "refused", "FSDP1 and .* hide LoRA weights"),
    "DeepSpeed ZeRO-3": Kind(hidden_by_zero3, "refused", "ZeRO-3 hide LoRA weights"),
}


# --- precisions -----------------------------------------------------------------------


@dataclass(frozen=True)
class Precision:
    """Data types of a model, and how far its covariances may be from those of float64.

    The bound is relative to the largest number, and twice the largest difference
    measured.
    """

    base: torch.dtype
    lora: torch.dtype
    bound: float
    autocast: torch.dtype | None = None


PRECISIONS = {
    "float64": Precision(torch.float64, torch.float64, bound=1e-12),
    "float32": Precision(torch.float32, torch.float32, bound=1e-6),
    "bfloat16, LoRA in float32": Precision(torch.bfloat16, torch.float32, bound=2e-2),
    "bfloat16": Precision(torch.bfloat16, torch.bfloat16, bound=2e-2),
    "float16": Precision(torch.float16, torch.float16, bound=3e-3),
    "float32, autocast to bfloat16": Precision(
        torch.float32, torch.float32, bound=1e-2, autocast=torch.bfloat16
    ),
}


# --- quantized linear layers, each skipped where its package is missing ---------------

# Of the largest number; up to 4e-7 and 1.1e-3 were measured.
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 3e-3}


def bitsandbytes(layer: nn.Linear, dtype: torch.dtype, bits: int) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes").nn
    sizes = layer.in_features, layer.out_features
    weight = layer.weight.data
    if bits == 4:
        new = bnb.Linear4bit(*sizes, compute_dtype=dtype, quant_type="nf4")
        new.weight = bnb.Params4bit(weight, quant_type="nf4", module=new)
    else:
        # No column is left out as an outlier.
        new = bnb.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=0.0)
        new.weight = bnb.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    new.bias = layer.bias
    # The move is what quantizes it.
    return new.to("cpu")


def torchao(layer: nn.Linear, _: torch.dtype) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    # It replaces layers within a module, and not the module itself.
    new = nn.Sequential(copy.deepcopy(layer))
    quantization.quantize_(new, quantization.Int8WeightOnlyConfig())
    return new[0]


def quanto(layer: nn.Linear, _: torch.dtype) -> nn.Module:
    package = pytest.importorskip("optimum.quanto")
    new = package.QLinear.from_module(layer, weights=package.qint8)
    # Until then its weight is quantized anew at each pass.
    new.freeze()
    return new


QUANTIZERS = {
    "bitsandbytes nf4": partial(bitsandbytes, bits=4),
    "bitsandbytes int8": partial(bitsandbytes, bits=8),
    "torchao int8": torchao,
    "quanto int8": quanto,
}

"""Kinds of adapters, precisions and wrappers, and what the library makes of each of them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import accelerate
import peft
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import OfBatches, TwoLinear, lora_model, plain_model, with_lora

Batches = list[tuple[torch.Tensor, torch.Tensor]]

EXACT = "exact"


@dataclass(frozen=True)
class Kind:
    """A model, and what is expected of it; `refusal` is a pattern of the error's message.

    An older PEFT or torch, which has no such thing, raises `ValueError` or `AttributeError`.
    """

    model: Callable[[], nn.Module]
    outcome: str = EXACT
    refusal: str = ""

    def batches(self) -> Batches:
        """As many examples as DoRA's identity of `lora_A` has rows, one, and four."""
        generator = torch.Generator().manual_seed(1)
        inputs = [torch.randn(n, 5, generator=generator).double() for n in (5, 1, 4)]
        return [(X, torch.arange(len(X)) % 3) for X in inputs]


# --- adapters ------------------------------------------------------------------------------------


def beside(layer: nn.Module, *targets: str, **lora: Any) -> nn.Module:
    """A layer, which is refused before it would run, and a linear one."""
    model = nn.ModuleDict({"layer": layer, "last": nn.Linear(4, 3)})
    return with_lora(model, *targets, "last", **lora)


def experts() -> nn.Module:
    """Weights of several experts in one parameter."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(2, 5, 5))
    return beside(module, target_parameters=["layer.weight"])


def with_dora() -> nn.Module:
    """Its magnitudes are not the norms that they begin with."""
    model = plain_model(use_dora=True)
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.data.mul_(torch.linspace(0.5, 2, len(parameter)).double())
    return model


def with_frozen_a(model: nn.Module | None = None) -> nn.Module:
    """As LoRA-FA trains."""
    model = plain_model() if model is None else model
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    return model


def with_bias() -> nn.Module:
    model = plain_model(lora_bias=True)
    for name, parameter in model.named_parameters():
        if "lora_B" in name and "bias" in name:
            nn.init.normal_(parameter)
    return model


def with_inactive() -> nn.Module:
    model = plain_model()
    inject_adapter_in_model(LoraConfig(r=3, target_modules=["first"]), model, "second")
    for layer in (model.first, model.second):
        layer.set_adapter("default")
    return model


def with_two_active() -> nn.Module:
    model = with_inactive()
    model.first.set_adapter(["default", "second"])
    return model


def with_lora_only_biases() -> nn.Module:
    """Its layers' own biases have been trained too."""
    model = plain_model(bias="lora_only")
    assert all(layer.base_layer.bias.requires_grad for layer in (model.first, model.second))
    return model


def with_weighted() -> nn.Module:
    """An adapter that PEFT has made of two others, of ranks 2 and 3."""
    torch.manual_seed(0)
    model = get_peft_model(TwoLinear(), LoraConfig(r=2, target_modules=["first", "second"]), "a")
    model.add_adapter("b", LoraConfig(r=3, target_modules=["first", "second"]))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    model.add_weighted_adapter(["a", "b"], [0.7, -0.4], "both", combination_type="cat")
    model.set_adapter("both")
    return model.double()


def merged() -> nn.Module:
    model = plain_model()
    model.first.merge()
    return model


_LINEAR_A_AND_B = r"LoRA layers must add B\(A\(x\)\), where A and B are linear"
_NO_LORA = "No LoRA layer in the model"


def _no_linear(layer: str) -> tuple[str, str]:
    """The outcome of LoRA in such a layer, and its refusal."""
    return "refused", rf"{_LINEAR_A_AND_B}.*not: layer \({layer}\w*\)\. Leave"


def _other(config: Callable[..., Any], refusal: str, **settings: Any) -> Kind:
    """A method of PEFT that is not LoRA."""

    def model() -> nn.Module:
        return get_peft_model(TwoLinear(), config(target_modules=["first", "second"], **settings))

    return Kind(model, "refused", refusal)


ADAPTERS = {
    "LoRA": Kind(plain_model),
    "rsLoRA": Kind(partial(plain_model, use_rslora=True)),
    "rank and alpha patterns": Kind(
        partial(plain_model, rank_pattern={"first": 3}, alpha_pattern={"second": 1})
    ),
    "PiSSA, OLoRA and other beginnings": Kind(partial(plain_model, init_lora_weights="olora")),
    "LoRA with a bias": Kind(with_bias, "exact, the bias held"),
    'bias="lora_only"': Kind(with_lora_only_biases, "exact, the biases held"),
    "add_weighted_adapter": Kind(with_weighted),
    "LoRA-FA": Kind(with_frozen_a, "exact, over B alone"),
    "DoRA": Kind(with_dora, "exact, the magnitude held"),
    "beside an inactive adapter": Kind(with_inactive),
    "two active adapters": Kind(with_two_active, "refused", "default, second.*set_adapter"),
    "merged": Kind(merged, "refused until unmerged", "first is merged .*unmerge_adapter"),
    "LoRA of fused experts": Kind(experts, *_no_linear("ParamWrapper")),
    "LoRA of convolutions": Kind(
        lambda: beside(nn.Conv1d(2, 4, 3), "layer"), *_no_linear("Conv1d")
    ),
    "LoRA of an embedding": Kind(
        lambda: beside(nn.Embedding(9, 4), "layer"), *_no_linear("Embedding")
    ),
    "LoRA of nn.MultiheadAttention": Kind(
        lambda: beside(nn.MultiheadAttention(4, 2), "layer"), *_no_linear("MultiheadAttention")
    ),
    "AdaLoRA": _other(peft.AdaLoraConfig, rf"{_LINEAR_A_AND_B}.*first.*second", total_step=10),
    "VeRA": _other(peft.VeraConfig, rf"{_NO_LORA}.*VERA"),
    "LoHa": _other(peft.LoHaConfig, rf"{_NO_LORA}.*LOHA"),
    "LoKr": _other(peft.LoKrConfig, rf"{_NO_LORA}.*LOKR"),
    "IA3": _other(peft.IA3Config, rf"{_NO_LORA}.*IA3", feedforward_modules=[]),
    "OFT": _other(peft.OFTConfig, rf"{_NO_LORA}.*OFT", oft_block_size=1, r=0),
}

# --- wrappers, around `lora_model("bert")` -------------------------------------------------------


def bert() -> nn.Module:
    return lora_model("bert")


def compiled() -> nn.Module:
    return torch.compile(bert())


def compiled_in_place() -> nn.Module:
    model = bert()
    model.compile()
    return model


def checkpointed() -> nn.Module:
    model = bert()
    model.gradient_checkpointing_enable()
    return model


def checkpointed_as_by_qlora() -> nn.Module:
    """As `peft.prepare_model_for_kbit_training` leaves a model, and a training."""
    model = checkpointed()
    model.enable_input_require_grads()
    return model.train()


def sharded() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # an ImportError in older torch

    model = bert()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def offloaded() -> nn.Module:
    model = bert()
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    return model


def hidden_by_fsdp1() -> nn.Module:
    return type("FullyShardedDataParallel", (nn.Sequential,), {})(bert())


def hidden_by_zero3() -> nn.Module:
    model = bert()
    next(model.parameters()).ds_id = 0
    return model


WRAPPERS = {
    "none": Kind(bert),
    "a module of the user's": Kind(lambda: OfBatches(bert())),
    "DataParallel": Kind(lambda: nn.DataParallel(bert())),
    "DistributedDataParallel": Kind(lambda: DistributedDataParallel(bert())),
    "torch.compile": Kind(compiled, "exact, run eagerly with a warning"),
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


# --- precisions ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Precision:
    """Data types of a model, and how far its covariances may be from those of float64.

    The bound is relative to the largest number, and twice the largest difference measured.
    """

    base: torch.dtype
    lora: torch.dtype
    bound: float
    autocast: torch.dtype | None = None


PRECISIONS = {
    "float64": Precision(torch.float64, torch.float64, 1e-12),
    "float32": Precision(torch.float32, torch.float32, 1e-6),
    "bfloat16, LoRA in float32": Precision(torch.bfloat16, torch.float32, 2e-2),
    "bfloat16": Precision(torch.bfloat16, torch.bfloat16, 2e-2),
    "float16": Precision(torch.float16, torch.float16, 3e-3),
    "float32, autocast to bfloat16": Precision(torch.float32, torch.float32, 1e-2, torch.bfloat16),
}

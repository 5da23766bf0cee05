"""Language models whose passes can run as one batch, and some whose passes can't."""

from __future__ import annotations

import torch
from peft import LoraConfig
from torch import nn

from tests.support.models import lora_model
from tests.support.texts import encoder_decoder


class SequenceFirst(nn.Module):
    """A layer that gets its rows with positions before texts."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.transpose(0, 1).contiguous()).transpose(0, 1)


class Reversed(SequenceFirst):
    """A layer that gets the texts in another order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flip(0)).flip(0)


class Routed(nn.Module):
    """A layer that gets the rows which its own contents choose."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.experts = nn.ModuleList([layer])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[..., 0] > 0
        return x.new_zeros(*x.shape[:-1], 12).masked_scatter(
            chosen[..., None], self.experts[0](x[chosen])
        )


def with_layer(kind: type[nn.Module]) -> nn.Module:
    model = lora_model("gpt2")
    block = model.get_base_model().transformer.h[0].mlp
    block.c_proj = kind(block.c_proj)
    return model


def hooked() -> nn.Module:
    """With a hook of the user's, which changes what a LoRA layer returns."""
    model = lora_model("gpt2")
    layer = model.get_base_model().transformer.h[0].attn.c_attn.lora_A["default"]
    layer.register_forward_hook(lambda *call: 2 * call[-1])
    return model


JOINED = {
    "gpt2": lambda: lora_model("gpt2"),
    "hooked": hooked,
    "bias": lambda: lora_model("gpt2", lora_bias=True),
    "t5": lambda: encoder_decoder("t5"),
    "bart": lambda: encoder_decoder("bart"),
}
if "lora_bias" not in LoraConfig.__dataclass_fields__:  # an older PEFT
    del JOINED["bias"]
ALONE = {
    "rows by position": lambda: with_layer(SequenceFirst),
    "another order": lambda: with_layer(Reversed),
    "DoRA": lambda: lora_model("gpt_neox", use_dora=True),
    "embedding": lambda: lora_model("gpt2", target_modules=["wte"], fan_in_fan_out=False),
    "experts": lambda: with_layer(Routed),
}

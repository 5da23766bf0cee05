"""Llama-shaped models with random weights, and random tokens for them: shapes, not abilities."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import BatchEncoding, LlamaConfig, LlamaForCausalLM

HEAD_SIZE = 64
LORA_B_SCALE = 0.02


@dataclass(frozen=True)
class Shape:
    """Sizes of a model with LoRA layers, and of its batches.

    Attributes
    ----------
    hidden_size, layers, intermediate_size, heads, vocabulary : int
        Of the Llama configuration.
    rank : int
        r of the LoRA layers.
    target_modules : tuple of str
        Modules with LoRA layers.
    classes : int
        Answers, each of them one token.
    batch_size, length : int
        Texts in a batch and tokens in a text.
    dtype : str
        Of the model's weights; PEFT holds those of LoRA layers in float32 at least.
    """

    hidden_size: int
    layers: int
    intermediate_size: int
    heads: int
    vocabulary: int
    rank: int
    target_modules: tuple[str, ...]
    classes: int
    batch_size: int
    length: int
    dtype: str

    @property
    def number_of_weights(self) -> int:
        """Weights of the model without LoRA layers and norms."""
        layer = 4 * self.hidden_size**2 + 3 * self.hidden_size * self.intermediate_size
        return self.layers * layer + 2 * self.vocabulary * self.hidden_size

    @property
    def class_token_ids(self) -> list[int]:
        """Tokens of the answers."""
        return list(range(self.classes))


def usual_heads(hidden_size: int) -> int:
    """Number of attention heads that a hidden size is split into.

    Parameters
    ----------
    hidden_size : int
        Size to split.

    Returns
    -------
    heads : int
        As many as have `HEAD_SIZE` numbers each; one where they don't come out even.
    """
    return hidden_size // HEAD_SIZE if hidden_size % HEAD_SIZE == 0 else 1


def random_llama(shape: Shape, device: str, seed: int) -> PeftModel:
    """Make a model in evaluation mode whose LoRA weights alone are trainable.

    Parameters
    ----------
    shape : Shape
        Sizes of the model.
    device : str
        Where its weights are drawn, in their final precision: nothing larger is held on the way.
    seed : int
        Seed of the weights.

    Returns
    -------
    model : PeftModel
        The model; its `lora_B` weights are small noise, as if it had been trained.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=max(2048, shape.length),
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, shape.dtype))
    try:
        with torch.device(device):
            base = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(default_dtype)
    settings = LoraConfig(
        task_type="CAUSAL_LM", r=shape.rank, target_modules=list(shape.target_modules)
    )
    model = get_peft_model(base, settings)  # pyright: ignore[reportArgumentType]
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=LORA_B_SCALE)
    return model.eval()  # pyright: ignore[reportReturnType]


def lora_weights(model: nn.Module) -> list[nn.Parameter]:
    """The LoRA weights, in the order of the model's parameters."""
    return [p for name, p in model.named_parameters() if "lora_A" in name or "lora_B" in name]


def random_loader(
    shape: Shape, batches: int, device: str, seed: int, batch_size: int | None = None
) -> DataLoader:
    """Batches of random tokens with random labels, none of them padded.

    Parameters
    ----------
    shape : Shape
        Sizes of the batches.
    batches : int
        Number of batches.
    device : str
        Device of the tokens.
    seed : int
        Seed of tokens and labels.
    batch_size : int, optional
        Texts in a batch; those of the shape if not given.

    Returns
    -------
    loader : DataLoader
        Mappings of `input_ids`, `attention_mask` and `labels`, in a fixed order.
    """
    batch_size = batch_size or shape.batch_size
    generator = torch.Generator().manual_seed(seed)
    texts = batches * batch_size
    tokens = torch.randint(shape.vocabulary, (texts, shape.length), generator=generator)
    labels = torch.randint(shape.classes, (texts,), generator=generator)
    records = list(zip(tokens, labels, strict=True))
    collate = partial(_collate, device=device)
    return DataLoader(records, batch_size=batch_size, collate_fn=collate)  # pyright: ignore[reportArgumentType]


def _collate(records: list[tuple[torch.Tensor, torch.Tensor]], device: str) -> Any:
    tokens, labels = (torch.stack(column).to(device) for column in zip(*records, strict=True))
    return BatchEncoding(
        {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    )

"""Models in the shape of Llama with random weights, and random tokens for them."""

from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BatchEncoding,
    LlamaConfig,
    PreTrainedModel,
)

from benchmarks.models import AdaptedModel
from benchmarks.training import as_dataset
from laplace_lora_ext.models.adapters import find_peft_model

LORA_B_SCALE = 0.02
MEANING = "random: they tell about shapes and speed only"  # of the weights


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama, of its LoRA layers and of its batches; a class is one token."""

    hidden_size: int
    layers: int
    intermediate_size: int
    heads: int = 4
    vocabulary: int = 1000  # small: embeddings cost all methods alike
    rank: int = 8
    target_modules: tuple[str, ...] = ("q_proj", "v_proj")
    classes: int = 4
    batch_size: int = 4
    length: int = 32
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not 2 <= self.classes <= self.vocabulary:
            raise SystemExit(f"--classes must be from 2 to {self.vocabulary}")


def random_llama(shape: Shape, device: str, seed: int) -> AdaptedModel:
    """Make a model on the device; only its LoRA weights are trainable."""
    model = _with_lora(AutoModelForCausalLM, "CAUSAL_LM", shape, device, seed)
    return AdaptedModel(model, class_token_ids=list(range(shape.classes)))


def random_classifier(shape: Shape, device: str, seed: int) -> AdaptedModel:
    """Make a classifier in the same shape, whose head is trainable, too."""
    model = _with_lora(
        AutoModelForSequenceClassification, "SEQ_CLS", shape, device, seed
    )
    return AdaptedModel(model)


def _with_lora(
    auto_class: Any, task: str, shape: Shape, device: str, seed: int
) -> PeftModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=max(2048, shape.length),
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    config.num_labels = shape.classes  # of a classifier
    dtype = getattr(torch, shape.dtype)
    # On the device at once, without a copy on the CPU.
    with torch.device(device):
        base = auto_class.from_config(config, torch_dtype=dtype)
    lora = LoraConfig(
        task_type=task, r=shape.rank, target_modules=list(shape.target_modules)
    )
    model = get_peft_model(base, lora)
    # PEFT starts lora_B at zero, where the curvature of lora_A is zero too.
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=LORA_B_SCALE)
    return model.eval()


def switch_checkpointing(model: nn.Module, on: bool) -> None:
    """Switch gradient checkpointing on or off, as a trainer would."""
    base = find_peft_model(model).get_base_model()
    assert isinstance(base, PreTrainedModel)
    if on:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        base.gradient_checkpointing_disable()


def random_loader(
    shape: Shape, batches: int, device: str, seed: int, batch_size: int | None = None
) -> DataLoader:
    """Make batches of random tokens and labels in a fixed order, without padding."""
    batch_size = batch_size or shape.batch_size
    generator = torch.Generator().manual_seed(seed)
    texts = batches * batch_size
    tokens = torch.randint(shape.vocabulary, (texts, shape.length), generator=generator)
    labels = torch.randint(shape.classes, (texts,), generator=generator)

    def collate(rows: list[int]) -> BatchEncoding:
        batch = {
            "input_ids": tokens[rows],
            "attention_mask": torch.ones_like(tokens[rows]),
            "labels": labels[rows],
        }
        return BatchEncoding(batch).to(device)

    return DataLoader(
        as_dataset(range(texts)), batch_size=batch_size, collate_fn=collate
    )

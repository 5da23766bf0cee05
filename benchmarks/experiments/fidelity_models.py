"""Transformers small enough for the exact curvature of their LoRA weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

from benchmarks.fine_tuning import Pretrained
from benchmarks.models import AdaptedModel
from benchmarks.tasks.docstrings import LIBRARIES
from benchmarks.training import Hyperparameters

LAYERS, HEADS = 2, 4
ANSWERS = ["a", "b", "c", "d", "e"]
BASE_EPOCHS = 4
BASE = Hyperparameters("random weights", (), 32, 32, learning_rate=1e-3, checkpoints=1)
LORA = replace(BASE, batch_size=16, learning_rate=5e-3, rank=4, alpha=16, dropout=0.0)


class MeanPooledDecoder(nn.Module):
    """A decoder that averages its final states over a text and maps them to logits `(B, C)`."""

    def __init__(self, config: transformers.LlamaConfig) -> None:
        super().__init__()
        self.decoder = transformers.LlamaModel(config)
        self.head = nn.Linear(config.hidden_size, len(LIBRARIES))

    def forward(self, batch: Any) -> torch.Tensor:
        mask = batch["attention_mask"]
        output = self.decoder(input_ids=batch["input_ids"], attention_mask=mask, use_cache=False)
        states = output.last_hidden_state
        weights = mask[..., None].to(states)
        return self.head((states * weights).sum(1) / weights.sum(1))


def _encoder(shape: dict[str, Any], tokens: dict[str, Any]) -> nn.Module:
    shape |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    shape["num_labels"] = len(LIBRARIES)
    config = transformers.BertConfig(**shape)
    return transformers.BertForSequenceClassification(config)


def _decoder(kind: type, shape: dict[str, Any], tokens: dict[str, Any]) -> nn.Module:
    return kind(transformers.LlamaConfig(**shape, **tokens, tie_word_embeddings=True))


class Architecture(NamedTuple):
    """One of three ways from a text to logits; `ANSWERING` uses the tokens of `ANSWERS`."""

    name: str
    build: Callable[[dict[str, Any], dict[str, Any]], nn.Module]
    target_modules: tuple[str, str]


ENCODER = Architecture("encoder, CLS", _encoder, ("query", "value"))
DECODERS = [partial(_decoder, kind) for kind in (transformers.LlamaForCausalLM, MeanPooledDecoder)]
ANSWERING = Architecture("decoder, answers", DECODERS[0], ("q_proj", "v_proj"))
POOLED = Architecture("decoder, mean", DECODERS[1], ("q_proj", "v_proj"))
ARCHITECTURES = (ENCODER, ANSWERING, POOLED)


@dataclass(frozen=True)
class SmallModel(Pretrained):
    """A model whose weights are all trained on the training texts first, as its pretraining."""

    architecture: Architecture = ENCODER
    seed: int = 0

    @property
    def task_type(self) -> None:
        """The head is not trained with the LoRA weights."""

    def load(self) -> nn.Module:
        tokenizer = self.tokenizer
        tokens = {"bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}
        shape = {
            "hidden_size": self.options.hidden_size,
            "intermediate_size": 2 * self.options.hidden_size,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "vocab_size": len(tokenizer),
            "pad_token_id": tokenizer.pad_token_id,
            "max_position_embeddings": 64,
        }
        base = self.architecture.build(shape, tokens)
        model = AdaptedModel(base, self.class_token_ids).logits_model
        settings = BASE.for_epochs(BASE_EPOCHS, len(self.task.train), warmup=0)
        order = torch.Generator().manual_seed(self.seed)
        loader = self.loader("train", settings.batch_size, order)
        self.train_or_read(model, loader, settings, self.seed)
        return base

    @property
    def class_token_ids(self) -> list[int] | None:
        is_asked = self.architecture is ANSWERING
        return self.tokenizer.convert_tokens_to_ids(ANSWERS) if is_asked else None

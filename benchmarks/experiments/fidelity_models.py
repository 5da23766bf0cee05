"""Small transformers with trained LoRA weights, on which exact curvature can be computed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)

from benchmarks.fine_tuning import Pretrained
from benchmarks.models import AdaptedModel
from benchmarks.tasks.sources import LIBRARIES
from benchmarks.training import Hyperparameters, train_or_read

LAYERS = 2
HEADS = 4
ANSWERS = ["a", "b", "c", "d", "e"]
MAXIMUM_LENGTH = 32
BASE_EPOCHS = 4
BASE = Hyperparameters(
    model="random weights",
    target_modules=(),
    batch_size=32,
    maximum_length=MAXIMUM_LENGTH,
    learning_rate=1e-3,
    checkpoints=1,
)
LORA = replace(
    BASE, batch_size=16, learning_rate=5e-3, rank=4, alpha=16, dropout=0.0, checkpoints=1
)


class MeanPooledDecoder(nn.Module):
    """A decoder whose final states are averaged over a text and mapped to logits, `(B, C)`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.decoder = LlamaModel(config)
        self.head = nn.Linear(config.hidden_size, len(LIBRARIES))

    def forward(self, batch: Any) -> torch.Tensor:
        mask = batch["attention_mask"]
        output = self.decoder(input_ids=batch["input_ids"], attention_mask=mask, use_cache=False)
        states = output.last_hidden_state
        weights = mask[..., None].to(states)
        return self.head((states * weights).sum(1) / weights.sum(1))


@dataclass(frozen=True)
class Architecture:
    """One of the three ways from a text to logits.

    `build` makes a model with random weights, of a hidden size and for a tokenizer. A decoder
    `answers` with the tokens of `ANSWERS`.
    """

    name: str
    build: Callable[[int, Any], nn.Module]
    target_modules: tuple[str, ...]
    answers: bool = False


@dataclass(frozen=True)
class SmallModel(Pretrained):
    """A model that is first trained in full, on the task's training texts, and then adapted.

    The first training, of some ten seconds, takes the place of pretraining: without it the LoRA
    weights would adapt noise. The second is to go on until its texts, the task's validation texts,
    are nearly fit, as small training sets are in practice.
    """

    architecture: "Architecture | None" = None
    hidden_size: int = 0
    seed: int = 0

    def load(self) -> nn.Module:
        assert self.architecture is not None
        base = self.architecture.build(self.hidden_size, self.tokenizer)
        model = AdaptedModel(base, self.class_token_ids).logits_model
        records = self.records(self.task.train)
        settings = BASE.for_epochs(BASE_EPOCHS, len(records))
        order = torch.Generator().manual_seed(self.seed)
        train_or_read(
            model,
            self.loader(records, settings.batch_size, order),
            lambda batch: cross_entropy(model(batch), batch["labels"]),
            replace(settings, warmup_steps=0),
            self.seed,
            self.cache,
            self.device,
            self.show_progress,
        )
        return base

    @property
    def task_type(self) -> None:
        """The head is not trained with the LoRA weights."""

    @property
    def class_token_ids(self) -> list[int] | None:
        assert self.architecture is not None
        if not self.architecture.answers:
            return None
        return self.tokenizer.convert_tokens_to_ids(ANSWERS)


def _shape(hidden_size: int, tokenizer: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "max_position_embeddings": 64,
    }


def _llama_config(hidden_size: int, tokenizer: Any) -> LlamaConfig:
    tokens = {"bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}
    return LlamaConfig(**_shape(hidden_size, tokenizer), **tokens, tie_word_embeddings=True)


def _bert(hidden_size: int, tokenizer: Any) -> nn.Module:
    settings = {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "num_labels": len(LIBRARIES),
    }
    return BertForSequenceClassification(BertConfig(**_shape(hidden_size, tokenizer), **settings))


def _answering_decoder(hidden_size: int, tokenizer: Any) -> nn.Module:
    return LlamaForCausalLM(_llama_config(hidden_size, tokenizer))


def _pooled_decoder(hidden_size: int, tokenizer: Any) -> nn.Module:
    return MeanPooledDecoder(_llama_config(hidden_size, tokenizer))


ARCHITECTURES = (
    Architecture("encoder, CLS", _bert, ("query", "value")),
    Architecture("decoder, answers", _answering_decoder, ("q_proj", "v_proj"), answers=True),
    Architecture("decoder, mean", _pooled_decoder, ("q_proj", "v_proj")),
)

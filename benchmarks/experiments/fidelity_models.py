"""Transformers small enough for the exact curvature of their LoRA weights."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.fine_tuning import Pretrained
from benchmarks.models import AdaptedModel
from benchmarks.tasks.docstrings import LIBRARIES
from benchmarks.training import Hyperparameters

# Three ways from a text to logits, with the layers that have LoRA weights.
ENCODER, ANSWERING, POOLED = "encoder, CLS", "decoder, answers", "decoder, mean"
TARGETS = {
    ENCODER: ("query", "value"),
    ANSWERING: ("q_proj", "v_proj"),
    POOLED: ("q_proj", "v_proj"),
}
ANSWERS = ("a", "b", "c", "d", "e")
LAYERS, HEADS = 2, 4
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


@dataclass(frozen=True)
class SmallModel(Pretrained):
    """A model whose weights are all trained on the training texts first, as its pretraining."""

    seed: int = 0

    @property
    def task_type(self) -> None:
        """The head is not trained with the LoRA weights."""

    def load(self) -> nn.Module:
        base = self._random()
        model = AdaptedModel(base, self.class_token_ids).logits_model
        settings = BASE.for_epochs(BASE_EPOCHS, len(self.task.train), warmup=0)
        order = torch.Generator().manual_seed(self.seed)
        loader = self.loader("train", settings.batch_size, order)
        self.train_or_read(model, loader, settings, self.seed)
        return base

    def _random(self) -> nn.Module:
        shape: dict[str, Any] = {
            "hidden_size": self.options.hidden_size,
            "intermediate_size": 2 * self.options.hidden_size,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "vocab_size": len(self.tokenizer),
            "pad_token_id": self.tokenizer.pad_token_id,
            "max_position_embeddings": 64,
        }
        if self.hyperparameters.model == ENCODER:
            shape |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
            shape["num_labels"] = len(LIBRARIES)
            config = transformers.BertConfig(**shape)
            return transformers.BertForSequenceClassification(config)
        shape["bos_token_id"] = self.tokenizer.cls_token_id
        shape["eos_token_id"] = self.tokenizer.sep_token_id
        config = transformers.LlamaConfig(**shape, tie_word_embeddings=True)
        is_asked = self.hyperparameters.model == ANSWERING
        return transformers.LlamaForCausalLM(config) if is_asked else MeanPooledDecoder(config)

"""Small transformers with trained LoRA weights, on which exact curvature can be computed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)

from benchmarks import training
from benchmarks.docstrings import LIBRARIES
from laplace_lora_ext.models.logits_model import LogitsModel

LAYERS = 2
HEADS = 4
LORA_RANK = 4
LORA_ALPHA = 16
ANSWERS = ("a", "b", "c", "d", "e")
BASE_EPOCHS, BASE_BATCH_SIZE, BASE_LEARNING_RATE = 4, 32, 1e-3
LORA_BATCH_SIZE, LORA_LEARNING_RATE = 16, 5e-3

Record = dict[str, Any]
Collate = Callable[[list[Record]], Any]


class MeanPooledDecoder(nn.Module):
    """A decoder whose final states are averaged over a text and mapped to logits, `(B, C)`.

    Parameters
    ----------
    config : LlamaConfig
        Of the decoder.
    """

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

    Attributes
    ----------
    name : str
        How the tables call it.
    base : callable
        From a hidden size and a tokenizer to a model with random weights.
    target_modules : tuple of str
        The attention's query and value projections.
    answers : tuple of str, optional
        Tokens whose logits after the text are those of the classes.
    """

    name: str
    base: Callable[[int, Any], nn.Module]
    target_modules: tuple[str, str]
    answers: tuple[str, ...] | None = None

    def class_token_ids(self, tokenizer: Any) -> list[int] | None:
        """Identifiers of the answers' tokens, if there are any."""
        return tokenizer.convert_tokens_to_ids(list(self.answers)) if self.answers else None


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
    Architecture("decoder, answers", _answering_decoder, ("q_proj", "v_proj"), ANSWERS),
    Architecture("decoder, mean", _pooled_decoder, ("q_proj", "v_proj")),
)


def train(
    architecture: Architecture,
    hidden_size: int,
    base_records: Sequence[Record],
    records: Sequence[Record],
    tokenizer: Any,
    collate: Collate,
    epochs: int,
    seed: int,
    show_progress: bool = True,
) -> LogitsModel:
    """Train a model in full on one set of texts, then LoRA weights on another.

    The first training, of some ten seconds, is on texts of the same kind with the same classes,
    and takes the place of pretraining: without it the LoRA weights would adapt noise. The second
    is to go on until the texts are nearly fit, as small training sets are in practice.

    Parameters
    ----------
    architecture : Architecture
        What to train.
    hidden_size : int
        Its width.
    base_records, records : sequence of dict
        Tokens and labels of the texts of the first and of the second training.
    tokenizer : transformers.PreTrainedTokenizerBase
        The tokenizer of the texts.
    collate : callable
        Records to a padded batch.
    epochs : int
        Passes of the second training over its texts.
    seed : int
        Seed of the weights and of the order of the texts.
    show_progress : bool, default=True
        Whether to show progress bars.

    Returns
    -------
    model : LogitsModel
        In evaluation mode and float64. The norms of a Llama compute in float32 within, for the
        exact curvature and the approximations alike.
    """
    torch.manual_seed(seed)
    base = architecture.base(hidden_size, tokenizer)
    model = LogitsModel(base, architecture.class_token_ids(tokenizer))

    def fit(records: Sequence[Record], batch_size: int, epochs: int, learning_rate: float) -> None:
        loader = DataLoader(
            records,  # pyright: ignore[reportArgumentType]
            batch_size=batch_size,
            shuffle=True,
            collate_fn=collate,
            generator=torch.Generator().manual_seed(seed),
        )
        training.train(
            model,
            loader,
            lambda batch: cross_entropy(model(batch), batch["labels"]),
            epochs * len(loader),
            learning_rate,
            show_progress=show_progress,
        )

    fit(base_records, BASE_BATCH_SIZE, BASE_EPOCHS, BASE_LEARNING_RATE)
    settings = LoraConfig(
        r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=list(architecture.target_modules)
    )
    inject_adapter_in_model(settings, base)  # freezes all but the LoRA weights
    fit(records, LORA_BATCH_SIZE, epochs, LORA_LEARNING_RATE)
    return model.double().eval()

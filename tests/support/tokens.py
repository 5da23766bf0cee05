"""Classifiers of tokens, and texts of which some tokens are labelled."""

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    BertForTokenClassification,
    GPT2Config,
    GPT2ForTokenClassification,
    LlamaConfig,
    LlamaForTokenClassification,
)

from tests.support.models import (
    N_CLASSES,
    VOCABULARY,
    Batch,
    base_model,
    ragged_batches,
)
from tests.support.posteriors import generator

IGNORED = -100
"""The label that transformers' own loss passes over."""


def bert(n_labels: int) -> nn.Module:
    """Initialise an encoder at random."""
    return BertForTokenClassification(base_model("bert", n_labels).config)


def gpt2(n_labels: int) -> nn.Module:
    """Initialise a decoder whose layers store their weights transposed."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=12,
        n_layer=2,
        n_head=2,
        n_positions=64,
        num_labels=n_labels,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    return GPT2ForTokenClassification(config)


def llama(n_labels: int) -> nn.Module:
    """Initialise a decoder at random."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        num_labels=n_labels,
        pad_token_id=0,
    )
    return LlamaForTokenClassification(config)


BASES = {
    "bert": (bert, ["query", "value"]),
    "gpt2": (gpt2, ["c_attn"]),
    "llama": (llama, ["q_proj", "v_proj"]),
}


def token_classifier(
    kind: str = "bert", n_labels: int = N_CLASSES, dtype: torch.dtype = torch.float64
) -> nn.Module:
    """Make a classifier of tokens with an adapter that is not 0."""
    torch.manual_seed(0)
    make_base, target_modules = BASES[kind]
    lora = LoraConfig(
        r=2,
        target_modules=target_modules,
        # With B at 0, as PEFT begins, the gradient of A would be 0 everywhere.
        init_lora_weights=False,
    )
    model = get_peft_model(make_base(n_labels), lora)
    model.to(dtype)
    return model.eval()


def is_real(batch: Batch) -> Tensor:
    """Tell tokens from padding, `(texts, tokens)`."""
    return batch["attention_mask"].bool()


def labelled_batches(batch_size: int = 3) -> list[Batch]:
    """Make ragged texts of which some tokens are labelled, and one text has none."""
    found = ragged_batches(batch_size=batch_size)
    draws = generator(3)
    for number, batch in enumerate(found):
        shape = batch["input_ids"].shape
        labels = torch.randint(0, N_CLASSES, shape, generator=draws)
        # Few enough that texts have gaps, and many enough that most have labels.
        is_drawn = torch.rand(shape, generator=draws) < 0.6
        labels[~(is_drawn & is_real(batch))] = IGNORED
        if number == 1:
            labels[1] = IGNORED
        batch["labels"] = labels
    return found

"""Classifiers of tokens, and texts of which some tokens are labelled."""

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from tests.support.models import N_CLASSES, Batch, built, ragged_batches
from tests.support.posteriors import generator

IGNORED = -100
"""The label that transformers' own loss passes over."""

KINDS = {"bert": ("Bert", ["query", "value"]), "gpt2": ("GPT2", ["c_attn"])}


def token_classifier(
    kind: str = "bert", n_labels: int = N_CLASSES, dtype: torch.dtype = torch.float64
) -> nn.Module:
    """Make a classifier of tokens with an adapter that is not 0."""
    family, target_modules = KINDS[kind]
    base = built(
        f"{family}ForTokenClassification",
        hidden_size=12,
        num_hidden_layers=2,
        num_labels=n_labels,
        attn_implementation="eager",
    )
    # With B at 0, as PEFT begins, the gradient of A would be 0 everywhere.
    lora = LoraConfig(r=2, target_modules=target_modules, init_lora_weights=False)
    return get_peft_model(base, lora).to(dtype).eval()


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

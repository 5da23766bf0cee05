"""Adapters that have learnt a little, saved as PEFT and trainers save them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerFast

WORDS = ("red", "green", "blue", "sky", "grass", "rose", "A", "B")
NAMES = ("plant", "air")
SMALL = {
    # Whole blocks of numbers in four bits.
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    # More than the tokenizer has, as some models pad it.
    "vocab_size": 3 + len(WORDS),
}


def write_rows(
    path: Path, n_rows: int, names: Sequence[str] = NAMES, n_wrong: int = 0
) -> Path:
    """Write texts whose last word tells their label, as JSON lines or CSV.

    The first ones have the next class's label. Files of different sizes share no text:
    each begins with a word of its own, which is unknown to the tokenizer.
    """
    generator = torch.Generator().manual_seed(n_rows)
    rows = []
    for number in range(n_rows):
        drawn = torch.randint(len(names), (2,), generator=generator)
        first, label = drawn.tolist()
        own = f"{n_rows}x{number}"
        told = names[(label + (number < n_wrong)) % len(names)]
        rows.append({"text": f"{own} {WORDS[first]} {WORDS[3 + label]}", "label": told})
    lines = [json.dumps(row) for row in rows]
    if path.suffix == ".csv":
        lines = ["text,label", *(",".join(row.values()) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def tokenizer(
    tokens: Sequence[str] = ("[PAD]", "[UNK]", *WORDS), **settings: Any
) -> PreTrainedTokenizerFast:
    """Make a tokenizer to whom each of the words is one token."""
    vocabulary = {token: place for place, token in enumerate(tokens)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="[UNK]",
        **{"padding_side": "left", "pad_token": "[PAD]"} | settings,
    )


def save_adapter(
    folder: Path, base: PreTrainedModel, answers: Sequence[str] = (), **lora_config: Any
) -> Path:
    """Save a base model, and an adapter of it that has learnt beside its tokenizer.

    It has learnt what the last word tells: the class, or which answer comes next.
    """
    base.save_pretrained(folder / "base")
    # The adapter's file says where its base is.
    base.name_or_path = str(folder / "base")
    base.config._name_or_path = str(folder / "base")
    model = get_peft_model(base, LoraConfig(r=2, lora_alpha=16, **lora_config))
    words = tokenizer()
    last = WORDS[3 : 3 + (len(answers) or base.config.num_labels)]
    texts = words([f"0x0 {first} {word}" for first in WORDS[:2] for word in last])
    ids = torch.tensor(texts["input_ids"])
    labels = torch.arange(len(last)).repeat(2)
    if answers:
        labels = torch.tensor(words.convert_tokens_to_ids(list(answers))).repeat(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        logits = model(input_ids=ids).logits
        # Of a language model those behind the last word.
        cross_entropy(logits[:, -1] if answers else logits, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(str(folder / "adapter"))
    words.save_pretrained(folder / "adapter")
    return folder / "adapter"

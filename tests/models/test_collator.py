"""Batches of choices, made of prompts and answers that are texts."""

import pytest
import torch
from transformers import AutoTokenizer

from laplace_lora_ext.models.collator import DataCollatorForChoices
from laplace_lora_ext.models.logits_model import LogitsModel
from tests.support.choices import choices_batch
from tests.support.pages import write_adapter

FEATURES = [
    {"prompt": "Question : which one ?", "choices": ["A", "B C"], "labels": 1},
    {"prompt": "which ?", "choices": ["which one", "A B C"], "labels": 0},
]


@pytest.fixture
def tokenizer(tmp_path):
    write_adapter(tmp_path, "gpt2")
    return AutoTokenizer.from_pretrained(tmp_path)


def test_a_collator_makes_batches_of_choices(gpt2, tokenizer):
    batch = DataCollatorForChoices(tokenizer)(FEATURES)
    prompts = [tokenizer(each["prompt"])["input_ids"] for each in FEATURES]
    choices = [tokenizer(each["choices"])["input_ids"] for each in FEATURES]
    for key, value in choices_batch(prompts, choices).items():
        assert torch.equal(batch[key], value)
    assert batch["labels"].tolist() == [1, 0]
    # A model takes them as they are.
    assert LogitsModel(gpt2)(batch).shape == (2, 2)
    # Prompts are cut at their start.
    batch = DataCollatorForChoices(tokenizer, max_length=5)(FEATURES)
    kept = tokenizer("which one ? B C")["input_ids"]
    assert batch["input_ids"][0, 1].tolist() == kept


@pytest.mark.parametrize(
    ("changes", "max_length", "message"),
    [
        # The longest choice has three tokens.
        ({}, 3, "raise it"),
        ({"choices": ["A", "B", "C"]}, None, r"\[2, 3\] choices"),
    ],
)
def test_what_makes_no_batch_is_refused(tokenizer, changes, max_length, message):
    collator = DataCollatorForChoices(tokenizer, max_length=max_length)
    with pytest.raises(ValueError, match=message):
        collator([FEATURES[0], FEATURES[1] | changes])

"""Copies of texts with tokens of others in them."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.swapping import swapping
from tests.support.models import VOCABULARY, base_model, part_of
from tests.support.posteriors import generator

Batch = dict[str, Any]

N_TEXTS = 40
LENGTH = 20
PROMPT = [5, 6, 7]
END = 2
PADDING = 8  # none that the model knows
# Tokens below have a meaning.
FIRST_WORD = 20
MODEL = LogitsModel(base_model("bert"))


def texts() -> Batch:
    """Make texts of 8 to 20 tokens, from a prompt to an end."""
    shape = (N_TEXTS, LENGTH)
    ids = torch.randint(FIRST_WORD, VOCABULARY, shape, generator=generator())
    rows = torch.arange(N_TEXTS)
    # Too few are padded for their padding to pass for a prompt.
    lengths = (8 + 7 * rows % 17).clamp(max=LENGTH)
    ids[:, : len(PROMPT)] = torch.tensor(PROMPT)
    ids[rows, lengths - 1] = END
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return {"input_ids": ids.where(mask.bool(), PADDING), "attention_mask": mask}


def copied(batch: Batch, *batches: Batch, seed: int = 0) -> Tensor:
    """Swap tokens of a batch for those of some, by default its own."""
    swapped = swapping(MODEL, "swapped", batches or [batch], generator(seed))
    return swapped(batch)["input_ids"]


def test_three_tenths_of_the_words_are_swapped_for_words_of_the_texts():
    batch = texts()
    ids = batch["input_ids"]
    # The tokens are read in two batches.
    rows = slice(0, 25), slice(25, N_TEXTS)
    parts = [part_of(batch, part) for part in rows]
    copy = copied(batch, *parts)
    is_word, is_changed = ids >= FIRST_WORD, copy != ids
    # Prompt, end and padding stay.
    assert is_word[is_changed].all()
    n_words, n_changed = is_word.sum(1), is_changed.sum(1)
    assert (n_changed <= (0.3 * n_words).round()).all()
    # One in forty drawn tokens is the same as before.
    assert 0.27 < n_changed.sum() / n_words.sum() <= 0.3
    assert torch.isin(copy[is_changed], ids[is_word]).all()
    assert torch.equal(copied(batch, *parts), copy)
    assert not torch.equal(copied(batch, *parts, seed=1), copy)


def test_tokens_are_drawn_as_often_as_they_stand_in_texts():
    common, rare = 30, 40
    ids = torch.full((1000, 10), common)
    ids[:100, 5:] = rare  # one in twenty
    # No two texts begin alike: there is no prompt.
    ids[:, 0] = torch.arange(100, 1100)
    batch = {"input_ids": ids}
    copy = copied(batch)
    assert not torch.equal(copy, ids)
    # About 3,000 tokens are drawn: chance moves the share by a thousandth.
    assert 0.04 < (copy == rare).double().mean() < 0.06
    # Choices of texts are none.
    choices = {"input_ids": ids[None]}
    assert swapping(MODEL, "swapped", [choices], generator())(choices) is None
    # Texts of a prompt alone stay.
    prompts = {"input_ids": torch.tensor([PROMPT, PROMPT])}
    assert torch.equal(copied(prompts), prompts["input_ids"])


def test_tokens_that_a_configuration_names_stay(monkeypatch):
    config = MODEL.transformer.config
    # One or several, by whatever name.
    named = {"eos_token_id": [25, 26], "image_token_index": 27, "mask_token_id": None}
    for name, tokens in named.items():
        monkeypatch.setattr(config, name, tokens, raising=False)
    of_text = SimpleNamespace(to_dict=lambda: {"bos_token_id": 29})
    monkeypatch.setattr(config, "get_text_config", lambda: of_text)
    batch = texts()
    ids = batch["input_ids"]
    copy = copied(batch)
    named = torch.tensor([25, 26, 27, 29])
    # They are neither swapped for others, nor others for them.
    assert torch.equal(torch.isin(copy, named), torch.isin(ids, named))

"""Copies of texts with swapped tokens."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_lora_ext.models.swapping import Swapping
from tests.support.models import VOCABULARY, base_model
from tests.support.posteriors import generator

N_TEXTS = 40
LENGTH = 24
PROMPT = [5, 6, 7]
END = 2
PADDING = 0
# Tokens below have a meaning.
FIRST_WORD = 20

Batch = dict[str, Tensor]


def texts(padding_side: str = "right") -> Batch:
    """Make texts of 8 to 24 tokens, from a prompt to an end."""
    shape = (N_TEXTS, LENGTH)
    ids = torch.randint(FIRST_WORD, VOCABULARY, shape, generator=generator())
    rows = torch.arange(N_TEXTS)
    lengths = 8 + 7 * rows % 17
    ids[:, : len(PROMPT)] = torch.tensor(PROMPT)
    ids[rows, lengths - 1] = END
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    batch = {"input_ids": ids.where(mask.bool(), PADDING), "attention_mask": mask}
    if padding_side == "left":  # and texts the other way round
        return {key: value.flip(1) for key, value in batch.items()}
    return batch


def swapped(
    batch: Batch, *texts: Batch, model: nn.Module | None = None, seed: int = 0
) -> Tensor:
    """Swap a batch's tokens for those of some texts, or of the batch."""
    return Swapping(texts or [batch], model, generator(seed))(batch)["input_ids"]


@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_three_tenths_of_the_words_are_swapped_for_words_of_the_texts(padding_side):
    batch = texts(padding_side)
    ids = batch["input_ids"]
    # The tokens are read in two batches.
    rows = slice(0, 25), slice(25, N_TEXTS)
    parts = [{key: value[part] for key, value in batch.items()} for part in rows]
    copy = swapped(batch, *parts)
    is_word, is_changed = ids >= FIRST_WORD, copy != ids
    # Prompt, end and padding stay.
    assert is_word[is_changed].all()
    n_words, n_changed = is_word.sum(1), is_changed.sum(1)
    assert (n_changed <= (0.3 * n_words).round()).all()
    # One in forty drawn tokens is the same as before.
    assert 0.27 < n_changed.sum() / n_words.sum() <= 0.3
    assert torch.isin(copy[is_changed], ids[is_word]).all()
    # Of places behind the prompt that all texts have.
    if padding_side == "right":
        assert is_changed[:, 4:7].any(0).all()
    assert torch.equal(swapped(batch, *parts), copy)
    assert not torch.equal(swapped(batch, *parts, seed=1), copy)


def test_tokens_are_drawn_as_often_as_they_stand_in_texts():
    common, rare = 30, 40
    ids = torch.full((1000, 10), common)
    ids[:100, 5:] = rare
    # No two texts begin alike: there is no prompt.
    ids[:, 0] = torch.arange(100, 1100)
    copy = swapped({"input_ids": ids})
    assert not torch.equal(copy, ids)
    # About 3,000 tokens are drawn, one in twenty of them rare: chance moves the share
    # by a thousandth.
    before, after = (ids == rare).double().mean(), (copy == rare).double().mean()
    assert_close(after, before, rtol=0, atol=0.01)
    # Texts of a prompt alone stay.
    prompts = torch.tensor([PROMPT, PROMPT])
    assert torch.equal(swapped({"input_ids": prompts}), prompts)


def test_tokens_that_a_configuration_names_stay():
    model = base_model("gpt2")
    # One or several, by whatever name.
    model.config.eos_token_id = [25, 26]
    model.config.image_token_index = 27
    model.config.mask_token_id = None
    batch = texts()
    ids = batch["input_ids"]
    copy = swapped(batch, model=model)
    named = torch.tensor([25, 26, 27])
    is_named = torch.isin(ids, named)
    # They are neither swapped for others,
    assert torch.equal(copy[is_named], ids[is_named])
    # nor others for them.
    assert not torch.isin(copy[copy != ids], named).any()

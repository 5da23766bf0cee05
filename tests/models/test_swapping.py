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


def drawn(low: int, high: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Draw whole numbers from the lowest to the one below the highest."""
    draws = generator(seed)
    return torch.randint(low, high, shape, generator=draws)


def texts(padding_side: str = "right") -> Batch:
    """Make texts of 8 to 24 tokens, from a prompt to an end."""
    ids = drawn(FIRST_WORD, VOCABULARY, (N_TEXTS, LENGTH))
    lengths = drawn(8, LENGTH + 1, (N_TEXTS,), seed=1)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        text = ids[row]
        text[: len(PROMPT)] = torch.tensor(PROMPT)
        text[length - 1] = END
        text[length:] = PADDING
        mask[row, :length] = 1
        if padding_side == "left":
            n_padding = LENGTH - int(length)
            ids[row] = ids[row].roll(n_padding)
            mask[row] = mask[row].roll(n_padding)
    return {"input_ids": ids, "attention_mask": mask}


def of_rows(batch: Batch, rows: slice) -> Batch:
    return {key: value[rows] for key, value in batch.items()}


def swapped(
    batch: Batch, *texts: Batch, model: nn.Module | None = None, seed: int = 0
) -> Tensor:
    """Swap a batch's tokens for those of some texts, or of the batch."""
    source = texts or [batch]
    draws = generator(seed)
    swapping = Swapping(source, model, draws)
    copy = swapping(batch)
    return copy["input_ids"]


def of_ids(ids: Tensor) -> Batch:
    """Make a batch of tokens alone, which all are a text's."""
    return {"input_ids": ids}


def copied(padding_side: str) -> tuple[Tensor, Tensor]:
    """Copy texts, whose tokens are read in two batches; return which were, and how."""
    batch = texts(padding_side)
    parts = of_rows(batch, slice(0, 25)), of_rows(batch, slice(25, N_TEXTS))
    return batch["input_ids"], swapped(batch, *parts)


@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_three_tenths_of_the_words_are_swapped_for_words_of_the_texts(padding_side):
    ids, copy = copied(padding_side)
    is_word, is_changed = ids >= FIRST_WORD, copy != ids
    # Prompt, end and padding stay.
    assert is_word[is_changed].all()
    n_words, n_changed = is_word.sum(1), is_changed.sum(1)
    assert (n_changed <= (0.3 * n_words).round()).all()
    # One in forty drawn tokens is the same as before.
    assert 0.27 < n_changed.sum() / n_words.sum() <= 0.3
    assert torch.isin(copy[is_changed], ids[is_word]).all()


def test_every_place_behind_the_prompt_has_its_turn():
    ids, copy = copied("right")
    # Of places that all texts have.
    assert (copy != ids)[:, 4:8].any(0).all()


def test_tokens_are_drawn_as_often_as_they_stand_in_texts():
    common = 30
    rare = 40
    ids = torch.full((1000, 10), common)
    ids[:100, 5:] = rare
    # No two texts begin alike: there is no prompt.
    ids[:, 0] = torch.arange(100, 1100)
    copy = swapped(of_ids(ids))
    assert not torch.equal(copy, ids)

    def share_of_rare(tokens: Tensor) -> Tensor:
        is_rare = tokens == rare
        return is_rare.double().mean()

    before = share_of_rare(ids)
    after = share_of_rare(copy)
    # About 3,000 tokens are drawn, one in twenty of them rare: chance moves the share
    # by a thousandth.
    assert_close(after, before, rtol=0, atol=0.01)


def test_texts_of_a_prompt_alone_stay():
    ids = torch.tensor([PROMPT, PROMPT])
    copy = swapped(of_ids(ids))
    assert torch.equal(copy, ids)


@pytest.fixture
def model_with_named_tokens() -> nn.Module:
    """A model whose configuration names words of `texts`, and no mask token."""
    model = base_model("gpt2")
    config = model.config
    # One or several, by whatever name.
    config.eos_token_id = [25, 26]
    config.image_token_index = 27
    config.mask_token_id = None
    return model


def test_tokens_that_a_configuration_names_stay(model_with_named_tokens):
    batch = texts()
    ids = batch["input_ids"]
    copy = swapped(batch, model=model_with_named_tokens)
    named = torch.tensor([25, 26, 27])
    is_named = torch.isin(ids, named)
    # They are neither swapped for others,
    assert torch.equal(copy[is_named], ids[is_named])
    # nor others for them.
    is_changed = copy != ids
    is_named = torch.isin(copy, named)
    assert not (is_changed & is_named).any()


def test_a_seed_gives_the_same_copy(model_with_named_tokens):
    def copy(seed: int) -> Tensor:
        return swapped(texts(), model=model_with_named_tokens, seed=seed)

    first = copy(seed=0)
    again = copy(seed=0)
    assert torch.equal(again, first)
    another = copy(seed=1)
    assert not torch.equal(another, first)

"""Copies of texts with swapped tokens."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from laplace_lora_ext.models.swapping import Swapping
from tests.support.models import base_model
from tests.support.posteriors import generator

N_TEXTS = 40
LENGTH = 24
PROMPT = [5, 6, 7]
END = 2
PADDING = 0
# Tokens below have a meaning.
FIRST_WORD = 20

Batch = dict[str, torch.Tensor]


def texts(padding_side: str = "right") -> Batch:
    """Make texts of 8 to 24 tokens, from a prompt to an end."""
    shape = (N_TEXTS, LENGTH)
    ids = torch.randint(FIRST_WORD, 60, shape, generator=generator())
    lengths = torch.randint(8, LENGTH + 1, (N_TEXTS,), generator=generator(1))
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths.tolist()):
        ids[row, : len(PROMPT)] = torch.tensor(PROMPT)
        ids[row, length - 1] = END
        ids[row, length:] = PADDING
        mask[row, :length] = 1
        if padding_side == "left":
            n_padding = LENGTH - length
            ids[row] = ids[row].roll(n_padding)
            mask[row] = mask[row].roll(n_padding)
    return {"input_ids": ids, "attention_mask": mask}


def swapped(
    batch: Batch,
    *texts: Batch,
    model: nn.Module | None = None,
    seed: int = 0,
) -> torch.Tensor:
    """Swap a batch's tokens for those of some texts, or of the batch."""
    swapping = Swapping(texts or [batch], model, generator(seed))
    copy = swapping(batch)
    return copy["input_ids"]


@dataclass(frozen=True)
class Copy:
    """Texts and their copy."""

    ids: torch.Tensor
    copy: torch.Tensor

    @property
    def is_word(self) -> torch.Tensor:
        return self.ids >= FIRST_WORD

    @property
    def is_changed(self) -> torch.Tensor:
        return self.copy != self.ids


def copied(padding_side: str) -> Copy:
    """Copy texts, whose tokens are read in two batches."""
    batch = texts(padding_side)
    first = {key: value[:25] for key, value in batch.items()}
    second = {key: value[25:] for key, value in batch.items()}
    copy = swapped(batch, first, second)
    return Copy(batch["input_ids"], copy)


@pytest.fixture(params=["right", "left"])
def of_texts(request: pytest.FixtureRequest) -> Copy:
    return copied(request.param)


def test_prompt_end_and_padding_stay(of_texts):
    assert of_texts.is_word[of_texts.is_changed].all()


def test_three_tenths_of_the_words_are_swapped(of_texts):
    n_words = of_texts.is_word.sum(1)
    n_changed = of_texts.is_changed.sum(1)
    most = (0.3 * n_words).round()
    assert (n_changed <= most).all()
    # One in forty drawn tokens is the same as before.
    share = n_changed.sum() / n_words.sum()
    assert 0.27 < share.item() <= 0.3


def test_words_are_swapped_for_words_of_the_texts(of_texts):
    words = of_texts.ids[of_texts.is_word].unique()
    drawn = of_texts.copy[of_texts.is_changed]
    assert torch.isin(drawn, words).all()


def test_every_place_behind_the_prompt_has_its_turn():
    is_changed = copied("right").is_changed
    # Of places that all texts have.
    assert is_changed[:, 4:8].any(0).all()


def test_tokens_are_drawn_as_often_as_they_stand_in_texts():
    common, rare = 30, 40
    ids = torch.full((1000, 10), common)
    ids[:100, 5:] = rare
    # No two texts begin alike: there is no prompt.
    ids[:, 0] = torch.arange(100, 1100)
    copy = swapped({"input_ids": ids})
    assert not torch.equal(copy, ids)
    share_before = (ids == rare).double().mean()
    share_after = (copy == rare).double().mean()
    assert_close(share_after, share_before, rtol=0, atol=0.01)


def test_texts_of_a_prompt_alone_stay():
    ids = torch.tensor([PROMPT, PROMPT])
    copy = swapped({"input_ids": ids})
    assert torch.equal(copy, ids)


@pytest.fixture
def model_with_named_tokens() -> nn.Module:
    """A model whose configuration names words of `texts`, and no mask token."""
    model = base_model("gpt2")
    model.config.eos_token_id = [25, 26]
    model.config.image_token_index = 27
    model.config.mask_token_id = None
    return model


def test_tokens_that_a_configuration_names_stay(model_with_named_tokens):
    batch = texts()
    ids = batch["input_ids"]
    copy = swapped(batch, model=model_with_named_tokens)
    named = torch.tensor([25, 26, 27])
    is_named = torch.isin(ids, named)
    assert torch.equal(copy[is_named], ids[is_named])
    is_changed = copy != ids
    assert not torch.isin(copy[is_changed], named).any()


def test_a_seed_gives_the_same_copy(model_with_named_tokens):
    def copy(seed: int) -> torch.Tensor:
        return swapped(texts(), model=model_with_named_tokens, seed=seed)

    first = copy(seed=0)
    assert torch.equal(copy(seed=0), first)
    assert not torch.equal(copy(seed=1), first)

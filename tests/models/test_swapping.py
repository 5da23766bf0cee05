"""Copies of texts with swapped tokens."""

import pytest
import torch
from torch import nn

from laplace_lora_ext.models.swapping import Swapping
from tests.support.models import base_model
from tests.support.posteriors import generator

N_TEXTS = 40
LENGTH = 24
PROMPT = [5, 6, 7]
END = 2
PADDING = 0
FIRST_WORD = 20  # tokens below have a meaning


def texts(padding_side: str = "right") -> dict[str, torch.Tensor]:
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
    batch: dict[str, torch.Tensor],
    *texts: dict[str, torch.Tensor],
    model: nn.Module | None = None,
    seed: int = 0,
) -> torch.Tensor:
    """Swap a batch's tokens for those of some texts, or of the batch."""
    swapping = Swapping(texts or [batch], model, generator(seed))
    return swapping(batch)["input_ids"]


@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_three_tenths_of_what_is_no_prompt_are_swapped_for_tokens_of_texts(
    padding_side,
):
    batch = texts(padding_side)
    first = {key: value[:25] for key, value in batch.items()}
    second = {key: value[25:] for key, value in batch.items()}
    copy = swapped(batch, first, second)
    ids = batch["input_ids"]
    is_word = ids >= FIRST_WORD
    is_changed = copy != ids
    # Prompt, end and padding stay.
    assert is_word[is_changed].all()
    n_words = is_word.sum(1)
    n_changed = is_changed.sum(1)
    assert (n_changed <= (0.3 * n_words).round()).all()
    # One in forty drawn tokens is the same as before.
    share = (n_changed.sum() / n_words.sum()).item()
    assert 0.27 < share <= 0.3
    words_of_texts = ids[is_word].unique()
    assert torch.isin(copy[is_changed], words_of_texts).all()
    if padding_side == "right":  # every place behind the prompt has its turn
        assert is_changed[:, 4:8].any(0).all()


def test_tokens_are_drawn_as_often_as_they_stand_in_texts():
    ids = torch.full((1000, 10), 30)
    ids[:, 0] = torch.arange(100, 1100)  # no two texts begin alike: there is no prompt
    ids[:100, 5:] = 40
    copy = swapped({"input_ids": ids})
    share_before = (ids == 40).double().mean().item()
    share_after = (copy == 40).double().mean().item()
    assert share_after == pytest.approx(share_before, abs=0.01)
    assert not torch.equal(copy, ids)


def test_texts_of_a_prompt_alone_stay():
    ids = torch.tensor([PROMPT, PROMPT])
    assert torch.equal(swapped({"input_ids": ids}), ids)


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
    def copy(seed):
        return swapped(texts(), model=model_with_named_tokens, seed=seed)

    assert torch.equal(copy(0), copy(0))
    assert not torch.equal(copy(0), copy(1))

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
    ids = torch.randint(
        FIRST_WORD,
        60,
        (N_TEXTS, LENGTH),
        generator=generator(),
    )
    lengths = torch.randint(
        8,
        LENGTH + 1,
        (N_TEXTS,),
        generator=generator(1),
    )
    mask = torch.zeros(N_TEXTS, LENGTH, dtype=torch.long)
    for row, length in enumerate(lengths.tolist()):
        ids[row, : len(PROMPT)] = torch.tensor(PROMPT)
        ids[row, length - 1] = END
        ids[row, length:] = PADDING
        mask[row, :length] = 1
        if padding_side == "left":
            ids[row] = ids[row].roll(LENGTH - length)
            mask[row] = mask[row].roll(LENGTH - length)
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
    may_go = batch["attention_mask"].bool() & (ids >= FIRST_WORD)
    is_changed = copy != ids
    assert not (is_changed & ~may_go).any()  # prompt, end and padding stay
    at_most = (0.3 * may_go.sum(1)).round()
    assert (is_changed.sum(1) <= at_most).all()
    # One in forty drawn tokens is the same as before.
    share = (is_changed.sum() / may_go.sum()).item()
    assert 0.27 < share <= 0.3
    assert set(copy[is_changed].tolist()) <= set(ids[may_go].tolist())
    if padding_side == "right":  # every place behind the prompt has its turn
        assert is_changed.float().mean(0)[4:8].min() > 0


def test_tokens_are_drawn_as_often_as_they_stand_in_texts():
    ids = torch.full((1000, 10), 30)
    ids[:, 0] = torch.arange(100, 1100)  # no two texts begin alike: there is no prompt
    ids[:100, 5:] = 40
    copy = swapped({"input_ids": ids})
    before = (ids == 40).double().mean()
    after = (copy == 40).double().mean()
    assert (after - before).abs() < 0.01
    assert not torch.equal(copy, ids)


def test_tokens_that_a_configuration_names_stay_and_a_seed_gives_the_same_copy():
    batch = texts()
    ids = batch["input_ids"]
    model = base_model("gpt2")
    model.config.update(
        {
            "eos_token_id": [25, 26],
            "image_token_index": 27,
            "mask_token_id": None,
        }
    )
    named = torch.tensor([25, 26, 27])
    copy = swapped(batch, model=model, seed=0)
    is_named = torch.isin(ids, named)
    assert torch.equal(copy[is_named], ids[is_named])
    assert not torch.isin(copy[copy != ids], named).any()
    assert torch.equal(copy, swapped(batch, model=model, seed=0))
    assert not torch.equal(copy, swapped(batch, model=model, seed=1))


def test_texts_of_a_prompt_alone_stay():
    ids = torch.tensor([PROMPT, PROMPT])
    assert torch.equal(swapped({"input_ids": ids}), ids)

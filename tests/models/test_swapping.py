"""Copies of texts with swapped tokens."""

from __future__ import annotations

import pytest
import torch

from laplace_lora_ext.models.swapping import Swapping, special_tokens
from tests.support.models import base_model
from tests.support.posteriors import generator

N_TEXTS, LENGTH, PROMPT = 40, 24, 3


def texts(padding_side: str = "right") -> tuple[torch.Tensor, torch.Tensor]:
    """Texts of 8 to 24 tokens that begin with the prompt 5, 6, 7 and end with 2, padded by 0."""
    ids = torch.randint(20, 60, (N_TEXTS, LENGTH), generator=generator())
    ids[:, :PROMPT] = torch.tensor([5, 6, 7])
    lengths = torch.randint(8, LENGTH + 1, (N_TEXTS,), generator=generator(1))
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    ids[torch.arange(N_TEXTS), lengths - 1] = 2
    ids = ids * mask
    if padding_side == "left":
        ids, mask = (torch.stack([r.roll(int(LENGTH - n)) for r, n in zip(x, lengths, strict=True)])
                     for x in (ids, mask))  # fmt: skip
    return ids, mask


@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_three_tenths_of_what_is_no_prompt_are_swapped_for_tokens_of_texts(padding_side):
    ids, mask = texts(padding_side)
    swapped = Swapping([(ids[:25], mask[:25]), (ids[25:], mask[25:])])(ids, mask, generator())
    may_go = mask.bool() & (ids >= 20)
    changed = swapped != ids
    assert not (changed & ~may_go).any()  # prompt, end and padding stay
    assert (changed.sum(1) <= (0.3 * may_go.sum(1)).round()).all()
    # One in forty drawn tokens is the same as before.
    assert 0.27 < (changed.sum() / may_go.sum()).item() <= 0.3
    assert set(swapped[changed].tolist()) <= set(ids[may_go].tolist())
    assert changed.float().mean(0)[4:8].min() > 0 if padding_side == "right" else True


def test_tokens_are_drawn_as_often_as_they_stand_in_texts():
    ids = torch.full((1000, 10), 30)
    ids[:, 0], ids[:100, 5:] = torch.arange(100, 1100), 40
    swapped = Swapping([(ids, None)])(ids, None, generator())
    before, after = ((x == 40).double().mean().item() for x in (ids, swapped))
    assert abs(after - before) < 0.01
    assert not torch.equal(swapped, ids)


def test_special_tokens_stay_and_a_seed_gives_the_same_copy():
    ids, mask = texts()
    swapping = Swapping([(ids, mask)], special={25, 26})
    special = (ids == 25) | (ids == 26)
    one, same, other = (swapping(ids, mask, generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(one[special], ids[special])
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert not torch.isin(one[one != ids], torch.tensor([25, 26])).any()


def test_texts_of_a_prompt_alone_stay():
    ids = torch.tensor([[5, 6, 7], [5, 6, 7]])
    assert torch.equal(Swapping([(ids, None)])(ids), ids)


def test_special_tokens_are_those_that_a_configuration_names():
    model = base_model("gpt2")
    model.config.update({"eos_token_id": [4, 5], "image_token_index": 9, "mask_token_id": None})
    assert special_tokens(model) >= {0, 4, 5, 9}
    assert all(isinstance(token, int) for token in special_tokens(model))

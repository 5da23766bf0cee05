"""Copies of texts with swapped tokens."""

import pytest
import torch

from laplace_lora_ext.models.swapping import Swapping
from tests.support.models import base_model
from tests.support.posteriors import generator

N_TEXTS = 40
LENGTH = 24
PROMPT = 3


def texts(padding_side: str = "right") -> dict[str, torch.Tensor]:
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
    return {"input_ids": ids, "attention_mask": mask}


def swapped(batch: dict[str, torch.Tensor], *texts: dict, model=None, seed=0) -> torch.Tensor:
    """Tokens of a batch's copy, swapped for those of some texts, or of the batch itself."""
    return Swapping(texts or [batch], model, generator(seed))(batch)["input_ids"]


@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_three_tenths_of_what_is_no_prompt_are_swapped_for_tokens_of_texts(padding_side):
    batch = texts(padding_side)
    ids, mask = batch.values()
    parts = [{k: v[place] for k, v in batch.items()} for place in (slice(25), slice(25, None))]
    copy = swapped(batch, *parts)
    may_go = mask.bool() & (ids >= 20)
    changed = copy != ids
    assert not (changed & ~may_go).any()  # prompt, end and padding stay
    assert (changed.sum(1) <= (0.3 * may_go.sum(1)).round()).all()
    # One in forty drawn tokens is the same as before.
    assert 0.27 < (changed.sum() / may_go.sum()).item() <= 0.3
    assert set(copy[changed].tolist()) <= set(ids[may_go].tolist())
    assert changed.float().mean(0)[4:8].min() > 0 if padding_side == "right" else True


def test_tokens_are_drawn_as_often_as_they_stand_in_texts():
    ids = torch.full((1000, 10), 30)
    ids[:, 0] = torch.arange(100, 1100)
    ids[:100, 5:] = 40
    copy = swapped({"input_ids": ids})
    before, after = ((x == 40).double().mean().item() for x in (ids, copy))
    assert abs(after - before) < 0.01
    assert not torch.equal(copy, ids)


def test_tokens_that_a_configuration_names_stay_and_a_seed_gives_the_same_copy():
    batch = texts()
    model = base_model("gpt2")
    named = {"eos_token_id": [25, 26], "image_token_index": 27, "mask_token_id": None}
    model.config.update(named)
    one, same, other = (swapped(batch, model=model, seed=seed) for seed in (0, 0, 1))
    special = torch.isin(batch["input_ids"], torch.tensor([25, 26, 27]))
    assert torch.equal(one[special], batch["input_ids"][special])
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert not torch.isin(one[one != batch["input_ids"]], torch.tensor([25, 26, 27])).any()


def test_texts_of_a_prompt_alone_stay():
    ids = torch.tensor([[5, 6, 7], [5, 6, 7]])
    assert torch.equal(swapped({"input_ids": ids}), ids)

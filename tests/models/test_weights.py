"""LoRA weights as one vector and as one tensor each, and calls with others in their place."""

import pytest
import torch

from laplace_lora_ext.models.lora_layers import find_blocks
from laplace_lora_ext.models.weights import LoRAWeights, flattened, shaped
from tests.support.models import lora_model, pairs, plain_model
from tests.support.texts import fitted_text, text_batches


def test_a_vector_of_all_weights_and_back():
    blocks = find_blocks(lora_model("bert"))
    vector = flattened(blocks, torch.device("cpu"))
    assert torch.equal(vector, torch.cat([block.weight.detach().flatten() for block in blocks]))
    for block, values in zip(blocks, shaped(vector, blocks), strict=True):
        assert torch.equal(values, block.weight)
    vector.zero_()
    assert all(block.weight.any() for block in blocks)


def test_other_weights_take_part_in_a_call_alone():
    la = fitted_text()
    (batch,) = text_batches(batch_size=6)
    weights = LoRAWeights(la.model, la.blocks)
    with torch.no_grad():
        before = la.model(batch)
        moved = weights.run(batch, [2 * value for value in weights.values])
        torch.testing.assert_close(weights.run(batch, weights.values), before)
        assert (moved - before).abs().max() > 0.01
        torch.testing.assert_close(la.model(batch), before)


@pytest.mark.parametrize(
    ("settings", "are_plain"),
    [({}, True), ({"use_dora": True}, False), ({"target_modules": ["embed_in"]}, False)],
)
def test_weights_are_plain_where_a_layer_is_all_that_depends_on_them(settings, are_plain):
    model = lora_model("gpt_neox", **settings)
    assert LoRAWeights(model, find_blocks(model)).are_plain == are_plain


def test_batches_of_one_call_have_weights_of_their_own():
    model = lora_model("gpt2").eval()
    weights = LoRAWeights(model, find_blocks(model))
    each = [weights.values, [2 * value for value in weights.values]]
    ids = torch.arange(24).view(4, 6) + 5
    with torch.no_grad():
        parts = ids.chunk(2)
        alone = [
            weights.call(values, (part,), {}).logits
            for values, part in zip(each, parts, strict=True)
        ]
        stacked = [torch.stack(of) for of in zip(*each, strict=True)]
        joined = weights.call_joined(stacked, 2, (ids,), {}).logits
        torch.testing.assert_close(joined, torch.cat(alone))
        with pytest.raises(ValueError, match="not 6 texts"):
            weights.call_joined(stacked, 3, (ids,), {})
        torch.testing.assert_close(model(ids).logits[:2], alone[0])


def test_rows_without_positions_may_be_any_and_get_no_weights_of_their_own():
    model = plain_model()
    weights = LoRAWeights(model, find_blocks(model))
    ((x, _),) = pairs()
    stacked = [torch.stack([value, 2 * value]) for value in weights.values]
    with pytest.raises(ValueError, match=r"A layer was given \(4, 5\), not 4 texts"):
        weights.call_joined(stacked, 2, (x,), {})

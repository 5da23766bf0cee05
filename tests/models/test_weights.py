"""LoRA weights as one vector and as one tensor each, and calls with others in their place."""

import torch

from laplace_lora_ext.models.lora_layers import find_blocks
from laplace_lora_ext.models.weights import LoRAWeights, flattened, shaped
from tests.support.models import lora_model
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

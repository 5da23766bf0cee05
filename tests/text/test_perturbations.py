"""Draws' logits by every way, against dense Jacobians and drawn weights."""

from functools import partial

import pytest
import torch

from laplace_lora_ext.models.weights import LoRAWeights
from laplace_lora_ext.text.draws import Noise
from laplace_lora_ext.text.perturbations import (
    CentralDifference,
    ForwardMode,
    SampledWeights,
    drawn_logits,
)
from tests.support.models import lora_model
from tests.support.texts import fitted_text, text_batches, token_jacobians


def drawn(la, way, n_samples=3):
    (batch,) = text_batches(batch_size=6, padding_side="left", padded_to=9)
    weights = LoRAWeights(la.model, la.blocks)
    directions = Noise(n_samples, 0).directions(la.posterior_precision, la.blocks)
    with torch.no_grad():
        f = la.model(batch)
        passes = partial(map, partial(weights.run, batch))
        return torch.stack(list(drawn_logits(way, weights.values, directions, passes, f)))


@pytest.mark.parametrize(
    ("way", "tolerance"), [(ForwardMode(), 1e-8), (CentralDifference(1e-4), 1e-6)]
)
def test_linearised_draws_are_those_of_dense_jacobians(way, tolerance):
    model = lora_model("gpt2").eval()
    la = fitted_text(model)
    J, f, _ = token_jacobians(model, text_batches())
    directions = Noise(3, 0).directions(la.posterior_precision, la.blocks)
    moves = torch.stack([torch.cat([d.flatten() for d in parts]) for parts in directions])
    expected = f + torch.einsum("nvp,sp->snv", J, moves)
    torch.testing.assert_close(drawn(la, way), expected, rtol=tolerance, atol=tolerance)


def test_sampled_weights_are_those_of_the_model_with_drawn_weights():
    la = fitted_text()
    (direction,) = Noise(1, 0).directions(la.posterior_precision, la.blocks)
    found = drawn(la, SampledWeights(), n_samples=1)[0]
    with torch.no_grad():
        for block, move in zip(la.blocks, direction, strict=True):
            block.layer.weight += move
        torch.testing.assert_close(la.model(text_batches(batch_size=6)[0]), found)


def test_the_length_of_a_difference_does_not_depend_on_that_of_the_draw():
    values, direction = [torch.ones(4)], [torch.arange(4.0)]
    short = CentralDifference(0.1).draw(values, direction).weights
    long = CentralDifference(0.1).draw(values, [100 * direction[0]]).weights
    torch.testing.assert_close(short, long)
    assert (short[0][0] - values[0]).norm() == pytest.approx(0.1 * 2)

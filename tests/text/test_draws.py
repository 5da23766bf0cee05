"""Draws have the posterior's covariance, and are the same ones whenever asked."""

import torch

from laplace_lora_ext.models.weights import flattened
from laplace_lora_ext.text.draws import drawn
from laplace_lora_ext.tuning.loss_search import draw_seed
from tests.support.posteriors import generator
from tests.support.texts import drawn_models, fitted_text


def test_a_draw_is_the_mean_and_the_root_of_the_covariance_times_noise():
    la = fitted_text(prior_precision=3.0)
    seed = draw_seed(generator())
    once, again = (list(drawn(la, 2, seed)) for _ in range(2))
    for values, same, model in zip(once, again, drawn_models(la, 2, generator()), strict=True):
        expected = dict(model.named_parameters())
        for value, other, block in zip(values, same, la.blocks, strict=True):
            assert torch.equal(value, other)
            torch.testing.assert_close(value, expected[block.name], rtol=1e-8, atol=1e-10)
    assert not torch.equal(once[0][0], once[1][0])
    assert torch.equal(flattened(la.blocks, la._device), la.mean)

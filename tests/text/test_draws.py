"""Draws have the posterior's covariance, and are the same ones whenever asked."""

import torch

from laplace_lora_ext.text.draws import Noise
from tests.support.dense import power
from tests.support.texts import fitted_text


def flat(direction):
    return torch.cat([part.flatten() for part in direction])


def test_a_draw_is_the_root_of_the_covariance_times_noise():
    la = fitted_text()
    noise = torch.randn(
        la.n_params, generator=torch.Generator().manual_seed(6), dtype=torch.float64
    )
    found = flat(Noise(2, 5).direction(1, la.posterior_precision, la.blocks))
    expected = power(la.posterior_precision.to_matrix(), -0.5) @ noise
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_draws_are_the_same_whenever_asked_and_have_the_shapes_of_the_weights():
    la = fitted_text()
    noise = Noise(3, 0)
    once, again = (list(noise.directions(la.posterior_precision, la.blocks)) for _ in range(2))
    assert len(once) == 3
    assert [part.shape for part in once[0]] == [block.weight.shape for block in la.blocks]
    assert all(torch.equal(flat(a), flat(b)) for a, b in zip(once, again, strict=True))
    assert not torch.equal(flat(once[0]), flat(once[1]))

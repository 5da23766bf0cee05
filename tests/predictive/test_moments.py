"""Gaussian logits in the place of a batch."""

import pytest
import torch

from laplace_lora_ext import Moments
from tests.support.models import ragged_batches
from tests.support.posteriors import fitted


@pytest.mark.parametrize("link_approx", ["probit", "mc", "bridge", "bridge_norm"])
def test_moments_take_the_place_of_a_batch(link_approx):
    la = fitted(dtype=torch.float32, prior_precision=0.5)
    batch = ragged_batches()[0]
    moments = la.predictive_statistics([batch]).moments(0.5)
    kept = Moments(moments.f_mu.clone(), moments.f_var.clone())

    def predict(x):
        return la(x, link_approx=link_approx, generator=torch.Generator().manual_seed(0))

    torch.testing.assert_close(predict(moments), predict(batch), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(moments, kept, rtol=0, atol=0)
    samples = [la.functional_samples(x, generator=torch.Generator()) for x in (moments, batch)]
    torch.testing.assert_close(*samples, rtol=1e-4, atol=1e-4)


def test_moments_have_neither_inputs_nor_joint_covariances():
    la = fitted()
    moments = la.predictive_statistics(ragged_batches()).moments(1.0)
    with pytest.raises(ValueError, match="pass these"):
        la(moments, pred_type="nn", link_approx="mc")
    with pytest.raises(ValueError, match="pass the inputs"):
        la.predictive_moments(moments, joint=True)


def test_moments_are_converted_and_split_together():
    moments = Moments(torch.arange(10.0).reshape(5, 2), torch.arange(20.0).reshape(5, 2, 2))
    converted = moments.to(torch.float64)
    assert isinstance(converted, Moments)
    assert {part.dtype for part in converted} == {torch.float64}
    parts = list(moments.split([3, 2]))
    assert [len(part.f_mu) for part in parts] == [3, 2]
    assert torch.equal(torch.cat([part.f_var for part in parts]), moments.f_var)

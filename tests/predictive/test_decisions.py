"""Entropies and variances against formulas of their own, and against the link's probabilities."""

import numpy as np
import pytest
import torch

from laplace_lora_ext import Moments
from laplace_lora_ext.predictive.decisions import Prediction
from laplace_lora_ext.predictive.links import mean_field, own_links, softmax_samples
from tests.support.models import ragged_batches
from tests.support.posteriors import STRUCTURES, fitted, generator, plain_regression


def test_two_classes_against_numerical_integration():
    """Only the difference of two logits counts, and its integral is one-dimensional."""
    mean, variance = 0.8, 2.5
    moments = Moments(
        torch.tensor([[mean, 0.0]]).double(),
        torch.diag(torch.tensor([variance, 0.0]))[None].double(),
    )
    noise = torch.randn(200_000, 1, 2, generator=generator()).double()
    drawn = softmax_samples(*moments, noise).exp()
    found = Prediction.of_draws(mean_field(*moments).exp(), drawn)
    grid = torch.linspace(-8, 8, 20_001).double()
    weight = (-grid.square() / 2).exp()
    weight = weight / weight.sum()
    p = torch.sigmoid(mean + variance**0.5 * grid)
    both = torch.stack([p, 1 - p])
    aleatoric = (torch.special.entr(both).sum(0) * weight).sum()
    expected = (p * weight).sum()
    total = torch.special.entr(torch.stack([expected, 1 - expected])).sum()
    spread = (p.square() * weight).sum() - expected**2
    close = {"rtol": 0, "atol": 3e-3}
    torch.testing.assert_close(found.total_entropy[0], total, **close)
    torch.testing.assert_close(found.aleatoric_entropy[0], aleatoric, **close)
    torch.testing.assert_close(found.epistemic_entropy[0], total - aleatoric, **close)
    torch.testing.assert_close(found.label_variance[0], spread, **close)
    assert found.labels.tolist() == [0]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("link", ["mean_field", "probit", "mc"])
def test_probabilities_are_those_of_the_link(structure, link):
    la, batch = fitted(structure=structure), ragged_batches()[0]
    found = la.predict(batch, link_approx=link, n_samples=50, generator=generator())
    moments = la.predictive_moments(batch)
    expected = la(batch, link_approx=link, n_samples=50, generator=generator())
    assert torch.equal(found.probabilities, expected)
    of_moments = la(moments, link_approx=link, n_samples=50, generator=generator())
    for same in (of_moments, own_links(50, generator())[link](*moments).exp()):
        torch.testing.assert_close(same, expected)
    assert torch.equal(found.labels, expected.argmax(-1))
    assert all(torch.isfinite(values).all() for values in found)
    assert (found.epistemic_entropy > 0).all()
    torch.testing.assert_close(
        found.total_entropy, found.aleatoric_entropy + found.epistemic_entropy
    )
    if link == "mean_field":
        same, other = (la.predict(batch, n_samples=50, generator=generator(s)) for s in (0, 1))
        assert torch.equal(found.epistemic_entropy, same.epistemic_entropy)
        assert not torch.equal(found.epistemic_entropy, other.epistemic_entropy)
        with pytest.raises(ValueError, match="link_approx 'bridge' is none of"):
            la.predict(batch, link_approx="bridge")
        with pytest.raises(ValueError, match=link):
            la(batch, pred_type="nn", link_approx=link)


def test_probabilities_for_scikit_learn_are_an_array_and_no_single_draw():
    la, batch = fitted(), ragged_batches()[0]
    found = la.predict_proba(batch)
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, la(batch, link_approx="mean_field").numpy())
    before = torch.get_rng_state()
    found = la.predict_proba(batch, link_approx="mc")
    assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(found, la.predict_proba(batch, link_approx="mc"))
    many = la(batch, link_approx="mc", n_samples=100_000, generator=generator())
    np.testing.assert_allclose(found, many.numpy(), atol=0.05)


def test_regression_has_no_classes():
    la, X = plain_regression()
    with pytest.raises(ValueError, match="regression predicts numbers"):
        la.predict(X)

"""What a call of a posterior returns."""

from __future__ import annotations

import pytest
import torch

from tests.support.models import ragged_batches
from tests.support.posteriors import fitted, generator

LINKS = ["mc", "probit", "bridge", "bridge_norm"]


@pytest.fixture
def batches():
    return ragged_batches()


@pytest.fixture
def la(batches):
    return fitted(batches=batches)


@pytest.mark.parametrize("link_approx", LINKS)
def test_glm_probabilities(la, batches, link_approx):
    probs = la(batches[0], pred_type="glm", link_approx=link_approx)
    assert probs.shape == (3, 3)
    torch.testing.assert_close(probs.sum(1), torch.ones(3).double())
    assert probs.min() > 0


def test_monte_carlo_links_approach_the_integral(la, batches):
    """Against draws from a Cholesky root of the same moments, which are not the library's."""
    many = la(batches[0], link_approx="mc", n_samples=100_000, generator=generator())
    few = la(batches[0], link_approx="mc", n_samples=1_000, generator=generator(1))
    torch.testing.assert_close(many, few, rtol=0, atol=0.05)
    f_mu, f_var = la.predictive_moments(batches[0])
    root = torch.linalg.cholesky(f_var)
    noise = torch.randn(100_000, 3, 3, generator=generator(2)).double()
    expected = (f_mu + torch.einsum("bij,sbj->sbi", root, noise)).softmax(-1).mean(0)
    torch.testing.assert_close(many, expected, rtol=0, atol=0.01)


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_a_generator_seeds_every_prediction(la, batches, pred_type):
    keywords = {"pred_type": pred_type, "n_samples": 5}
    for call in (
        lambda g: la(batches[0], link_approx="mc", generator=g, **keywords),
        lambda g: la.functional_samples(batches[0], generator=g, **keywords),
        lambda g: la.predictive_samples(batches[0], generator=g, **keywords),
    ):
        assert torch.equal(call(generator()), call(generator()))
        assert not torch.equal(call(generator()), call(generator(1)))


@pytest.mark.parametrize("n_samples", [0, -1, 2.5])
@pytest.mark.parametrize(
    "use",
    [
        lambda la, x, n: la(x, link_approx="mc", n_samples=n),
        lambda la, x, n: la(x, pred_type="nn", link_approx="mc", n_samples=n),
        lambda la, x, n: la(x, pred_type="nn", n_samples=n, generator=generator()),
        lambda la, x, n: la.predict(x, n_samples=n),
        lambda la, x, n: la.functional_samples(x, n_samples=n),
        lambda la, x, n: la.predictive_samples(x, n_samples=n),
        lambda la, x, n: la.predictive_samples(x, pred_type="nn", n_samples=n),
        lambda la, x, n: la.sample_adapters(n, "nowhere"),
    ],
)
def test_there_are_no_predictions_without_samples(use, n_samples):
    with pytest.raises(ValueError, match="n_samples must be at least 1, and whole, not"):
        use(fitted(), ragged_batches()[0], n_samples)

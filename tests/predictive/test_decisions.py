"""Decisions have the link's probabilities; mixtures are tested elsewhere."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from laplace_lora_ext.predictive.links import own_links
from tests.support.models import ragged_batches
from tests.support.posteriors import (
    STRUCTURES,
    fitted,
    generator,
    plain_regression,
)


@pytest.fixture
def batch():
    return ragged_batches()[0]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("link", ["mean_field", "probit", "mc"])
def test_probabilities_are_those_of_the_link(structure, link, batch):
    la = fitted(structure=structure)
    f_mu, f_var = moments = la.predictive_moments(batch)

    def probabilities(given):
        return la(given, link_approx=link, n_samples=50, generator=generator())

    expected = probabilities(batch)
    assert_close(probabilities(moments), expected)
    apply_link = own_links(50, generator())[link]
    assert_close(apply_link(f_mu, f_var).exp(), expected)

    found = la.predict(batch, link_approx=link, n_samples=50, generator=generator())
    assert torch.equal(found.probabilities, expected)
    assert torch.equal(found.labels, expected.argmax(-1))
    for values in found:
        assert torch.isfinite(values).all()
    assert (found.epistemic_entropy > 0).all()
    of_parts = found.aleatoric_entropy + found.epistemic_entropy
    assert_close(found.total_entropy, of_parts)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_entropies_are_drawn_by_the_generator(structure, batch):
    la = fitted(structure=structure)

    def epistemic(seed):
        decision = la.predict(batch, n_samples=50, generator=generator(seed))
        return decision.epistemic_entropy

    assert torch.equal(epistemic(seed=0), epistemic(seed=0))
    assert not torch.equal(epistemic(seed=0), epistemic(seed=1))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_links_of_other_predictions_are_refused(structure, batch):
    la = fitted(structure=structure)
    with pytest.raises(ValueError, match="link_approx 'bridge' is none of"):
        la.predict(batch, link_approx="bridge")
    with pytest.raises(ValueError, match="mean_field"):
        la(batch, pred_type="nn", link_approx="mean_field")


def test_probabilities_for_scikit_learn_are_an_array(batch):
    la = fitted()
    found = la.predict_proba(batch)
    assert isinstance(found, np.ndarray)
    expected = la(batch, link_approx="mean_field")
    np.testing.assert_array_equal(found, expected.numpy())


def test_probabilities_for_scikit_learn_are_no_single_draw(batch):
    la = fitted()
    before = torch.get_rng_state()
    found = la.predict_proba(batch, link_approx="mc")
    again = la.predict_proba(batch, link_approx="mc")
    assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(found, again)
    by_many_draws = la(
        batch,
        link_approx="mc",
        n_samples=100_000,
        generator=generator(),
    )
    # Of one draw, the error would be about as large as a probability.
    np.testing.assert_allclose(found, by_many_draws.numpy(), atol=0.05)


def test_regression_has_no_classes():
    la, X = plain_regression()
    message = r"regression predicts numbers.*la\.predict\(x\)"
    with pytest.raises(ValueError, match=message):
        la.predict_proba(X)


def entropy(p: torch.Tensor) -> torch.Tensor:
    return torch.special.entr(p).sum(-1)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_epistemic_entropy_is_what_bald_asks_for(structure):
    la = fitted(structure=structure, prior_precision=0.3)
    (pool,) = ragged_batches(batch_size=8)
    decision = la.predict(pool, n_samples=20_000, generator=generator())
    found = decision.epistemic_entropy

    f_mu, f_var = la.predictive_moments(pool)
    # A covariance that is nearly singular may have no Cholesky factor.
    values, vectors = torch.linalg.eigh(f_var)
    deviations = values.clamp_min(0).sqrt()
    root = vectors * deviations[:, None]
    noise = torch.randn(20_000, *f_mu.shape, generator=generator(1)).double()
    logits = f_mu + torch.einsum("bij,sbj->sbi", root, noise)
    p = logits.softmax(-1)
    # A label's information on the weights, H(E p) - E H(p) (Houlsby, 2011).
    expected = entropy(p.mean(0)) - entropy(p).mean(0)
    # Two estimates by 20,000 draws each.
    assert_close(found, expected, rtol=0.02, atol=2e-3)
    assert found.argmax() == expected.argmax()  # the text to be labelled next

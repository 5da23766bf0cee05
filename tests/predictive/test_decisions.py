"""Decisions have the link's probabilities; `tests/test_mixture.py` has entropies and variances."""

import numpy as np
import pytest
import torch

from laplace_lora_ext.predictive.links import own_links
from tests.support.models import ragged_batches
from tests.support.posteriors import (
    STRUCTURES,
    fitted,
    generator,
    plain_regression,
)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("link", ["mean_field", "probit", "mc"])
def test_probabilities_are_those_of_the_link(structure, link):
    la, batch = fitted(structure=structure), ragged_batches()[0]
    found = la.predict(
        batch,
        link_approx=link,
        n_samples=50,
        generator=generator(),
    )
    moments = la.predictive_moments(batch)
    expected = la(
        batch,
        link_approx=link,
        n_samples=50,
        generator=generator(),
    )
    assert torch.equal(found.probabilities, expected)
    of_moments = la(
        moments,
        link_approx=link,
        n_samples=50,
        generator=generator(),
    )
    for same in (
        of_moments,
        own_links(50, generator())[link](*moments).exp(),
    ):
        torch.testing.assert_close(same, expected)
    assert torch.equal(found.labels, expected.argmax(-1))
    assert all(torch.isfinite(values).all() for values in found)
    assert (found.epistemic_entropy > 0).all()
    torch.testing.assert_close(
        found.total_entropy,
        found.aleatoric_entropy + found.epistemic_entropy,
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
    many = la(
        batch,
        link_approx="mc",
        n_samples=100_000,
        generator=generator(),
    )
    np.testing.assert_allclose(found, many.numpy(), atol=0.05)


def test_regression_has_no_classes():
    la, X = plain_regression()
    with pytest.raises(ValueError, match="regression predicts numbers"):
        la.predict(X)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_epistemic_entropy_is_what_bald_asks_for(structure):
    """The information of a label on the weights, `H(E p) - E H(p)` (Houlsby et al., 2011)."""
    la, pool = (
        fitted(structure=structure, prior_precision=0.3),
        ragged_batches(),
    )
    found = la.predict(pool, n_samples=20_000, generator=generator()).epistemic_entropy
    f_mu, f_var = (torch.cat(p) for p in zip(*map(la.predictive_moments, pool), strict=True))
    noise = torch.randn(20_000, *f_mu.shape, generator=generator(1)).double()
    values, vectors = torch.linalg.eigh(f_var)
    root = vectors * values.clamp_min(0).sqrt()[:, None]
    logits = f_mu + torch.einsum("bij,sbj->sbi", root, noise)
    p = logits.softmax(-1)
    expected = torch.special.entr(p.mean(0)).sum(-1) - torch.special.entr(p).sum(-1).mean(0)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=2e-3)
    assert found.argmax() == expected.argmax()  # the text to be labelled next

"""Decisions have the link's probabilities; mixtures are tested elsewhere."""

from copy import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    default_collate,
)

from laplace_lora_ext import LaplaceMixture, Prediction
from laplace_lora_ext.predictive.links import log_probabilities
from tests.support.models import first_batch, ragged_batches
from tests.support.posteriors import fitted, generator, normal, plain_regression
from tests.support.ranks import Texts


@pytest.fixture
def batch():
    return first_batch()


@pytest.fixture(params=["lowrank_kron", "full"])
def la(request: pytest.FixtureRequest):
    """A fitted posterior of our structure and of one of the host's."""
    return fitted(structure=request.param)


@pytest.fixture(params=["mean_field", "probit", "mc"])
def link(request: pytest.FixtureRequest) -> str:
    return request.param


def probabilities(la: Any, given: Any, link: str) -> Tensor:
    """Predict with the same noise each time."""
    return la(given, link_approx=link, n_samples=50, generator=generator())


def decision(
    la: Any, batch: dict[str, Tensor], link: str = "mean_field", seed: int = 0
) -> Prediction:
    """Decide with the noise of a seed."""
    return la.predict(batch, link_approx=link, n_samples=50, generator=generator(seed))


# --- decisions ------------------------------------------------------------------------


def test_predictions_have_the_links_probabilities(la, link, batch):
    moments = la.predictive_moments(batch)
    expected = log_probabilities(moments, link, 50, generator()).exp()
    assert_close(probabilities(la, batch, link), expected)
    assert_close(probabilities(la, moments, link), expected)
    found = decision(la, batch, link)
    assert_close(found.probabilities, expected)
    assert torch.equal(found.labels, expected.argmax(-1))
    both = found.aleatoric_entropy + found.epistemic_entropy
    assert_close(found.total_entropy, both)
    first = found.epistemic_entropy
    assert first.min() > 0
    assert torch.equal(decision(la, batch, link).epistemic_entropy, first)
    assert not torch.equal(decision(la, batch, link, seed=1).epistemic_entropy, first)
    with pytest.raises(ValueError, match="link_approx 'bridge'"):
        la.predict(batch, link_approx="bridge")


# --- arrays for scikit-learn ----------------------------------------------------------


def test_probabilities_for_scikit_learn_are_an_array_of_the_same_noise(batch):
    la = fitted()
    expected = la(batch, link_approx="mean_field")
    np.testing.assert_array_equal(la.predict_proba(batch), expected.numpy())
    before = torch.get_rng_state()
    found = la.predict_proba(batch, link_approx="mc")
    again = la.predict_proba(batch, link_approx="mc")
    np.testing.assert_array_equal(found, again)
    # By a generator of their own, for the user's draws are to stay as they were.
    assert torch.equal(torch.get_rng_state(), before)
    draws = {"link_approx": "mc", "n_samples": 100_000, "generator": generator()}
    # Of one draw, the error would be about as large as a probability.
    np.testing.assert_allclose(found, la(batch, **draws).numpy(), atol=0.05)


TEXTS = Texts(6)
UNORDERED = {
    "shuffle": {"shuffle": True, "batch_size": 2},
    "a shuffled batch each": {"shuffle": True, "batch_size": None},
    "batches": {"batch_sampler": BatchSampler(RandomSampler(TEXTS), 2, False)},
    "one rank": {"sampler": DistributedSampler(TEXTS, num_replicas=1, rank=0)},
    "by length": {"sampler": [5, 3, 4, 0, 1, 2]},
}


@pytest.mark.parametrize("case", UNORDERED)
def test_predictions_of_a_loader_are_in_the_order_of_its_data(case):
    torch.manual_seed(0)
    la = fitted()
    in_order = DataLoader(TEXTS, batch_size=4)
    expected = la.predict_proba(TEXTS, collate_fn=default_collate)
    assert_close(la.predict_proba(in_order), expected)
    loader = DataLoader(TEXTS, **UNORDERED[case])
    mixture = LaplaceMixture([la, copy(la)])
    for predict in (la.predict, la.predict_proba, mixture.predict):
        with pytest.raises(ValueError, match="shuffle=False"):
            predict(loader)


def test_regression_has_no_classes():
    la, X = plain_regression()
    with pytest.raises(ValueError, match="numbers"):
        la.predict_proba(X)


# --- what a label would tell ----------------------------------------------------------


def entropy(p: Tensor) -> Tensor:
    """Compute the entropy of each row of probabilities."""
    of_classes = torch.special.entr(p)
    return of_classes.sum(-1)


def drawn_probabilities(la: Any, batch: dict[str, Tensor], n: int) -> Tensor:
    """Draw probabilities `(n, B, C)` by other means than the library's."""
    f_mu, f_var = la.predictive_moments(batch)
    # A covariance that is nearly singular may have no Cholesky factor.
    values, vectors = torch.linalg.eigh(f_var)
    deviations = values.clamp_min(0).sqrt()
    root = vectors * deviations[:, None]
    noise = normal(n, *f_mu.shape, seed=1)
    apart = torch.einsum("bij,sbj->sbi", root, noise)
    logits = f_mu + apart
    return logits.softmax(-1)


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag"])
def test_the_epistemic_entropy_is_what_bald_asks_for(structure):
    la = fitted(structure=structure, prior_precision=0.3)
    (pool,) = ragged_batches(batch_size=8)
    prediction = la.predict(pool, n_samples=20_000, generator=generator())
    found = prediction.epistemic_entropy
    p = drawn_probabilities(la, pool, n=20_000)
    # A label's information on the weights, H(E p) - E H(p) (Houlsby, 2011).
    of_mean = entropy(p.mean(0))
    of_draws = entropy(p)
    expected = of_mean - of_draws.mean(0)
    # Two estimates by 20,000 draws each.
    assert_close(found, expected, rtol=0.02, atol=2e-3)
    # The text to be labelled next.
    assert found.argmax() == expected.argmax()

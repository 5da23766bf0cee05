"""Drawn functions: one for all batches, varying as the posterior says."""

import pytest
import torch
from torch.testing import assert_close

from tests.support.dense import jacobians
from tests.support.posteriors import STRUCTURES, generator, plain_regression

SEED = 5
"""Of the function that the tests are about."""


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_linearised_function_is_the_model_plus_jacobians_times_a_draw(structure):
    la, X = plain_regression(structure=structure)
    (drawn,) = la.sample(1, generator(SEED))
    model = la.model.model
    expected = model(X) + jacobians(model, X) @ (drawn - la.mean)
    function = la.function(SEED)
    assert_close(function(X), expected)
    # It is one for all batches.
    in_batches = [function(part) for part in X.split(5)]
    assert_close(torch.cat(in_batches), expected)
    another = la.function(SEED + 1)
    assert not torch.allclose(another(X), expected)


def test_a_sampled_function_is_the_network_with_drawn_weights():
    la, X = plain_regression()
    draws = {"n_samples": 1, "generator": generator(SEED)}
    (expected,) = la.functional_samples(X, "nn", **draws)
    function = la.function(SEED, pred_type="nn")
    assert_close(function(X), expected)
    # The model's own weights stay.
    weights = [block.weight.flatten() for block in la.blocks]
    assert torch.equal(torch.cat(weights), la.mean)


# --- joint samples --------------------------------------------------------------------


def test_joint_samples_have_the_joint_moments():
    la, X = plain_regression()
    few = X[:4]
    mean, covariance = la.predictive_moments(few, joint=True)
    draws = {"n_samples": 20_000, "generator": generator()}
    samples = la.functional_samples(few, joint=True, **draws).flatten(1)
    deviations = covariance.diagonal().sqrt()
    # Seven standard errors.
    assert_close(samples.mean(0), mean, rtol=0, atol=0.05 * deviations.max())
    expected = covariance / torch.outer(deviations, deviations)
    # Four standard errors.
    assert_close(samples.T.corrcoef(), expected, rtol=0, atol=0.03)
    # The host's samples would have 1 or -1.
    assert expected.abs().min() < 0.9


# --- refused --------------------------------------------------------------------------


def test_what_makes_no_function_is_refused():
    la, X = plain_regression()
    with pytest.raises(ValueError, match="joint"):
        la.functional_samples(X, "nn", joint=True)
    # Learnt variances belong to no weights.
    with pytest.raises(ValueError, match="amortized"):
        la.function(SEED, pred_type="amortized")


def test_a_function_knows_that_its_model_has_changed():
    la, X = plain_regression()
    function = la.function(SEED)
    weight = la.blocks[0].weight
    weight.data.add_(1)
    with pytest.raises(RuntimeError):
        function(X)

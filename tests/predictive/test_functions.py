"""Drawn functions: one for all batches, varying as the posterior says."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.support.dense import jacobians, unpadded
from tests.support.models import ragged_batches
from tests.support.posteriors import STRUCTURES, fitted, generator, plain_regression

SEED = 5
"""Of the function that the tests are about."""


# --- the linearised model -------------------------------------------------------------


@pytest.fixture(params=STRUCTURES)
def linearised(request: pytest.FixtureRequest) -> tuple[Any, torch.Tensor]:
    """A regression of each structure, and inputs."""
    return plain_regression(structure=request.param)


def test_a_linearised_function_is_the_model_plus_jacobians_times_a_draw(linearised):
    la, X = linearised
    (drawn,) = la.sample(1, generator(SEED))
    Js = jacobians(la.model.model, X)
    expected = la.model(X) + Js @ (drawn - la.mean)
    function = la.function(SEED)
    assert_close(function(X), expected)


def test_a_linearised_function_is_one_for_all_batches(linearised):
    la, X = linearised
    function = la.function(SEED)
    in_batches = [function(part) for part in X.split(5)]
    assert_close(torch.cat(in_batches), function(X))


def test_another_seed_gives_another_function(linearised):
    la, X = linearised
    one = la.function(SEED)
    another = la.function(SEED + 1)
    assert not torch.allclose(another(X), one(X))


def test_a_function_of_padded_texts_is_the_same_for_each_text_alone():
    la = fitted()
    batch = ragged_batches()[0]
    together = la.function(SEED)(batch)
    function = la.function(SEED)
    for row, expected in enumerate(together):
        (alone,) = function(unpadded(batch, row))
        assert_close(alone, expected)


# --- the sampled network --------------------------------------------------------------


def test_a_sampled_function_is_the_network_with_drawn_weights():
    la, X = plain_regression()
    (expected,) = la.functional_samples(
        X,
        "nn",
        n_samples=1,
        generator=generator(SEED),
    )
    function = la.function(SEED, pred_type="nn")
    assert_close(function(X), expected)


def test_a_sampled_function_leaves_the_models_weights():
    la, X = plain_regression()
    function = la.function(SEED, pred_type="nn")
    function(X)
    weights = [block.weight.flatten() for block in la.blocks]
    assert torch.equal(torch.cat(weights), la.mean)


# --- joint samples --------------------------------------------------------------------


def test_joint_samples_have_the_joint_covariance():
    la, X = plain_regression()
    few = X[:4]
    mean, covariance = la.predictive_moments(few, joint=True)
    samples = la.functional_samples(
        few,
        n_samples=20_000,
        generator=generator(),
        joint=True,
    )
    flat = samples.flatten(1)
    deviation = covariance.diagonal().sqrt()
    # Seven standard errors of a mean, and four of a correlation.
    of_mean = 0.05 * deviation.max()
    assert_close(flat.mean(0), mean, rtol=0, atol=of_mean)
    correlation = covariance / torch.outer(deviation, deviation)
    assert_close(flat.T.corrcoef(), correlation, rtol=0, atol=0.03)
    # The host's samples would have 1 or -1.
    assert correlation.abs().min() < 0.9


# --- refused --------------------------------------------------------------------------


def test_a_sampled_network_has_no_joint_samples():
    la, X = plain_regression()
    with pytest.raises(ValueError, match="joint=True is for"):
        la.functional_samples(X, "nn", joint=True)


def test_learnt_variances_make_no_function():
    la, _ = plain_regression()
    with pytest.raises(ValueError, match="neither"):
        la.function(SEED, pred_type="amortized")


def test_a_function_knows_that_its_model_has_changed():
    la, X = plain_regression()
    function = la.function(SEED)
    la.blocks[0].weight.data.add_(1)
    with pytest.raises(RuntimeError):
        function(X)

"""Drawn functions: one for all batches, varying as the posterior says."""

import pytest
import torch
from torch.testing import assert_close

from tests.support.dense import jacobians, unpadded
from tests.support.models import ragged_batches
from tests.support.posteriors import STRUCTURES, fitted, generator, plain_regression


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_linearised_function_is_the_model_plus_jacobians_times_a_draw(structure):
    la, X = plain_regression(structure=structure)
    (drawn,) = la.sample(1, generator(5))
    Js = jacobians(la.model.model, X)
    expected = la.model(X) + Js @ (drawn - la.mean)
    function = la.function(5)
    assert_close(function(X), expected)
    in_batches = [function(part) for part in X.split(5)]
    assert_close(torch.cat(in_batches), expected)
    another = la.function(6)
    assert not torch.allclose(another(X), expected)


def test_a_function_of_padded_texts_is_the_same_for_each_text_alone():
    la = fitted()
    batch = ragged_batches()[0]
    function = la.function(5)
    together = function(batch)
    for row, expected in enumerate(together):
        (alone,) = la.function(5)(unpadded(batch, row))
        assert_close(alone, expected)


def test_a_sampled_function_is_the_network_with_drawn_weights():
    la, X = plain_regression()
    expected = la.functional_samples(X, "nn", n_samples=1, generator=generator(5))
    function = la.function(5, pred_type="nn")
    assert_close(function(X), expected[0])
    # The model keeps its own weights.
    weights = [block.weight.flatten() for block in la.blocks]
    assert torch.equal(torch.cat(weights), la.mean)


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
    assert_close(flat.mean(0), mean, rtol=0, atol=0.05 * deviation.max())
    correlation = covariance / torch.outer(deviation, deviation)
    assert_close(flat.T.corrcoef(), correlation, rtol=0, atol=0.03)
    assert correlation.abs().min() < 0.9  # the host's samples would have 1 or -1


def test_what_has_no_joint_samples_is_refused():
    la, X = plain_regression()
    with pytest.raises(ValueError, match="joint=True is for"):
        la.functional_samples(X, "nn", joint=True)
    with pytest.raises(ValueError, match="neither"):
        la.function(0, pred_type="amortized")


def test_a_function_knows_that_its_model_has_changed():
    la, X = plain_regression()
    function = la.function(0)
    la.blocks[0].weight.data.add_(1)
    with pytest.raises(RuntimeError):
        function(X)

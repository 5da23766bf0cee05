"""Drawn functions: one for all batches, varying as the posterior says."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.support.dense import jacobians, unpadded
from tests.support.models import first_batch
from tests.support.posteriors import (
    STRUCTURES,
    fitted,
    generator,
    plain_regression,
)

SEED = 5
"""Of the function that the tests are about."""


# --- the linearised model -------------------------------------------------------------


@pytest.fixture(params=STRUCTURES)
def linearised(request: pytest.FixtureRequest) -> tuple[Any, Tensor]:
    """A regression of each structure, and inputs."""
    return plain_regression(structure=request.param)


def test_a_linearised_function_is_the_model_plus_jacobians_times_a_draw(linearised):
    la, X = linearised
    (drawn,) = la.sample(1, generator(SEED))
    deviation = drawn - la.mean
    model = la.model.model
    Js = jacobians(model, X)
    expected = model(X) + Js @ deviation
    function = la.function(SEED)
    found = function(X)
    assert_close(found, expected)


def test_a_linearised_function_is_one_for_all_batches(linearised):
    la, X = linearised
    function = la.function(SEED)
    together = function(X)
    in_batches = [function(part) for part in X.split(5)]
    found = torch.cat(in_batches)
    assert_close(found, together)


def test_another_seed_gives_another_function(linearised):
    la, X = linearised
    one = la.function(SEED)
    another = la.function(SEED + 1)
    outputs = one(X)
    others = another(X)
    assert not torch.allclose(others, outputs)


def test_a_function_of_padded_texts_is_the_same_for_each_text_alone():
    la = fitted()
    batch = first_batch()
    of_batch = la.function(SEED)
    together = of_batch(batch)
    of_each = la.function(SEED)
    for row, expected in enumerate(together):
        text = unpadded(batch, row)
        (alone,) = of_each(text)
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
    found = function(X)
    assert_close(found, expected)


def test_a_sampled_function_leaves_the_models_weights():
    la, X = plain_regression()
    function = la.function(SEED, pred_type="nn")
    function(X)
    weights = [block.weight.flatten() for block in la.blocks]
    found = torch.cat(weights)
    assert torch.equal(found, la.mean)


# --- joint samples --------------------------------------------------------------------


@dataclass(frozen=True)
class Joint:
    """Samples of four examples' outputs together, and the moments that they are of."""

    samples: Tensor
    mean: Tensor
    covariance: Tensor

    @property
    def deviations(self) -> Tensor:
        variances = self.covariance.diagonal()
        return variances.sqrt()


@pytest.fixture
def joint() -> Joint:
    la, X = plain_regression()
    few = X[:4]
    mean, covariance = la.predictive_moments(few, joint=True)
    samples = la.functional_samples(
        few,
        n_samples=20_000,
        generator=generator(),
        joint=True,
    )
    return Joint(
        samples=samples.flatten(1),
        mean=mean,
        covariance=covariance,
    )


def test_joint_samples_have_the_joint_mean(joint):
    found = joint.samples.mean(0)
    # Seven standard errors.
    error = 0.05 * joint.deviations.max()
    assert_close(found, joint.mean, rtol=0, atol=error)


def test_joint_samples_have_the_joint_correlations(joint):
    scale = torch.outer(joint.deviations, joint.deviations)
    expected = joint.covariance / scale
    found = joint.samples.T.corrcoef()
    # Four standard errors.
    assert_close(found, expected, rtol=0, atol=0.03)
    # The host's samples would have 1 or -1.
    assert expected.abs().min() < 0.9


# --- refused --------------------------------------------------------------------------


def test_a_sampled_network_has_no_joint_samples():
    la, X = plain_regression()
    with pytest.raises(ValueError, match="joint=True is for"):
        la.functional_samples(X, "nn", joint=True)


def test_learnt_variances_make_no_function():
    la, _ = plain_regression()
    with pytest.raises(ValueError, match="is none of"):
        la.function(SEED, pred_type="amortized")


def test_a_function_knows_that_its_model_has_changed():
    la, X = plain_regression()
    function = la.function(SEED)
    weight = la.blocks[0].weight
    weight.data.add_(1)
    with pytest.raises(RuntimeError):
        function(X)

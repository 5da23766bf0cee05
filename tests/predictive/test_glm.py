"""The linearised predictive and networks of drawn weights, by structure."""

import inspect

import pytest
import torch
from laplace.baselaplace import ParametricLaplace
from torch.testing import assert_close

from laplace_lora_ext import Moments
from tests.support.dense import jacobians, lora_weights
from tests.support.models import ragged_batches, without_labels
from tests.support.posteriors import (
    STRUCTURES,
    fitted,
    generator,
    plain_regression,
    sizes,
)


def dense_precision(la) -> torch.Tensor:
    """Make a matrix of any structure's posterior precision."""
    P = la.posterior_precision
    if hasattr(P, "to_matrix"):
        return P.to_matrix()
    if P.ndim == 1:
        return P.diag()
    return P


def own_blocks(
    joint: torch.Tensor,
    n_outputs: int,
) -> torch.Tensor:
    """Cut each example's own covariance `(B, C, C)` out of that of all outputs."""
    blocks = []
    for start in range(0, len(joint), n_outputs):
        rows = slice(start, start + n_outputs)
        blocks.append(joint[rows, rows])
    return torch.stack(blocks)


# --- moments --------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("n_outputs", [1, 2])
def test_mean_and_joint_covariance_of_a_regression(n_outputs, structure):
    la, X = plain_regression(n_outputs, structure)
    x = X[:4]
    f_mu, covariance = la(x, joint=True)
    Js = jacobians(la.model.model, x)
    J = Js.flatten(0, 1)  # a row for each output of each example
    expected = J @ torch.linalg.inv(dense_precision(la)) @ J.T
    assert_close(covariance, expected)
    assert_close(la.functional_covariance(Js), expected)
    assert_close(f_mu, la.model.model(x).detach().flatten())
    _, f_var = la(x)
    assert_close(f_var, own_blocks(expected, n_outputs))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_predictive_moments_are_the_hosts_predictive_distribution(structure, n):
    la = fitted(structure=structure)
    batch = {key: value[:n] for key, value in ragged_batches()[0].items()}
    of_host = la._glm_predictive_distribution
    f_mu, f_var = la.predictive_moments(batch)
    host_mu, host_var = of_host(batch)
    assert torch.equal(f_mu, host_mu)
    assert torch.equal(f_var, host_var)
    assert f_mu.shape == (n, 3)
    assert f_var.shape == (n, 3, 3)

    joint_mu, joint_var = la.predictive_moments(batch, joint=True)
    host_mu, host_var = of_host(batch, joint=True)
    assert torch.equal(joint_mu, host_mu)
    assert torch.equal(joint_var, host_var)
    assert joint_var.shape == (3 * n, 3 * n)
    assert_close(joint_mu, f_mu.flatten())
    assert_close(own_blocks(joint_var, n_outputs=3), f_var)

    _, variances = of_host(batch, diagonal_output=True)
    assert_close(variances, f_var.diagonal(dim1=1, dim2=2))


def arguments_of(cls) -> list[tuple]:
    """List names and defaults of the method's arguments, `self` left out."""
    signature = inspect.signature(cls._glm_predictive_distribution)
    _, *arguments = signature.parameters.values()
    return [(argument.name, argument.default) for argument in arguments]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_predictive_distribution_takes_the_hosts_arguments(structure):
    la = fitted(structure=structure)
    assert arguments_of(type(la)) == arguments_of(ParametricLaplace)


@pytest.mark.parametrize("link_approx", ["probit", "mc", "bridge", "bridge_norm"])
def test_moments_take_the_place_of_a_batch(link_approx):
    la = fitted(dtype=torch.float32, prior_precision=0.5)
    batch = ragged_batches()[0]
    moments = la.predictive_statistics([batch]).moments(0.5)
    kept = Moments(moments.f_mu.clone(), moments.f_var.clone())

    found = la(moments, link_approx=link_approx, generator=generator())
    expected = la(batch, link_approx=link_approx, generator=generator())
    assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert_close(found.sum(1), torch.ones(3))
    assert_close(moments, kept, rtol=0, atol=0)

    found = la.functional_samples(moments, generator=generator())
    expected = la.functional_samples(batch, generator=generator())
    assert_close(found, expected, rtol=1e-4, atol=1e-4)

    with pytest.raises(ValueError, match="pass a batch"):
        la(moments, pred_type="nn", link_approx="mc")
    with pytest.raises(ValueError, match="pass the inputs"):
        la.predictive_moments(moments, joint=True)


# --- samples --------------------------------------------------------------------------


@pytest.mark.parametrize("diagonal_output", [False, True])
def test_functional_samples_have_the_predictive_moments(diagonal_output):
    la = fitted()
    batch = ragged_batches()[0]
    samples = la.functional_samples(
        batch,
        n_samples=50_000,
        diagonal_output=diagonal_output,
        generator=generator(),
    )
    f_mu, f_var = la.predictive_moments(batch)
    expected = f_var
    if diagonal_output:
        expected = torch.diag_embed(f_var.diagonal(dim1=1, dim2=2))
    covariance = torch.stack([of_text.T.cov() for of_text in samples.unbind(1)])
    # Eight standard errors, sqrt(2 / 50,000) each, of the largest variance.
    scale = expected.amax().item()
    assert_close(covariance, expected, rtol=0, atol=0.05 * scale)
    assert_close(samples.mean(0), f_mu, rtol=0, atol=0.05 * scale**0.5)


def test_diagonal_output_changes_no_link_but_samples():
    # As in the host.
    la = fitted()
    batch = ragged_batches()[0]
    diagonal = la(batch, link_approx="mean_field", diagonal_output=True)
    usual = la(batch, link_approx="mean_field", diagonal_output=False)
    assert torch.equal(diagonal, usual)


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_a_generator_seeds_every_prediction(pred_type):
    la = fitted()
    batch = ragged_batches()[0]

    def probabilities(seed):
        return la(
            batch,
            pred_type=pred_type,
            link_approx="mc",
            n_samples=5,
            generator=generator(seed),
        )

    def functional(seed):
        return la.functional_samples(
            batch,
            pred_type=pred_type,
            n_samples=5,
            generator=generator(seed),
        )

    def predictive(seed):
        return la.predictive_samples(
            batch,
            pred_type=pred_type,
            n_samples=5,
            generator=generator(seed),
        )

    for draw in (probabilities, functional, predictive):
        assert torch.equal(draw(seed=0), draw(seed=0))
        assert not torch.equal(draw(seed=0), draw(seed=1))


# --- networks of drawn weights --------------------------------------------------------


def test_nn_predictions_are_those_of_models_with_sampled_weights():
    la = fitted()
    batch = ragged_batches()[0]
    model = la.model.model.eval()
    inputs = without_labels(batch)
    draws = generator()
    by_hand = []
    for _ in range(3):
        (sample,) = la.sample(1, draws)
        # Blocks are in the order of the parameters.
        parts = sample.split(sizes(la))
        weights = {}
        for (name, weight), part in zip(
            lora_weights(model).items(), parts, strict=True
        ):
            weights[name] = part.reshape(weight.shape)
        output = torch.func.functional_call(model, weights, (), inputs)
        by_hand.append(output.logits)
    expected = torch.stack(by_hand)
    samples = la.functional_samples(batch, "nn", n_samples=3, generator=generator())
    assert_close(samples, expected)
    probs = la(
        batch,
        "nn",
        link_approx="mc",
        n_samples=3,
        generator=generator(),
    )
    assert_close(probs, expected.softmax(-1).mean(0))


def test_regression_in_the_weights():
    la, X = plain_regression()
    mean, variance = la(
        X,
        "nn",
        link_approx="mc",
        n_samples=4,
        generator=generator(),
    )
    samples = la.functional_samples(X, "nn", n_samples=4, generator=generator())
    assert_close(mean, samples.mean(0))
    assert_close(variance, samples.var(0))

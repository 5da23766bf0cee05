"""The linearised predictive and its samples, for all structures."""

from __future__ import annotations

import inspect

import pytest
import torch
from laplace.baselaplace import ParametricLaplace

from laplace_lora_ext import LowRankKronLoRALaplace, Moments
from tests.support.models import ragged_batches
from tests.support.posteriors import STRUCTURES, fitted, generator, plain_regression


@pytest.fixture
def batches():
    return ragged_batches()


@pytest.fixture
def la(batches):
    return fitted(batches=batches)


def test_diagonal_output_ignores_covariances(la, batches):
    samples = la.functional_samples(
        batches[0], n_samples=50_000, diagonal_output=True, generator=generator()
    )
    f_mu, f_var = la.predictive_moments(batches[0])
    covariance = torch.stack([samples[:, i].T.cov() for i in range(3)])
    expected = torch.diag_embed(f_var.diagonal(dim1=1, dim2=2))
    scale = expected.amax().item()
    torch.testing.assert_close(covariance, expected, rtol=0, atol=0.05 * scale)
    torch.testing.assert_close(samples.mean(0), f_mu, rtol=0, atol=0.05 * scale**0.5)
    mean_field = [
        la(batches[0], link_approx="mean_field", diagonal_output=own) for own in (True, False)
    ]
    assert torch.equal(*mean_field)  # as in the host, samples alone know of it


def test_functional_samples_have_the_predictive_moments(la, batches):
    samples = la.functional_samples(batches[0], n_samples=50_000, generator=generator())
    f_mu, f_var = la.predictive_moments(batches[0])
    scale = f_var.amax().item()
    covariance = torch.stack([samples[:, i].T.cov() for i in range(3)])
    torch.testing.assert_close(covariance, f_var, rtol=0, atol=0.05 * scale)
    torch.testing.assert_close(samples.mean(0), f_mu, rtol=0, atol=0.05 * scale**0.5)


def test_singular_covariances_are_sampled(la):
    root = torch.randn(4, 3, 1, generator=generator()).double()
    f_mu, f_var = torch.zeros(4, 3).double(), root @ root.mT
    samples = la.functional_samples(Moments(f_mu, f_var), n_samples=1000, generator=generator())
    # All draws lie on the line that the covariance spans.
    direction = root[..., 0] / root[..., 0].norm(dim=1, keepdim=True)
    across = samples - (samples * direction).sum(-1, keepdim=True) * direction
    assert across.abs().max() < 1e-6
    assert samples.abs().max() > 1


@pytest.mark.parametrize("n_outputs", [1, 2])
def test_joint_regression_covariance(n_outputs):
    la, X = plain_regression(n_outputs)
    f_mu, covariance = la(X[:4], joint=True)
    Js, _ = la.backend.jacobians(X[:4])
    flat = Js.flatten(0, 1)
    expected = flat @ torch.linalg.inv(la.posterior_precision.to_matrix()) @ flat.T
    torch.testing.assert_close(covariance, expected)
    torch.testing.assert_close(la.functional_covariance(Js), expected)
    assert f_mu.shape == (4 * n_outputs,)
    _, f_var = la(X[:4])
    for i in range(4):
        here = slice(i * n_outputs, (i + 1) * n_outputs)
        torch.testing.assert_close(f_var[i], expected[here, here])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_predictive_moments_are_the_hosts_predictive_distribution(structure):
    la, batch = fitted(structure=structure), ragged_batches()[0]
    moments = la.predictive_moments(batch)
    assert isinstance(moments, Moments)
    f_mu, f_var = la._glm_predictive_distribution(batch)
    assert torch.equal(moments.f_mu, f_mu)
    assert torch.equal(moments.f_var, f_var)
    joint_mu, joint_var = la.predictive_moments(batch, joint=True)
    expected_mu, expected_var = la._glm_predictive_distribution(batch, joint=True)
    assert torch.equal(joint_mu, expected_mu)
    assert torch.equal(joint_var, expected_var)
    assert joint_mu.shape == (9,)
    assert joint_var.shape == (9, 9)
    torch.testing.assert_close(joint_mu, f_mu.flatten())
    for i in range(3):
        here = slice(3 * i, 3 * i + 3)
        torch.testing.assert_close(joint_var[here, here], f_var[i])
    _, variances = la._glm_predictive_distribution(batch, diagonal_output=True)
    torch.testing.assert_close(variances, f_var.diagonal(dim1=1, dim2=2))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("link", ["mean_field", "mc"])
def test_contrasts_predict_as_all_logits_do(structure, link):
    la, batch = fitted(structure=structure), ragged_batches()[0]
    found = la(batch, link_approx=link, generator=generator())
    of_all = la(la.predictive_moments(batch), link_approx=link, generator=generator())
    torch.testing.assert_close(found, of_all, rtol=1e-10, atol=1e-10)


def test_the_hosts_predictive_distribution_is_called_as_by_the_host():
    ours, hosts = (
        list(inspect.signature(cls._glm_predictive_distribution).parameters.values())[1:]
        for cls in (LowRankKronLoRALaplace, ParametricLaplace)
    )
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in hosts]


def test_a_single_example_has_a_batch_of_one_covariance():
    la = fitted()
    batch = {key: value[:1] for key, value in ragged_batches()[0].items()}
    f_mu, f_var = la.predictive_moments(batch)
    assert (f_mu.shape, f_var.shape) == ((1, 3), (1, 3, 3))

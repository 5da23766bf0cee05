"""The linearised predictive and its samples, for all structures, and networks of drawn weights."""

import inspect

import pytest
import torch
from laplace.baselaplace import ParametricLaplace

from laplace_lora_ext import Moments
from tests.support.dense import jacobians
from tests.support.models import ragged_batches
from tests.support.posteriors import STRUCTURES, fitted, generator, plain_regression


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("n_outputs", [1, 2])
def test_mean_and_joint_covariance_of_a_regression(n_outputs, structure):
    la, X = plain_regression(n_outputs, structure)
    f_mu, covariance = la(X[:4], joint=True)
    Js = jacobians(la.model.model, X[:4])
    P = la.posterior_precision
    P = P.to_matrix() if hasattr(P, "to_matrix") else P.diag() if P.ndim == 1 else P
    flat = Js.flatten(0, 1)
    expected = flat @ torch.linalg.inv(P) @ flat.T
    torch.testing.assert_close(covariance, expected)
    torch.testing.assert_close(la.functional_covariance(Js), expected)
    torch.testing.assert_close(f_mu, la.model.model(X[:4]).detach().flatten())
    _, f_var = la(X[:4])
    for i in range(4):
        here = slice(i * n_outputs, (i + 1) * n_outputs)
        torch.testing.assert_close(f_var[i], expected[here, here])


@pytest.mark.parametrize("diagonal_output", [False, True])
def test_functional_samples_have_the_predictive_moments(diagonal_output):
    la, batches = fitted(), ragged_batches()
    how = {"n_samples": 50_000, "diagonal_output": diagonal_output, "generator": generator()}
    samples = la.functional_samples(batches[0], **how)
    f_mu, f_var = la.predictive_moments(batches[0])
    covariance = torch.stack([samples[:, i].T.cov() for i in range(3)])
    expected = torch.diag_embed(f_var.diagonal(dim1=1, dim2=2)) if diagonal_output else f_var
    scale = expected.amax().item()
    torch.testing.assert_close(covariance, expected, rtol=0, atol=0.05 * scale)
    torch.testing.assert_close(samples.mean(0), f_mu, rtol=0, atol=0.05 * scale**0.5)
    mean_field = [
        la(batches[0], link_approx="mean_field", diagonal_output=own) for own in (True, False)
    ]
    assert torch.equal(*mean_field)  # as in the host, samples alone know of it


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_predictive_moments_are_the_hosts_predictive_distribution(structure, n):
    la = fitted(structure=structure)
    batch = {key: value[:n] for key, value in ragged_batches()[0].items()}
    f_mu, f_var = la.predictive_moments(batch)
    joint_mu, joint_var = la.predictive_moments(batch, joint=True)
    of_host = la._glm_predictive_distribution
    expected = (*of_host(batch), *of_host(batch, joint=True))
    for found, other in zip((f_mu, f_var, joint_mu, joint_var), expected, strict=True):
        assert torch.equal(found, other)
    assert (f_mu.shape, f_var.shape) == ((n, 3), (n, 3, 3))
    assert joint_var.shape == (3 * n, 3 * n)
    torch.testing.assert_close(joint_mu, f_mu.flatten())
    for i in range(n):
        here = slice(3 * i, 3 * i + 3)
        torch.testing.assert_close(joint_var[here, here], f_var[i])
    _, variances = of_host(batch, diagonal_output=True)
    torch.testing.assert_close(variances, f_var.diagonal(dim1=1, dim2=2))
    ours, hosts = (
        list(inspect.signature(cls._glm_predictive_distribution).parameters.values())[1:]
        for cls in (type(la), ParametricLaplace)
    )
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in hosts]


@pytest.mark.parametrize("link_approx", ["probit", "mc", "bridge", "bridge_norm"])
def test_moments_take_the_place_of_a_batch(link_approx):
    la = fitted(dtype=torch.float32, prior_precision=0.5)
    batch = ragged_batches()[0]
    moments = la.predictive_statistics([batch]).moments(0.5)
    kept = Moments(moments.f_mu.clone(), moments.f_var.clone())
    predicted = [la(x, link_approx=link_approx, generator=generator()) for x in (moments, batch)]
    torch.testing.assert_close(*predicted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(predicted[0].sum(1), torch.ones(3))
    torch.testing.assert_close(moments, kept, rtol=0, atol=0)
    samples = [la.functional_samples(x, generator=generator()) for x in (moments, batch)]
    torch.testing.assert_close(*samples, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="pass a batch"):
        la(moments, pred_type="nn", link_approx="mc")
    with pytest.raises(ValueError, match="pass the inputs"):
        la.predictive_moments(moments, joint=True)


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_a_generator_seeds_every_prediction(pred_type):
    la, batches = fitted(), ragged_batches()
    keywords = {"pred_type": pred_type, "n_samples": 5}
    for call in (
        lambda g: la(batches[0], link_approx="mc", generator=g, **keywords),
        lambda g: la.functional_samples(batches[0], generator=g, **keywords),
        lambda g: la.predictive_samples(batches[0], generator=g, **keywords),
    ):
        assert torch.equal(call(generator()), call(generator()))
        assert not torch.equal(call(generator()), call(generator(1)))


def test_nn_predictions_are_those_of_models_with_sampled_weights():
    la, batches = fitted(), ragged_batches()
    names = [n for n, _ in la.model.model.named_parameters() if "lora_" in n]
    draws = generator()
    expected = []
    for _ in range(3):
        sample = la.sample(1, draws)[0]
        parts = sample.split([b.weight.numel() for b in la.blocks])
        weights = {
            name: part.reshape(block.weight.shape)
            for name, part, block in zip(names, parts, la.blocks, strict=True)
        }
        inputs = {k: v for k, v in batches[0].items() if k != "labels"}
        la.model.model.eval()
        output = torch.func.functional_call(la.model.model, weights, (), inputs)
        expected.append(output.logits)
    samples = la.functional_samples(batches[0], "nn", n_samples=3, generator=generator())
    torch.testing.assert_close(samples, torch.stack(expected))
    probs = la(batches[0], "nn", link_approx="mc", n_samples=3, generator=generator())
    torch.testing.assert_close(probs, torch.stack(expected).softmax(-1).mean(0))


def test_regression_in_the_weights():
    la, X = plain_regression()
    mean, variance = la(X, "nn", link_approx="mc", n_samples=4, generator=generator())
    samples = la.functional_samples(X, "nn", n_samples=4, generator=generator())
    torch.testing.assert_close(mean, samples.mean(0))
    torch.testing.assert_close(variance, samples.var(0))

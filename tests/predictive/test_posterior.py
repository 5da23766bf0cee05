"""The linearised predictive and networks of drawn weights, by structure."""

import pytest
import torch
from torch.testing import assert_close

from laplace_lora_ext.predictive import posterior
from laplace_lora_ext.predictive.links import shared_noise, softmax_samples
from laplace_lora_ext.predictive.moments import gaussian_samples
from tests.support.dense import curvature_of, jacobians
from tests.support.posteriors import STRUCTURES, fitted, generator, plain_regression

SEED = 5
"""Of the function that the tests are about."""


# --- moments --------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_moments_and_functions_of_a_regression(structure):
    la, X = plain_regression(structure=structure)
    x = X[:4]
    la(x)  # what it may keep is of another temperature
    la.temperature = 0.7
    # The noise is that of `plain_regression`.
    P = curvature_of(la) / (0.5**2 * 0.7) + torch.eye(la.n_params).double()
    assert_close(la.log_det_posterior_precision, P.logdet())
    model = la.model.model
    Js = jacobians(model, x)
    # A row for each output of each example.
    J = Js.flatten(0, 1)
    expected = J @ torch.linalg.solve(P, J.T)
    f_mu, covariance = la(x, joint=True)
    assert_close(f_mu, model(x).detach().flatten())
    assert_close(covariance, expected)
    assert_close(la.functional_covariance(Js), expected)
    _, f_var = la(x)
    of_examples = expected.view(4, 2, 4, 2).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    assert_close(f_var, of_examples)
    _, variances = la(x, diagonal_output=True)
    assert_close(variances, f_var.diagonal(dim1=1, dim2=2))

    # Joint samples are drawn functions, which are one for all batches.
    drawn = la.sample(3, generator(SEED))
    of_draws = model(x) + torch.einsum("bcp,sp->sbc", Js, drawn - la.mean)
    options = {"n_samples": 3, "generator": generator(SEED)}
    assert_close(la.functional_samples(x, joint=True, **options), of_draws)
    (drawn,) = la.sample(1, generator(SEED))
    function = la.function(SEED)
    found = torch.cat([function(x[:3]), function(x[3:])])
    assert_close(found, model(x) + Js @ (drawn - la.mean))
    assert not torch.allclose(la.function(SEED + 1)(x), found)


@pytest.mark.parametrize("link", ["mean_field", "mc", "bridge"])
def test_without_variance_a_prediction_is_one_forward_pass(la, link, batch):
    la.prior_precision = 1e12
    la.logit_scale = 0.5
    with la.model.forward_passes():
        logits = la.model(batch)
    passes = []
    bert = la.model.model.base_model.model.bert
    with bert.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled())):
        found = la(batch, link_approx=link)
        moments = la.predictive_moments(batch)
        _, of_all = la.predictive_moments(batch, joint=True)
    assert passes == [False] * 3
    assert_close(found, (0.5 * logits).softmax(-1))
    if link != "bridge":  # the host's
        assert_close(la(moments, link_approx=link), found)
    for covariance, shape in [(moments.f_var, (3, 3, 3)), (of_all, (9, 9))]:
        assert covariance.shape == shape
        assert not covariance.any()
    # A broader prior's variance is back at once, also where it is changed in place.
    la.prior_precision.fill_(1.0)
    assert la.predictive_moments(batch).f_var.any()
    la.prior_precision = 1e12
    la.blocks[0].weight.data += 1
    with pytest.raises(RuntimeError, match="have changed since the fit"):
        la(batch, link_approx=link)


# --- samples --------------------------------------------------------------------------


@pytest.mark.parametrize("diagonal_output", [False, True])
def test_functional_samples_have_the_predictive_moments(la, batch, diagonal_output):
    options = {"n_samples": 5, "diagonal_output": diagonal_output}
    samples = la.functional_samples(batch, generator=generator(), **options)
    f_mu, f_var = la.predictive_moments(batch)
    if diagonal_output:
        f_var = torch.diag_embed(f_var.diagonal(dim1=1, dim2=2))
    noise = shared_noise(f_mu, 5, generator())
    assert_close(samples, gaussian_samples(f_mu, f_var, noise))
    p = la(batch, link_approx="mc", generator=generator(), **options)
    assert_close(p, softmax_samples(f_mu, f_var, noise).exp().mean(0))


# --- networks of drawn weights --------------------------------------------------------


def test_predictions_are_means_over_models_with_sampled_weights(batch, monkeypatch):
    la, X = plain_regression()
    # The last one of four draws comes after the others.
    monkeypatch.setattr(posterior, "_NUMBERS", 3 * la.n_params)
    options = {"pred_type": "nn", "n_samples": 4}
    mean, variance = la(X, generator=generator(SEED), **options)
    samples = la.functional_samples(X, generator=generator(SEED), **options)
    assert len(samples) == 4
    assert_close(mean, samples.mean(0))
    assert_close(variance, samples.var(0))
    (drawn,) = la.functional_samples(X, "nn", 1, generator=generator(SEED))
    assert_close(la.function(SEED, pred_type="nn")(X), drawn)
    # The model's own weights stay.
    weights = [block.weight.flatten() for block in la.blocks]
    assert torch.equal(torch.cat(weights), la.mean)
    la = fitted()
    logits = la.functional_samples(batch, generator=generator(), **options)
    p = la(batch, generator=generator(), **options)
    assert_close(p, logits.softmax(-1).mean(0))


# --- refused --------------------------------------------------------------------------


def test_what_can_not_be_drawn_is_refused():
    la, X = plain_regression()
    moments = la.predictive_moments(X)
    for use, message in [
        (lambda: la.functional_samples(X, joint=True, diagonal_output=True), "joint"),
        # Learnt variances belong to no weights.
        (lambda: la.function(SEED, pred_type="amortized"), "amortized"),
        (lambda: la.predictive_moments(moments, joint=True), "inputs"),
    ]:
        with pytest.raises(ValueError, match=message):
            use()
    function = la.function(SEED)
    la.blocks[0].weight.data.add_(1)
    with pytest.raises(RuntimeError):
        function(X)

"""The linearised predictive and networks of drawn weights, by structure."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext import Moments
from tests.support.dense import jacobians
from tests.support.models import first_batch
from tests.support.posteriors import STRUCTURES, fitted, generator, plain_regression

Batch = dict[str, Tensor]


@pytest.fixture
def batch() -> Batch:
    """The first of the batches that posteriors are fitted to."""
    return first_batch()


def dense_precision(la: Any) -> Tensor:
    """Make a matrix of any structure's posterior precision."""
    P = la.posterior_precision
    if hasattr(P, "to_matrix"):
        return P.to_matrix()
    if P.ndim == 1:
        return P.diag()
    return P


def own_blocks(joint: Tensor, n_outputs: int) -> Tensor:
    """Cut each example's own covariance `(B, C, C)` out of that of all outputs."""
    blocks = []
    starts = range(0, len(joint), n_outputs)
    for start in starts:
        rows = slice(start, start + n_outputs)
        blocks.append(joint[rows, rows])
    return torch.stack(blocks)


# --- moments --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structure", "n_outputs"),
    [*((structure, 2) for structure in STRUCTURES), ("lowrank_kron", 1)],
)
def test_mean_and_joint_covariance_of_a_regression(n_outputs, structure):
    la, X = plain_regression(n_outputs, structure)
    x = X[:4]
    model = la.model.model
    Js = jacobians(model, x)
    # A row for each output of each example.
    J = Js.flatten(0, 1)
    expected = J @ torch.linalg.inv(dense_precision(la)) @ J.T
    f_mu, covariance = la(x, joint=True)
    assert_close(f_mu, model(x).detach().flatten())
    assert_close(covariance, expected)
    assert_close(la.functional_covariance(Js), expected)
    _, f_var = la(x)
    assert_close(f_var, own_blocks(expected, n_outputs))
    _, variances = la(x, diagonal_output=True)
    assert_close(variances, f_var.diagonal(dim1=1, dim2=2))


def test_predictive_moments_are_the_hosts_predictive_distribution(batch):
    la = fitted()
    # Of one text too, a dimension of 1 is not to be dropped.
    for texts in (batch, {key: column[:1] for key, column in batch.items()}):
        f_mu, f_var = la.predictive_moments(texts)
        of_host = la._glm_predictive_distribution
        assert_close(of_host(texts), (f_mu, f_var), rtol=0, atol=0)
        joint = la.predictive_moments(texts, joint=True)
        assert_close(of_host(texts, joint=True), joint, rtol=0, atol=0)
        _, variances = of_host(texts, diagonal_output=True)
        assert_close(variances, f_var.diagonal(dim1=1, dim2=2))


# --- moments in place of a batch ------------------------------------------------------


@pytest.fixture
def in_float32():
    """A posterior in float32, as statistics are unless told otherwise."""
    return fitted(dtype=torch.float32, prior_precision=0.5)


@pytest.fixture
def moments(in_float32: Any, batch: Batch) -> Moments:
    """The batch's moments, out of statistics."""
    statistics = in_float32.predictive_statistics([batch])
    return statistics.moments(0.5)


@pytest.mark.parametrize("link_approx", ["probit", "mc", "bridge", "bridge_norm"])
def test_moments_are_predicted_from_as_a_batch_is(
    in_float32, moments, batch, link_approx
):
    kept = moments.to("cpu", copy=True)

    def predict(given: Any) -> Tensor:
        return in_float32(given, link_approx=link_approx, generator=generator())

    found = predict(moments)
    # Both are float32, and one comes out of statistics.
    assert_close(found, predict(batch), rtol=1e-4, atol=1e-5)
    assert_close(found.sum(1), torch.ones(3))
    # The bridge of the host writes into what it is given.
    assert_close(tuple(moments), tuple(kept), rtol=0, atol=0)


@pytest.mark.parametrize(
    "use",
    [
        lambda la, moments: la(moments, pred_type="nn", link_approx="mc"),
        lambda la, moments: la.predictive_moments(moments, joint=True),
    ],
)
def test_moments_hold_no_inputs(in_float32, moments, use):
    with pytest.raises(ValueError, match="inputs"):
        use(in_float32, moments)


# --- samples --------------------------------------------------------------------------


@pytest.mark.parametrize("diagonal_output", [False, True])
def test_functional_samples_have_the_predictive_moments(batch, diagonal_output):
    la = fitted()
    samples = la.functional_samples(
        batch, n_samples=50_000, diagonal_output=diagonal_output, generator=generator()
    )
    f_mu, f_var = la.predictive_moments(batch)
    expected = f_var
    if diagonal_output:
        variances = f_var.diagonal(dim1=1, dim2=2)
        expected = torch.diag_embed(variances)
    of_texts = []
    for of_text in samples.unbind(1):
        of_texts.append(of_text.T.cov())
    covariance = torch.stack(of_texts)
    # Eight standard errors, sqrt(2 / 50,000) each, of the largest variance.
    largest = expected.amax().item()
    error = 0.05 * largest
    assert_close(covariance, expected, rtol=0, atol=error)
    mean = samples.mean(0)
    error_of_mean = 0.05 * largest**0.5
    assert_close(mean, f_mu, rtol=0, atol=error_of_mean)


def test_diagonal_output_changes_no_link_but_samples(batch):
    la = fitted()

    def predict(diagonal_output: bool) -> Tensor:
        return la(batch, link_approx="mean_field", diagonal_output=diagonal_output)

    # As in the host.
    diagonal = predict(diagonal_output=True)
    usual = predict(diagonal_output=False)
    assert torch.equal(diagonal, usual)


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_a_generator_seeds_every_prediction(batch, pred_type):
    la = fitted()

    def drawn(predict: Callable[..., Tensor], seed: int, **others: Any) -> Tensor:
        options = {"pred_type": pred_type, "n_samples": 5, **others}
        return predict(batch, generator=generator(seed), **options)

    by_link = partial(la, link_approx="mc")
    for predict in (by_link, la.functional_samples, la.predictive_samples):
        first = drawn(predict, seed=0)
        assert torch.equal(drawn(predict, seed=0), first)
        assert not torch.equal(drawn(predict, seed=1), first)


# --- networks of drawn weights --------------------------------------------------------


def test_predictions_are_means_over_models_with_sampled_weights(batch):
    la = fitted()
    options = {"pred_type": "nn", "n_samples": 3}
    logits = la.functional_samples(batch, generator=generator(), **options)
    p = la.predictive_samples(batch, generator=generator(), **options)
    assert_close(p, logits.softmax(-1))
    found = la(batch, generator=generator(), **options)
    assert_close(found, p.mean(0))


def test_regression_in_the_weights():
    la, X = plain_regression()
    options = {"pred_type": "nn", "n_samples": 4}
    mean, variance = la(X, generator=generator(), **options)
    samples = la.functional_samples(X, generator=generator(), **options)
    assert_close(mean, samples.mean(0))
    assert_close(variance, samples.var(0))


@pytest.mark.parametrize("link", ["mean_field", "probit", "mc"])
def test_without_variance_a_prediction_is_one_forward_pass(link):
    la = fitted()
    la.prior_precision = 1e12
    la.logit_scale = 0.5
    batch = first_batch()
    with la.model.forward_passes():
        logits = la.model(batch)
    passes = []
    bert = la.model.model.base_model.model.bert
    with bert.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled())):
        found = la(batch, link_approx=link)
    assert passes == [False]
    assert_close(found, (0.5 * logits).softmax(-1))
    moments = la.predictive_moments(batch)
    assert not moments.f_var.any()
    _, of_all = la.predictive_moments(batch, joint=True)
    assert of_all.shape == (9, 9)
    assert not of_all.any()
    # A broader prior's variance is back at once.
    la.prior_precision = 1.0
    assert la.predictive_moments(batch).f_var.any()

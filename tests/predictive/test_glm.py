"""The linearised predictive and networks of drawn weights, by structure."""

import inspect
from typing import Any

import pytest
import torch
from laplace.baselaplace import ParametricLaplace
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext import Moments
from tests.support.dense import jacobians, lora_weights
from tests.support.models import first_batch, without_labels
from tests.support.posteriors import (
    STRUCTURES,
    fitted,
    generator,
    plain_regression,
    sizes,
)

Batch = dict[str, Tensor]


@pytest.fixture
def batch() -> Batch:
    """The first of the batches that posteriors are fitted to."""
    return first_batch()


@pytest.fixture(params=STRUCTURES)
def of_structure(request: pytest.FixtureRequest):
    """A fitted posterior of each structure."""
    return fitted(structure=request.param)


def dense_precision(la: Any) -> Tensor:
    """Make a matrix of any structure's posterior precision."""
    P = la.posterior_precision
    if hasattr(P, "to_matrix"):
        return P.to_matrix()
    if P.ndim == 1:
        return P.diag()
    return P


def own_blocks(
    joint: Tensor,
    n_outputs: int,
) -> Tensor:
    """Cut each example's own covariance `(B, C, C)` out of that of all outputs."""
    blocks = []
    starts = range(0, len(joint), n_outputs)
    for start in starts:
        rows = slice(start, start + n_outputs)
        blocks.append(joint[rows, rows])
    return torch.stack(blocks)


# --- moments --------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("n_outputs", [1, 2])
def test_mean_and_joint_covariance_of_a_regression(n_outputs, structure):
    la, X = plain_regression(n_outputs, structure)
    x = X[:4]
    model = la.model.model
    Js = jacobians(model, x)
    # A row for each output of each example.
    J = Js.flatten(0, 1)
    P = dense_precision(la)
    expected = J @ torch.linalg.inv(P) @ J.T
    f_mu, covariance = la(x, joint=True)
    outputs = model(x).detach()
    assert_close(f_mu, outputs.flatten())
    assert_close(covariance, expected)
    assert_close(la.functional_covariance(Js), expected)
    _, f_var = la(x)
    assert_close(f_var, own_blocks(expected, n_outputs))


# Of one text too, for which a dimension of 1 is not to be dropped.
@pytest.fixture(
    params=[
        pytest.param(1, id="one text"),
        pytest.param(3, id="three texts"),
    ]
)
def texts(
    request: pytest.FixtureRequest,
    batch: Batch,
) -> Batch:
    n_texts = request.param
    return {key: column[:n_texts] for key, column in batch.items()}


def test_predictive_moments_are_the_hosts_predictive_distribution(of_structure, texts):
    f_mu, f_var = of_structure.predictive_moments(texts)
    host_mu, host_var = of_structure._glm_predictive_distribution(texts)
    assert torch.equal(f_mu, host_mu)
    assert torch.equal(f_var, host_var)
    n = len(texts["labels"])
    assert f_mu.shape == (n, 3)
    assert f_var.shape == (n, 3, 3)


def test_joint_moments_are_the_hosts_predictive_distribution(of_structure, texts):
    f_mu, f_var = of_structure.predictive_moments(texts, joint=True)
    of_host = of_structure._glm_predictive_distribution
    host_mu, host_var = of_host(texts, joint=True)
    assert torch.equal(f_mu, host_mu)
    assert torch.equal(f_var, host_var)


def test_joint_moments_hold_those_of_each_example(of_structure, texts):
    f_mu, f_var = of_structure.predictive_moments(texts)
    joint_mu, joint_var = of_structure.predictive_moments(texts, joint=True)
    n_logits = 3 * len(texts["labels"])
    assert joint_var.shape == (n_logits, n_logits)
    assert_close(joint_mu, f_mu.flatten())
    own_var = own_blocks(joint_var, n_outputs=3)
    assert_close(own_var, f_var)


def test_the_hosts_diagonal_output_is_variances(of_structure, texts):
    _, f_var = of_structure.predictive_moments(texts)
    of_host = of_structure._glm_predictive_distribution
    _, variances = of_host(texts, diagonal_output=True)
    expected = f_var.diagonal(dim1=1, dim2=2)
    assert_close(variances, expected)


def arguments_of(cls: type) -> list[tuple]:
    """List names and defaults of the method's arguments, `self` left out."""
    signature = inspect.signature(cls._glm_predictive_distribution)
    _, *arguments = signature.parameters.values()
    return [(argument.name, argument.default) for argument in arguments]


def test_the_predictive_distribution_takes_the_hosts_arguments(of_structure):
    found = arguments_of(type(of_structure))
    assert found == arguments_of(ParametricLaplace)


# --- moments in place of a batch ------------------------------------------------------


@pytest.fixture
def in_float32():
    """A posterior in float32, as statistics are unless told otherwise."""
    return fitted(
        dtype=torch.float32,
        prior_precision=0.5,
    )


@pytest.fixture
def moments(
    in_float32: Any,
    batch: Batch,
) -> Moments:
    """The batch's moments, out of statistics."""
    statistics = in_float32.predictive_statistics([batch])
    return statistics.moments(0.5)


each_link = pytest.mark.parametrize(
    "link_approx",
    [
        "probit",
        "mc",
        "bridge",
        "bridge_norm",
    ],
)


@each_link
def test_moments_are_predicted_from_as_a_batch_is(
    in_float32,
    moments,
    batch,
    link_approx,
):
    def predict(given: Any) -> Tensor:
        return in_float32(
            given,
            link_approx=link_approx,
            generator=generator(),
        )

    found = predict(moments)
    expected = predict(batch)
    # Both are float32, and one comes out of statistics.
    assert_close(found, expected, rtol=1e-4, atol=1e-5)
    totals = found.sum(1)
    assert_close(totals, torch.ones(3))


@each_link
def test_a_prediction_leaves_its_moments_as_they_are(in_float32, moments, link_approx):
    kept = Moments(
        f_mu=moments.f_mu.clone(),
        f_var=moments.f_var.clone(),
    )
    # The bridge of the host writes into what it is given.
    in_float32(moments, link_approx=link_approx)
    assert_close(moments, kept, rtol=0, atol=0)


def test_moments_are_drawn_from_as_a_batch_is(in_float32, moments, batch):
    draw = in_float32.functional_samples
    found = draw(moments, generator=generator())
    expected = draw(batch, generator=generator())
    # As above, and a root of the covariance is less exact.
    assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_networks_of_drawn_weights_need_a_batch(in_float32, moments):
    with pytest.raises(ValueError, match="pass a batch"):
        in_float32(
            moments,
            pred_type="nn",
            link_approx="mc",
        )


def test_a_joint_covariance_needs_inputs(in_float32, moments):
    with pytest.raises(ValueError, match="pass the inputs"):
        in_float32.predictive_moments(moments, joint=True)


# --- samples --------------------------------------------------------------------------


@pytest.mark.parametrize("diagonal_output", [False, True])
def test_functional_samples_have_the_predictive_moments(batch, diagonal_output):
    la = fitted()
    samples = la.functional_samples(
        batch,
        n_samples=50_000,
        diagonal_output=diagonal_output,
        generator=generator(),
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
        return la(
            batch,
            link_approx="mean_field",
            diagonal_output=diagonal_output,
        )

    # As in the host.
    diagonal = predict(diagonal_output=True)
    usual = predict(diagonal_output=False)
    assert torch.equal(diagonal, usual)


def probabilities(
    la: Any,
    batch: Batch,
    **settings: Any,
) -> Tensor:
    return la(batch, link_approx="mc", **settings)


def functional_samples(
    la: Any,
    batch: Batch,
    **settings: Any,
) -> Tensor:
    return la.functional_samples(batch, **settings)


def predictive_samples(
    la: Any,
    batch: Batch,
    **settings: Any,
) -> Tensor:
    return la.predictive_samples(batch, **settings)


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
@pytest.mark.parametrize(
    "predict",
    [probabilities, functional_samples, predictive_samples],
)
def test_a_generator_seeds_every_prediction(batch, pred_type, predict):
    la = fitted()

    def drawn(seed: int) -> Tensor:
        return predict(
            la,
            batch,
            pred_type=pred_type,
            n_samples=5,
            generator=generator(seed),
        )

    first = drawn(seed=0)
    same = drawn(seed=0)
    other = drawn(seed=1)
    assert torch.equal(same, first)
    assert not torch.equal(other, first)


# --- networks of drawn weights --------------------------------------------------------


def logits_at(
    la: Any,
    sample: Tensor,
    batch: Batch,
) -> Tensor:
    """Compute the model's logits with other LoRA weights."""
    model = la.model.model
    trained = lora_weights(model)
    # Blocks are in the order of the parameters.
    parts = sample.split(sizes(la))
    weights = {}
    for name, part in zip(trained, parts, strict=True):
        shape = trained[name].shape
        weights[name] = part.reshape(shape)
    output = torch.func.functional_call(
        model,
        weights,
        args=(),
        kwargs=without_labels(batch),
    )
    return output.logits


@pytest.fixture
def by_hand(batch: Batch) -> tuple[Any, Tensor]:
    """A posterior, and logits of three networks that the same seed draws."""
    la = fitted()
    la.model.model.eval()
    draws = generator()
    logits = []
    for _ in range(3):
        (sample,) = la.sample(1, draws)
        of_sample = logits_at(la, sample, batch)
        logits.append(of_sample)
    return la, torch.stack(logits)


def test_samples_are_logits_of_models_with_sampled_weights(by_hand, batch):
    la, logits = by_hand
    samples = la.functional_samples(
        batch,
        "nn",
        n_samples=3,
        generator=generator(),
    )
    assert_close(samples, logits)


def test_predictions_are_means_over_models_with_sampled_weights(by_hand, batch):
    la, logits = by_hand
    found = la(
        batch,
        "nn",
        link_approx="mc",
        n_samples=3,
        generator=generator(),
    )
    p = logits.softmax(-1)
    assert_close(found, p.mean(0))


def test_regression_in_the_weights():
    la, X = plain_regression()
    mean, variance = la(
        X,
        "nn",
        link_approx="mc",
        n_samples=4,
        generator=generator(),
    )
    samples = la.functional_samples(
        X,
        "nn",
        n_samples=4,
        generator=generator(),
    )
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
    # A broader prior's variance is back at once.
    la.prior_precision = 1.0
    assert la.predictive_moments(batch).f_var.any()

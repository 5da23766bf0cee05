"""The host's API on top of a posterior over LoRA weights."""

import copy
import inspect
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.distributions import MultivariateNormal
from torch.testing import assert_close

from laplace_lora_ext import LoRALaplace
from laplace_lora_ext.laplace import (
    DiagLoRALaplace,
    FullLoRALaplace,
    KronLoRALaplace,
    LowRankKronLoRALaplace,
)
from tests.support.dense import lora_weights
from tests.support.models import first_batch, head_of, lora_model, ragged_batches
from tests.support.posteriors import (
    PRIORS,
    STRUCTURES,
    fitted,
    generator,
    make,
    normal,
    plain_regression,
    some_precision,
    with_structures,
)


@pytest.fixture
def la():
    return fitted()


@pytest.mark.parametrize("prior", PRIORS)
def test_evidence_is_differentiable_in_the_prior_precision(la, prior):
    prior_precision = some_precision(la, prior)
    prior_precision.requires_grad_()
    assert gradcheck(la.log_marginal_likelihood, prior_precision)


def test_samples_have_the_posterior_covariance(la):
    n_samples = 20_000
    samples = la.sample(n_samples, generator())
    P = la.posterior_precision.to_matrix()
    covariance = torch.linalg.inv(P)
    difference = samples.T.cov() - covariance
    error = difference.norm() / covariance.norm()
    # Each of so many numbers errs by its part of a root of the number of samples.
    part = la.n_params / n_samples
    assert error < 2 * part**0.5
    # The standard error of each is at most 0.007, since the prior's deviation is 1.
    mean = samples.mean(0)
    assert_close(mean, la.mean, rtol=0, atol=0.05)


def test_log_prob_is_that_of_the_gaussian(la):
    value = la.mean + 0.1
    P = la.posterior_precision.to_matrix()
    gaussian = MultivariateNormal(la.mean, precision_matrix=P)
    found = la.log_prob(value)
    expected = gaussian.log_prob(value)
    assert_close(found, expected)
    difference = value - la.mean
    found = la.log_prob(value, normalized=False)
    expected = -0.5 * difference @ P @ difference
    assert_close(found, expected)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_noise_of_a_regression_and_a_temperature_scale_the_curvature(temperature):
    la, _ = plain_regression()
    la.temperature = temperature
    # That of `plain_regression`.
    variance_of_noise = 0.5**2
    factor = 1 / (variance_of_noise * temperature)
    H = la.H.to_matrix()
    prior = torch.eye(la.n_params).double()
    found = la.posterior_precision.to_matrix()
    expected = factor * H + prior
    assert_close(found, expected)


def test_evidence_is_differentiable_in_the_noise():
    la, _ = plain_regression()

    def evidence(sigma_noise: Tensor) -> Tensor:
        return la.log_marginal_likelihood(sigma_noise=sigma_noise)

    sigma_noise = torch.tensor(0.7, dtype=torch.float64)
    sigma_noise.requires_grad_()
    assert gradcheck(evidence, sigma_noise)


def test_backpropagation_to_the_inputs():
    """For a user who optimises an input, `enable_backprop` as the host has it."""
    la, X = plain_regression()
    la.enable_backprop = True
    two_inputs = X[:2].requires_grad_()

    def moments(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(la(x))

    assert gradcheck(moments, two_inputs, atol=1e-6)


@pytest.mark.parametrize(
    ("structure", "kind"), [("lowrank_kron", "bert"), ("full", "gpt2")]
)
def test_backpropagation_through_a_transformers_fused_attention(structure, kind):
    """The gradient in embeddings against finite differences."""
    model = lora_model(kind, attention="sdpa")
    model.eval()
    la = fitted(kind, model=model, structure=structure)
    batch = first_batch()
    la.enable_backprop = True
    tokens = batch["input_ids"]
    embedded = model.get_input_embeddings()(tokens)
    embeddings = embedded.detach().requires_grad_()
    direction = normal(*embeddings.shape, seed=1)

    def confidence(embeddings: Tensor) -> Tensor:
        inputs = {
            "inputs_embeds": embeddings,
            "attention_mask": batch["attention_mask"],
        }
        p = la(inputs)
        return p.square().sum()

    at_embeddings = confidence(embeddings)
    (gradient,) = torch.autograd.grad(at_embeddings, embeddings)
    step = 1e-6
    # Central differences, whose error is of the second order in the step.
    ahead = confidence(embeddings + step * direction)
    behind = confidence(embeddings - step * direction)
    rise = ahead - behind
    slope = rise / (2 * step)
    # Otherwise there would be little to compare.
    assert slope.abs() > 1e-3
    found = torch.sum(gradient * direction)
    assert_close(found, slope, rtol=1e-6, atol=0)
    # Whatever was switched off for a while is on again.
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_trainable_head_takes_no_part_in_the_posterior(structure):
    """A head that is trained and has the largest gradients takes no part."""
    model = lora_model("bert")
    assert head_of(model).weight.requires_grad
    la = fitted(model=model, structure=structure, prior_precision=0.1)
    mean = torch.cat([weight.flatten() for weight in lora_weights(model).values()])
    assert torch.equal(la.mean, mean)
    n_weights = len(mean)
    assert la.n_params == n_weights
    samples = la.sample(2)
    assert samples.shape == (2, n_weights)


CLASSES = [LowRankKronLoRALaplace, KronLoRALaplace, DiagLoRALaplace, FullLoRALaplace]
OUR_METHODS = {"fit", "predict", "optimize_prior_precision", "amortize", "distill"}


def public_names(cls: type) -> list[str]:
    names = ["__init__", "__call__"]
    for name in dir(cls):
        if not name.startswith("_"):
            names.append(name)
    return names


def function_of(cls: type, name: str):
    """Find a method, or what a property calls."""
    member = getattr(cls, name)
    if isinstance(member, property):
        return member.fget
    return member


@pytest.mark.parametrize("cls", CLASSES)
def test_completion_help_and_hover_say_what_a_method_takes(cls):
    names = public_names(cls)
    # That methods are found at all.
    assert set(names) > OUR_METHODS
    for name in names:
        function = function_of(cls, name)
        is_ours = function.__module__.startswith("laplace_lora_ext")
        if not is_ours:
            continue
        described = getattr(cls, name)
        if name == "__init__":
            # The class itself describes what it is made with.
            described = LoRALaplace
        doc = inspect.getdoc(described)
        assert doc, name
        assert_says_what_it_takes(name, function, doc)


def assert_says_what_it_takes(name: str, function, doc: str) -> None:
    signature = inspect.signature(function)
    assert signature.return_annotation is not signature.empty, name
    # Without `self`.
    _, *parameters = signature.parameters.values()
    for parameter in parameters:
        place = f"{name}, {parameter.name}"
        assert parameter.annotation is not parameter.empty, place
        assert parameter.kind is not parameter.VAR_POSITIONAL, place
        if parameter.kind is parameter.VAR_KEYWORD:
            assert f"**{parameter.name}" in doc, place


def another_model():
    return lora_model("bert", lora_alpha=3)


def test_another_posterior_of_the_same_kind_has_the_same_options():
    # None is what it is by default.
    options = {
        "prior_mean": 0.3,
        "temperature": 2.0,
        "enable_backprop": True,
        "target_modules": ["value"],
        "backend_kwargs": {"rank": 2, "tail": False, "kfac_approx": "expand"},
    }
    la = fitted(**options)
    other = la.for_model(another_model())
    assert other.H is None
    other.fit(ragged_batches())
    same = make(another_model(), **options)
    same.fit(ragged_batches())
    found_names = [block.name for block in other.blocks]
    names = [block.name for block in la.blocks]
    assert found_names == names
    found = other.log_marginal_likelihood()
    expected = same.log_marginal_likelihood()
    assert found == expected
    assert other.temperature == 2.0
    assert other.prior_mean == 0.3
    assert other.enable_backprop


def test_another_posterior_of_answers_has_the_same_answers():
    la = fitted("gpt2")
    other = la.for_model(lora_model("gpt2"))
    assert other.model.class_token_ids == la.model.class_token_ids


def test_another_posterior_of_a_regression_has_the_same_noise():
    la, _ = plain_regression()
    other = la.for_model(la.model.model)
    assert other.sigma_noise == la.sigma_noise


def pickled(la):
    content = pickle.dumps(la)
    return pickle.loads(content)


@pytest.mark.parametrize(
    ("structure", "copied_by"), with_structures([copy.deepcopy, pickled])
)
def test_a_copy_is_the_same_and_a_posterior_of_its_own(structure, copied_by):
    la = fitted(structure=structure)
    batch, *rest = ragged_batches()
    la.prior_precision = some_precision(la, "layerwise")
    probabilities = la(batch)
    evidence = la.log_marginal_likelihood()

    def assert_as_before(posterior) -> None:
        found = posterior(batch)
        assert torch.equal(found, probabilities)
        found = posterior.log_marginal_likelihood()
        assert torch.equal(found, evidence)

    copied = copied_by(la)
    assert_as_before(copied)

    # What becomes of the copy does not become of the first.
    copied.fit(rest, override=False)
    copied.prior_precision = 9.0
    first_block, *_ = copied.blocks
    first_block.weight.data.mul_(2)
    assert_as_before(la)
    with pytest.raises(RuntimeError, match="have changed since the fit"):
        copied(batch)

    # The same becomes of both.
    la.fit(rest, override=False)
    la.prior_precision = 9.0
    of_first = la.log_marginal_likelihood()
    of_copy = copied.log_marginal_likelihood()
    assert torch.equal(of_first, of_copy)


# Numbers of Python, of numpy and of torch, which are read in different ways.
IMPOSSIBLE = [0.0, -1, float("nan"), float("inf"), np.float32(-1), torch.tensor(-1.0)]


@pytest.mark.parametrize(
    ("structure", "name"),
    with_structures(["prior_precision", "temperature", "sigma_noise"]),
)
def test_what_makes_no_gaussian_is_refused_and_changes_nothing(name, structure):
    la = fitted(structure=structure)
    batch = first_batch()
    before = getattr(la, name)
    expected = la.predictive_moments(batch)
    message = f"{name} must be positive and finite, not "
    for value in IMPOSSIBLE:
        with pytest.raises(ValueError, match=message):
            setattr(la, name, value)
    assert getattr(la, name) is before
    found = la.predictive_moments(batch)
    assert_close(found.f_var, expected.f_var)


def test_one_noise_is_of_all_outputs():
    la, X = plain_regression()
    expected = la(X)
    several = torch.tensor([0.1, 0.2])
    with pytest.raises(ValueError, match="homoscedastic"):
        la.sigma_noise = several
    with pytest.raises(ValueError, match="homoscedastic"):
        la.log_marginal_likelihood(sigma_noise=several)
    # Nothing has changed.
    assert la.sigma_noise == 0.5
    assert_close(la(X), expected, rtol=0, atol=0)


def test_it_says_what_it_is_of_and_whether_it_is_fitted():
    la = make(lora_model("bert"))
    kind = "LowRankKronLoRALaplace(classification by BertForSequenceClassification"
    size = f"8 weights of {la.n_params:,} parameters"
    assert repr(la) == f"{kind}; {size}; not fitted; prior precision 1)"
    la.fit(ragged_batches())
    la.prior_precision = 2.5
    assert repr(la).endswith("; fitted to 8 examples; prior precision 2.5)")

"""The host's API on top of a posterior over LoRA weights."""

import copy
import inspect
import pickle

import numpy as np
import pytest
import torch

import laplace_lora_ext
from laplace_lora_ext import LoRALaplace
from laplace_lora_ext.structures import (
    DiagLoRALaplace,
    FullLoRALaplace,
    KronLoRALaplace,
)
from tests.support.models import (
    lora_model,
    plain_model,
    ragged_batches,
)
from tests.support.posteriors import (
    STRUCTURES,
    fitted,
    generator,
    make,
    plain_regression,
    some_precision,
)


@pytest.fixture
def la():
    return fitted()


def test_evidence_is_differentiable_in_the_prior_precision(la):
    for shape in ((1,), (len(la.blocks),)):
        precision = torch.full(shape, 0.7, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(
            lambda p: la.log_marginal_likelihood(p), (precision,)
        )


def test_samples_have_the_posterior_covariance(la):
    samples = la.sample(20_000, generator())
    covariance = torch.linalg.inv(la.posterior_precision.to_matrix())
    difference = samples.T.cov() - covariance
    error = difference.norm() / covariance.norm()
    assert error < 2 * (la.n_params / 20_000) ** 0.5
    torch.testing.assert_close(samples.mean(0), la.mean, rtol=0, atol=0.05)


def test_log_prob_is_that_of_the_gaussian(la):
    value = la.mean + 0.1
    gaussian = torch.distributions.MultivariateNormal(
        la.mean,
        precision_matrix=la.posterior_precision.to_matrix(),
    )
    torch.testing.assert_close(la.log_prob(value), gaussian.log_prob(value))
    difference = value - la.mean
    expected = -0.5 * difference @ la.posterior_precision.to_matrix() @ difference
    torch.testing.assert_close(la.log_prob(value, normalized=False), expected)


def test_noise_of_a_regression_and_a_temperature_scale_the_curvature():
    la, X = plain_regression()
    for la.temperature, factor in (
        (1.0, 4),
        (0.5, 8),
    ):  # sigma_noise is 0.5
        expected = factor * la.H.to_matrix() + torch.eye(la.n_params).double()
        torch.testing.assert_close(la.posterior_precision.to_matrix(), expected)
    sigma = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda s: la.log_marginal_likelihood(sigma_noise=s),
        (sigma,),
    )
    assert la(X)[0].shape == (12, 2)


def test_backpropagation_to_the_inputs():
    """For a user who optimises an input, `enable_backprop` as the host has it."""
    la, X = plain_regression()
    la.enable_backprop = True
    X = X[:2].requires_grad_()

    def moments(x):
        return la(x)

    assert torch.autograd.gradcheck(moments, (X,), atol=1e-6)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("structure", ["lowrank_kron", "full"])
def test_backpropagation_through_a_transformers_fused_attention(structure, kind):
    """The gradient in embeddings against finite differences."""
    model = lora_model(kind, attention="sdpa").eval()
    la = fitted(model=model, structure=structure, kind=kind)
    batch, *_ = ragged_batches()
    la.enable_backprop = True
    tokens = batch["input_ids"]
    embeddings = model.get_input_embeddings()(tokens).detach().requires_grad_()
    direction = torch.randn(embeddings.shape, generator=generator(1)).double()

    def confidence(embeddings: torch.Tensor) -> torch.Tensor:
        inputs = {
            "inputs_embeds": embeddings,
            "attention_mask": batch["attention_mask"],
        }
        return la(inputs).square().sum()

    (gradient,) = torch.autograd.grad(confidence(embeddings), embeddings)
    step = 1e-6
    # Central differences, whose error is of the second order in the step.
    ahead = confidence(embeddings + step * direction)
    behind = confidence(embeddings - step * direction)
    slope = (ahead - behind) / (2 * step)
    assert slope.abs() > 1e-3
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-6, atol=0)
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_trainable_head_takes_no_part_in_the_posterior(
    structure,
):
    """A head that is trained and has the largest gradients takes no part."""
    model = lora_model("bert")
    head = model.base_model.model.classifier.modules_to_save["default"]
    lora = {name: p for name, p in model.named_parameters() if "lora_" in name}
    assert head.weight.requires_grad
    la = fitted(model=model, structure=structure, prior_precision=0.1)
    n_params = sum(p.numel() for p in lora.values())
    assert la.n_params == la.mean.numel() == n_params
    assert la.sample(2).shape == (2, n_params)
    assert torch.equal(
        la.mean,
        torch.cat([p.detach().flatten() for p in lora.values()]),
    )


CLASSES = [
    laplace_lora_ext.LowRankKronLoRALaplace,
    KronLoRALaplace,
    DiagLoRALaplace,
    FullLoRALaplace,
]


@pytest.mark.parametrize("cls", CLASSES)
def test_completion_help_and_hover_say_what_a_method_takes(cls):
    names = [name for name in dir(cls) if not name.startswith("_")]
    assert {
        "fit",
        "predict",
        "optimize_prior_precision",
        "amortize",
        "distill",
    } < {*names}
    for name in [*names, "__init__", "__call__"]:
        member = getattr(cls, name)
        function = member.fget if isinstance(member, property) else member
        if not function.__module__.startswith("laplace_lora_ext"):
            continue  # the host's own
        doc = inspect.getdoc(LoRALaplace if name == "__init__" else member)
        assert doc, name
        signature = inspect.signature(function)
        assert signature.return_annotation is not signature.empty, name
        for parameter in [*signature.parameters.values()][1:]:
            assert parameter.annotation is not parameter.empty, (
                name,
                parameter,
            )
            assert parameter.kind is not parameter.VAR_POSITIONAL, name
            assert (
                parameter.kind is not parameter.VAR_KEYWORD
                or f"**{parameter.name}" in doc
            ), name


def test_another_posterior_of_the_same_kind():
    options = {
        "prior_mean": 0.3,
        "temperature": 2.0,
        "enable_backprop": True,
        "target_modules": ["value"],
        "backend_kwargs": {
            "rank": 2,
            "tail": False,
            "kfac_approx": "expand",
        },
    }
    la = fitted(**options)
    other = la.for_model(lora_model("bert", lora_alpha=3))
    assert other.H is None
    other.fit(ragged_batches())
    same = make(lora_model("bert", lora_alpha=3), **options)
    same.fit(ragged_batches())
    assert [block.name for block in other.blocks] == [block.name for block in la.blocks]
    assert other.log_marginal_likelihood() == same.log_marginal_likelihood()
    assert (
        other.temperature,
        other.prior_mean,
        other.enable_backprop,
    ) == (2.0, 0.3, True)
    answers = fitted("gpt2")
    of_answers = answers.for_model(lora_model("gpt2"))
    assert of_answers.model.class_token_ids == answers.model.class_token_ids
    kron = fitted(structure="kron", damping=True)
    assert kron.for_model(lora_model("bert", lora_alpha=3)).damping
    regression, _ = plain_regression()
    assert (
        regression.for_model(regression.model.model).sigma_noise
        == regression.sigma_noise
    )


def pickled(la):
    return pickle.loads(pickle.dumps(la))


@pytest.mark.parametrize("copied_by", [copy.deepcopy, pickled])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_copy_is_the_same_and_a_posterior_of_its_own(structure, copied_by):
    la = fitted(structure=structure)
    batch, *rest = ragged_batches()
    la.prior_precision = some_precision(la, "layerwise")
    probabilities = la(batch)
    evidence = la.log_marginal_likelihood()
    copied = copied_by(la)
    assert torch.equal(copied(batch), probabilities)
    assert torch.equal(copied.log_marginal_likelihood(), evidence)
    copied.fit(rest, override=False)
    copied.prior_precision = 9.0
    copied.blocks[0].weight.data.mul_(2)
    assert torch.equal(la(batch), probabilities)
    assert torch.equal(la.log_marginal_likelihood(), evidence)
    la.fit(rest, override=False)
    la.prior_precision = 9.0
    assert torch.equal(
        la.log_marginal_likelihood(),
        copied.log_marginal_likelihood(),
    )
    with pytest.raises(RuntimeError, match="have changed since the fit"):
        copied(batch)


IMPOSSIBLE = [
    0.0,
    -1,
    float("nan"),
    float("inf"),
    np.float32(-1),
    torch.tensor(-1.0),
]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["prior_precision", "temperature", "sigma_noise"])
def test_what_makes_no_gaussian_is_refused_and_changes_nothing(name, structure):
    la = fitted(structure=structure)
    batch, *_ = ragged_batches()
    before = getattr(la, name)
    expected = la.predictive_moments(batch)
    for value in IMPOSSIBLE:
        with pytest.raises(
            ValueError,
            match=f"{name} must be positive and finite, not ",
        ):
            setattr(la, name, value)
    assert getattr(la, name) is before
    torch.testing.assert_close(la.predictive_moments(batch).f_var, expected.f_var)


SEVERAL = [
    torch.tensor([0.1, 0.2]),
    np.array([0.1, 0.2]),
    [0.1, 0.2],
    torch.ones(2, 2),
]


@pytest.mark.parametrize("several", SEVERAL)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_one_noise_is_of_all_outputs(structure, several):
    la, X = plain_regression(structure=structure)
    expected = la(X)
    message = r"sigma_noise must be one number, not [24]: .*pass output_scales="
    uses = [
        lambda: make(
            plain_model(2),
            structure,
            "regression",
            sigma_noise=several,
        ),
        lambda: make(lora_model("bert"), structure, sigma_noise=several),
        lambda: setattr(la, "sigma_noise", several),
        lambda: la.log_marginal_likelihood(sigma_noise=several),
    ]
    for use in uses:
        with pytest.raises(ValueError, match=message):
            use()
    with pytest.raises(ValueError, match="temperature must be one number, not"):
        la.temperature = several
    assert la.sigma_noise.item() == 0.5
    assert all(map(torch.equal, la(X), expected))


def test_it_says_what_it_is_of_and_whether_it_is_fitted():
    la = make(lora_model("bert"))
    size = sum(block.weight.numel() for block in la.blocks)
    start = (
        "classification by BertForSequenceClassification; "
        f"8 weights of {size:,} parameters; "
    )
    assert repr(la) == f"LowRankKronLoRALaplace({start}not fitted; prior precision 1)"
    la.fit(ragged_batches())
    la.prior_precision = 2.5
    assert repr(la).endswith("; fitted to 8 examples; prior precision 2.5)")

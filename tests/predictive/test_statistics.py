"""One pass over the data answers what any prior precision would predict."""

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

import laplace_lora_ext
from laplace_lora_ext.predictive.statistics import from_triangle, upper_triangle
from tests.support.models import ragged_batches
from tests.support.posteriors import PRIORS, fitted, make, some_precision


@pytest.mark.parametrize("structure", PRIORS)
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("rank", [0, 3, 100])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_moments_equal_dense_algebra(kind, rank, tail, structure):
    la = fitted(kind, rank=rank, tail=tail, temperature=0.7)
    batches = ragged_batches(seed=5)
    statistics = la.predictive_statistics(batches, dtype=torch.float64)
    la.prior_precision = some_precision(la, structure)
    f_mu, f_var = statistics.moments(la.prior_precision)
    Js, expected_mu = (torch.cat(x) for x in zip(*map(la.backend.jacobians, batches), strict=True))
    covariance = torch.linalg.inv(la.posterior_precision.to_matrix())
    torch.testing.assert_close(f_mu, expected_mu)
    torch.testing.assert_close(f_var, Js @ covariance @ Js.mT, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("structure", PRIORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_equal_the_direct_predictive(dtype, structure):
    la = fitted(dtype=dtype)
    batches = ragged_batches()
    statistics = la.predictive_statistics(batches)
    assert statistics.f_mu.dtype == torch.float32
    assert statistics.f_mu.device.type == "cpu"
    la.prior_precision = some_precision(la, structure)
    f_mu, f_var = statistics.moments(la.prior_precision)
    direct = [la.predictive_moments(batch) for batch in batches]
    expected_mu, expected_var = (torch.cat(x).float() for x in zip(*direct, strict=True))
    torch.testing.assert_close(f_mu, expected_mu, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(f_var, expected_var, rtol=1e-5, atol=1e-6)


def test_moments_know_other_scales_of_the_curvature():
    la, other = fitted(), fitted(temperature=0.3)
    statistics = la.predictive_statistics(ragged_batches()[:1], dtype=torch.float64)
    expected = other.predictive_moments(ragged_batches()[0])
    torch.testing.assert_close(statistics.moments(1.0, other.curvature_scale), expected)


@pytest.mark.parametrize("structure", PRIORS)
def test_moments_are_differentiable_in_the_prior_precision(structure):
    la = fitted()
    statistics = la.predictive_statistics(ragged_batches()[:1], dtype=torch.float64)
    precision = some_precision(la, structure).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: statistics.moments(p).f_var, (precision,))


def test_moments_are_the_same_however_many_examples_are_weighted_at_once(monkeypatch):
    la = fitted()
    statistics = la.predictive_statistics(ragged_batches())
    expected = statistics.moments(0.5)
    monkeypatch.setattr("laplace_lora_ext.predictive.statistics._CHUNK", 1)
    torch.testing.assert_close(statistics.moments(0.5), expected)


def test_an_infinite_prior_precision_leaves_layers_out():
    la = fitted()
    statistics = la.predictive_statistics(ragged_batches(), dtype=torch.float64)
    precision = torch.tensor([2.0 if ".layer.0." in b.name else torch.inf for b in la.blocks])
    first = fitted(layers_to_transform=range(1), prior_precision=2.0)
    _, expected = first.predictive_moments(ragged_batches()[0])
    f_var = statistics[:3].moments(precision).f_var
    assert not torch.allclose(f_var, statistics[:3].moments(2.0).f_var)
    torch.testing.assert_close(f_var, expected)


def test_parts_keep_their_targets():
    la = fitted()
    batches = ragged_batches()
    statistics = la.predictive_statistics(batches)
    labels = torch.cat([batch["labels"] for batch in batches])
    assert len(statistics) == len(labels)
    torch.testing.assert_close(statistics.targets, labels)
    index = torch.tensor([6, 1])
    part = statistics[index]
    assert len(part) == 2
    torch.testing.assert_close(part.targets, labels[index])
    torch.testing.assert_close(part.moments(2.0).f_var, statistics.moments(2.0).f_var[index])


def test_a_thousand_examples_of_a_7b_adapter_fit_in_250_mb():
    """128 blocks of r 8, rank 10, four classes: nothing depends on the model's width."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(63)), nn.Linear(16, 4))
    names = [name for name, _ in model.named_modules() if name]
    inject_adapter_in_model(LoraConfig(target_modules=names, r=8, init_lora_weights=False), model)
    la = make(model)
    X = torch.randn(40, 16)
    la.fit([(X, torch.arange(40) % 4)])
    statistics = la.predictive_statistics([X[:5]])
    n_blocks, r, rank, n_outputs = len(la.blocks), 8, 10, 4
    assert n_blocks == 128
    # The last B is 4 x 8: both its factors are small, and its rank is 4.
    leading = r * rank * (n_blocks - 1) + r * 4
    remaining = r * (n_blocks - 1)
    numbers = n_outputs * (1 + leading) + remaining * n_outputs * (n_outputs + 1) // 2
    assert statistics.nbytes == 5 * 4 * numbers
    per_example = 4 * (n_outputs * (1 + r * rank * 128) + r * 128 * 10)
    assert per_example == 204_816  # as the class documents it
    assert 1000 * per_example <= 250e6
    assert f"{4 * numbers / 1e3:.1f} kB an example" in repr(statistics)


def test_the_documented_size_is_the_tested_one():
    assert "205 kB" in laplace_lora_ext.PredictiveStatistics.__doc__


def test_triangles_round_trip():
    matrices = torch.randn(3, 2, 4, 4).double()
    matrices = matrices + matrices.mT
    torch.testing.assert_close(from_triangle(upper_triangle(matrices), 4), matrices)


@pytest.mark.parametrize("precision", [0.0, -1.0, torch.nan, torch.ones(3)])
def test_bad_prior_precisions_are_refused(precision):
    statistics = fitted().predictive_statistics(ragged_batches())
    with pytest.raises(ValueError, match=r"above 0|one prior precision"):
        statistics.moments(precision)

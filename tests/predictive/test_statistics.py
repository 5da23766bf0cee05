"""One pass over the data answers what any prior precision would predict."""

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from tests.support.models import ragged_batches
from tests.support.posteriors import PRIORS, fitted, make, some_precision


def test_an_infinite_prior_precision_leaves_layers_out():
    la = fitted()
    statistics = la.predictive_statistics(ragged_batches(), dtype=torch.float64)
    precision = torch.tensor([2.0 if ".layer.0." in b.name else torch.inf for b in la.blocks])
    first = fitted(layers_to_transform=range(1), prior_precision=2.0)
    _, expected = first.predictive_moments(ragged_batches()[0])
    f_var = statistics[:3].moments(precision).f_var
    assert not torch.allclose(f_var, statistics[:3].moments(2.0).f_var)
    torch.testing.assert_close(f_var, expected)


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


@pytest.mark.parametrize("precision", [0.0, -1.0, torch.nan, torch.ones(3)])
def test_bad_prior_precisions_are_refused(precision):
    statistics = fitted().predictive_statistics(ragged_batches())
    with pytest.raises(ValueError, match=r"above 0|one prior precision"):
        statistics.moments(precision)


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize(("rank", "tail"), [(0, True), (3, True), (3, False), (100, False)])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_moments_equal_dense_algebra(kind, rank, tail, prior, monkeypatch):
    la, batches = fitted(kind, rank=rank, tail=tail, temperature=0.7), ragged_batches(seed=5)
    statistics = la.predictive_statistics(batches, dtype=torch.float64)
    la.prior_precision = some_precision(la, prior)
    f_mu, f_var = statistics.moments(la.prior_precision)
    Js, expected_mu = (torch.cat(x) for x in zip(*map(la.backend.jacobians, batches), strict=True))
    covariance = torch.linalg.inv(la.posterior_precision.to_matrix())
    torch.testing.assert_close(f_mu, expected_mu)
    torch.testing.assert_close(f_var, Js @ covariance @ Js.mT, rtol=1e-9, atol=1e-9)
    warmer = fitted(kind, rank=rank, tail=tail)  # another scale of the curvature
    expected = statistics.moments(la.prior_precision, warmer._H_factor).f_var
    warmer.prior_precision = la.prior_precision
    torch.testing.assert_close(warmer.predictive_moments(batches[0]).f_var, expected[:3])
    index, targets = torch.tensor([6, 1]), torch.cat([batch["labels"] for batch in batches])
    part = statistics[index]
    assert torch.equal(part.targets, targets[index])
    torch.testing.assert_close(part.moments(la.prior_precision).f_var, f_var[index])
    monkeypatch.setattr("laplace_lora_ext.predictive.statistics._CHUNK", 1)
    torch.testing.assert_close(statistics.moments(la.prior_precision).f_var, f_var)


@pytest.mark.parametrize("prior", PRIORS)
def test_moments_of_a_single_precision_and_their_gradients(prior):
    la, batches = fitted(dtype=torch.float32), ragged_batches()
    statistics = la.predictive_statistics(batches)
    assert (statistics.f_mu.dtype, statistics.f_mu.device.type) == (torch.float32, "cpu")
    la.prior_precision = some_precision(la, prior)
    moments = statistics.moments(la.prior_precision)
    direct = [la.predictive_moments(batch) for batch in batches]
    for found, parts in zip(moments, zip(*direct, strict=True), strict=True):
        torch.testing.assert_close(found, torch.cat(parts), rtol=1e-5, atol=1e-6)
    statistics = fitted().predictive_statistics(batches[:1], dtype=torch.float64)
    precision = some_precision(fitted(), prior).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: statistics.moments(p).f_var, (precision,))

"""One pass over the data answers what any prior precision would predict."""

import pytest
import torch

from laplace_lora_ext.predictive.statistics import (
    MixtureStatistics,
)
from tests.support.models import ragged_batches
from tests.support.posteriors import (
    PRIORS,
    fitted,
    some_precision,
)


def test_an_infinite_prior_precision_leaves_layers_out():
    la = fitted()
    statistics = la.predictive_statistics(ragged_batches(), dtype=torch.float64)
    precision = torch.tensor([2.0 if ".layer.0." in b.name else torch.inf for b in la.blocks])
    first = fitted(layers_to_transform=range(1), prior_precision=2.0)
    _, expected = first.predictive_moments(ragged_batches()[0])
    f_var = statistics[:3].moments(precision).f_var
    assert not torch.allclose(f_var, statistics[:3].moments(2.0).f_var)
    torch.testing.assert_close(f_var, expected)
    assert not statistics.moments(torch.full_like(precision, torch.inf)).f_var.any()


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize(
    ("rank", "tail"),
    [(0, True), (3, True), (3, False), (100, False)],
)
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_moments_equal_dense_algebra(kind, rank, tail, prior, monkeypatch):
    la, batches = (
        fitted(kind, rank=rank, tail=tail, temperature=0.7),
        ragged_batches(seed=5),
    )
    statistics = la.predictive_statistics(batches, dtype=torch.float64)
    la.prior_precision = some_precision(la, prior)
    f_mu, f_var = statistics.moments(la.prior_precision)
    Js, expected_mu = (torch.cat(x) for x in zip(*map(la.backend.jacobians, batches), strict=True))
    covariance = torch.linalg.inv(la.posterior_precision.to_matrix())
    torch.testing.assert_close(f_mu, expected_mu)
    torch.testing.assert_close(f_var, Js @ covariance @ Js.mT, rtol=1e-9, atol=1e-9)
    index, targets = (
        torch.tensor([6, 1]),
        torch.cat([batch["labels"] for batch in batches]),
    )
    part = statistics[index]
    assert torch.equal(part.targets, targets[index])
    torch.testing.assert_close(part.moments(la.prior_precision).f_var, f_var[index])
    monkeypatch.setattr("laplace_lora_ext.predictive.statistics._AT_ONCE", 3)
    torch.testing.assert_close(statistics.moments(la.prior_precision).f_var, f_var)


@pytest.mark.parametrize("prior", PRIORS)
def test_moments_of_a_single_precision_and_their_gradients(prior):
    la, batches = fitted(dtype=torch.float32), ragged_batches()
    statistics = la.predictive_statistics(batches)
    assert (
        statistics.f_mu.dtype,
        statistics.f_mu.device.type,
    ) == (torch.float32, "cpu")
    la.prior_precision = some_precision(la, prior)
    moments = statistics.moments(la.prior_precision)
    direct = [la.predictive_moments(batch) for batch in batches]
    for found, parts in zip(moments, zip(*direct, strict=True), strict=True):
        torch.testing.assert_close(found, torch.cat(parts), rtol=1e-5, atol=1e-6)
    statistics = fitted().predictive_statistics(batches[:1], dtype=torch.float64)
    precision = some_precision(fitted(), prior).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: statistics.moments(p).f_var, (precision,))


def test_members_of_a_mixture_must_have_the_same_order():
    statistics = fitted().predictive_statistics(ragged_batches())
    with pytest.raises(ValueError, match="a loader that does not shuffle"):
        MixtureStatistics((statistics, statistics[torch.arange(8).flip(0)]), ())

"""One pass over the data answers what any prior precision would predict."""

import pytest
import torch
from torch.testing import assert_close

from laplace_lora_ext.predictive.statistics import MixtureStatistics
from tests.support.models import ragged_batches
from tests.support.posteriors import PRIORS, fitted, some_precision


def test_an_infinite_prior_precision_leaves_layers_out():
    batch = ragged_batches()[0]
    la = fitted()
    statistics = la.predictive_statistics([batch], dtype=torch.float64)
    is_first = torch.tensor([".layer.0." in block.name for block in la.blocks])
    of_first_layer = torch.where(is_first, 2.0, torch.inf)
    f_var = statistics.moments(of_first_layer).f_var

    first = fitted(layers_to_transform=range(1), prior_precision=2.0)
    expected = first.predictive_moments(batch).f_var
    of_all_layers = statistics.moments(2.0).f_var
    assert_close(f_var, expected)
    assert not torch.allclose(f_var, of_all_layers)
    of_none = torch.full_like(of_first_layer, torch.inf)
    assert not statistics.moments(of_none).f_var.any()


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize(
    ("rank", "tail"),
    [(0, True), (3, True), (3, False), (100, False)],
)
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_moments_equal_dense_algebra(kind, rank, tail, prior, monkeypatch):
    la = fitted(kind, rank=rank, tail=tail, temperature=0.7)
    batches = ragged_batches(seed=5)
    statistics = la.predictive_statistics(batches, dtype=torch.float64)
    precision = some_precision(la, prior)
    f_mu, f_var = statistics.moments(precision)

    la.prior_precision = precision
    covariance = torch.linalg.inv(la.posterior_precision.to_matrix())
    Js = []
    logits = []
    for batch in batches:
        J, of_batch = la.backend.jacobians(batch)
        Js.append(J)
        logits.append(of_batch)
    J = torch.cat(Js)
    assert_close(f_mu, torch.cat(logits))
    assert_close(f_var, J @ covariance @ J.mT, rtol=1e-9, atol=1e-9)

    index = torch.tensor([6, 1])
    targets = torch.cat([batch["labels"] for batch in batches])
    part = statistics[index]
    assert torch.equal(part.targets, targets[index])
    assert_close(part.moments(precision).f_var, f_var[index])

    # Whatever part of the examples is in memory at once.
    monkeypatch.setattr("laplace_lora_ext.predictive.statistics._AT_ONCE", 3)
    assert_close(statistics.moments(precision).f_var, f_var)


@pytest.mark.parametrize("prior", PRIORS)
def test_moments_in_single_precision(prior):
    la = fitted(dtype=torch.float32)
    batches = ragged_batches()
    statistics = la.predictive_statistics(batches)
    assert statistics.f_mu.dtype == torch.float32
    assert statistics.f_mu.device.type == "cpu"
    la.prior_precision = some_precision(la, prior)
    found = statistics.moments(la.prior_precision)
    direct = [la.predictive_moments(batch) for batch in batches]
    f_mu = torch.cat([moments.f_mu for moments in direct])
    f_var = torch.cat([moments.f_var for moments in direct])
    assert_close(found.f_mu, f_mu, rtol=1e-5, atol=1e-6)
    assert_close(found.f_var, f_var, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("prior", PRIORS)
def test_moments_have_gradients_of_the_prior_precision(prior):
    la = fitted()
    batch = ragged_batches()[0]
    statistics = la.predictive_statistics([batch], dtype=torch.float64)

    def variances(precision):
        return statistics.moments(precision).f_var

    precision = some_precision(la, prior).requires_grad_()
    assert torch.autograd.gradcheck(variances, (precision,))


def test_members_of_a_mixture_must_have_the_same_order():
    statistics = fitted().predictive_statistics(ragged_batches())
    backwards = statistics[torch.arange(8).flip(0)]
    with pytest.raises(ValueError, match="a loader that does not shuffle"):
        MixtureStatistics((statistics, backwards), ())

"""One pass over the data answers what any prior precision would predict."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext.predictive.statistics import MixtureStatistics
from tests.support.dense import labels_of, predicted
from tests.support.models import first_batch, ragged_batches
from tests.support.posteriors import (
    PRIORS,
    fitted,
    some_precision,
)

# Of two batches, and not in their order.
SOME_TEXTS = torch.tensor([6, 1])


# --- against dense algebra ------------------------------------------------------------


@pytest.fixture(
    params=[
        pytest.param((0, True), id="tail alone"),
        pytest.param((3, True), id="rank and tail"),
        pytest.param((3, False), id="rank alone"),
        pytest.param((100, False), id="full rank"),
    ],
)
def rank_and_tail(request: pytest.FixtureRequest) -> tuple[int, bool]:
    return request.param


@pytest.fixture(params=["bert", "gpt2"])
def la(
    request: pytest.FixtureRequest,
    rank_and_tail: tuple[int, bool],
):
    """A posterior of a classifier and of a language model, of all kinds of factors."""
    rank, tail = rank_and_tail
    return fitted(
        request.param,
        rank=rank,
        tail=tail,
        temperature=0.7,
    )


def statistics_of(
    la: Any,
    batches: Sequence[Any],
):
    """Compute statistics in float64, as predictions of batches are."""
    return la.predictive_statistics(
        batches,
        dtype=torch.float64,
    )


@pytest.mark.parametrize("prior", PRIORS)
def test_moments_equal_dense_algebra(la, prior):
    batches = ragged_batches(seed=5)
    statistics = statistics_of(la, batches)
    precision = some_precision(la, prior)
    f_mu, f_var = statistics.moments(precision)

    la.prior_precision = precision
    P = la.posterior_precision.to_matrix()
    covariance = torch.linalg.inv(P)
    Js = []
    logits = []
    for batch in batches:
        J, of_batch = la.backend.jacobians(batch)
        Js.append(J)
        logits.append(of_batch)
    J = torch.cat(Js)
    expected_var = J @ covariance @ J.mT
    assert_close(f_mu, torch.cat(logits))
    assert_close(f_var, expected_var, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("prior", PRIORS)
def test_a_part_of_statistics_has_its_moments(la, prior):
    batches = ragged_batches(seed=5)
    statistics = statistics_of(la, batches)
    precision = some_precision(la, prior)
    _, f_var = statistics.moments(precision)
    part = statistics[SOME_TEXTS]
    _, of_part = part.moments(precision)
    assert_close(of_part, f_var[SOME_TEXTS])


def test_a_part_of_statistics_has_its_labels(la):
    batches = ragged_batches(seed=5)
    statistics = statistics_of(la, batches)
    part = statistics[SOME_TEXTS]
    labels = labels_of(batches)
    assert torch.equal(part.targets, labels[SOME_TEXTS])


@pytest.mark.parametrize("prior", PRIORS)
def test_moments_do_not_depend_on_how_many_are_in_memory_at_once(
    la,
    prior,
    monkeypatch,
):
    batches = ragged_batches(seed=5)
    statistics = statistics_of(la, batches)
    precision = some_precision(la, prior)
    _, expected = statistics.moments(precision)
    # Fewer than there are, and no divisor of their number.
    monkeypatch.setattr("laplace_lora_ext.predictive.statistics._AT_ONCE", 3)
    _, found = statistics.moments(precision)
    assert_close(found, expected)


# --- an infinite prior precision ------------------------------------------------------


def test_an_infinite_prior_precision_leaves_layers_out():
    batch = first_batch()
    la = fitted()
    statistics = statistics_of(la, [batch])
    precisions = []
    for block in la.blocks:
        is_first = ".layer.0." in block.name
        precisions.append(2.0 if is_first else torch.inf)
    of_first_layer = torch.tensor(precisions)
    _, found = statistics.moments(of_first_layer)

    first = fitted(
        layers_to_transform=range(1),
        prior_precision=2.0,
    )
    _, expected = first.predictive_moments(batch)
    assert_close(found, expected)
    # Otherwise the equality would hold of layers that play no part.
    _, of_all_layers = statistics.moments(2.0)
    assert not torch.allclose(found, of_all_layers)


def test_where_all_layers_are_left_out_nothing_varies():
    la = fitted()
    batches = ragged_batches()
    statistics = statistics_of(la, batches)
    n_blocks = len(la.blocks)
    of_none = torch.full((n_blocks,), torch.inf)
    _, f_var = statistics.moments(of_none)
    assert not f_var.any()


# --- dtypes and gradients -------------------------------------------------------------


@pytest.mark.parametrize("prior", PRIORS)
def test_moments_in_single_precision(prior):
    la = fitted(dtype=torch.float32)
    batches = ragged_batches()
    statistics = la.predictive_statistics(batches)
    assert statistics.f_mu.dtype == torch.float32
    assert statistics.f_mu.device.type == "cpu"
    la.prior_precision = some_precision(la, prior)
    found = statistics.moments(la.prior_precision)
    expected = predicted(la, batches)
    # Float32, in another order of sums.
    assert_close(tuple(found), tuple(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("prior", PRIORS)
def test_moments_have_gradients_of_the_prior_precision(prior):
    la = fitted()
    batch = first_batch()
    statistics = statistics_of(la, [batch])

    def variances(precision: Tensor) -> Tensor:
        _, f_var = statistics.moments(precision)
        return f_var

    precision = some_precision(la, prior)
    precision.requires_grad_()
    is_right = torch.autograd.gradcheck(variances, (precision,))
    assert is_right


# --- mixtures -------------------------------------------------------------------------


def test_members_of_a_mixture_must_have_the_same_order():
    la = fitted()
    batches = ragged_batches()
    statistics = la.predictive_statistics(batches)
    from_last_to_first = torch.arange(8).flip(0)
    backwards = statistics[from_last_to_first]
    members = (statistics, backwards)
    message = "a loader that does not shuffle"
    with pytest.raises(ValueError, match=message):
        MixtureStatistics(members, ())

"""One pass over the data answers what any prior precision would predict."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext.predictive.statistics import MixtureStatistics
from tests.support.dense import labels_of, predicted
from tests.support.models import first_batch, ragged_batches, without_labels
from tests.support.posteriors import PRIORS, fitted, some_precision

# Of two batches, and not in their order.
SOME_TEXTS = torch.tensor([6, 1])


# --- against dense algebra ------------------------------------------------------------


def statistics_of(la: Any, batches: Sequence[Any]):
    """Compute statistics in float64, as predictions of batches are."""
    return la.predictive_statistics(batches, dtype=torch.float64)


# Tail alone, rank and tail, rank alone, full rank.
@pytest.mark.parametrize(
    ("kind", "rank", "tail", "prior"),
    [
        ("bert", 0, True, "layerwise"),
        ("gpt2", 3, True, "scalar"),
        ("bert", 3, False, "layerwise"),
        ("bert", 100, False, "scalar"),
    ],
)
def test_moments_equal_dense_algebra(kind, rank, tail, prior, monkeypatch):
    la = fitted(kind, rank=rank, tail=tail, temperature=0.7)
    batches = ragged_batches(seed=5)
    statistics = statistics_of(la, batches)
    la.prior_precision = precision = some_precision(la, prior)
    covariance = torch.linalg.inv(la.posterior_precision.to_matrix())
    Js, logits = zip(*(la.backend.jacobians(batch) for batch in batches), strict=True)
    J = torch.cat(Js)
    f_mu, f_var = statistics.moments(precision)
    assert_close(f_mu, torch.cat(logits))
    assert_close(f_var, J @ covariance @ J.mT, rtol=1e-9, atol=1e-9)

    part = statistics[SOME_TEXTS]
    assert_close(part.moments(precision).f_var, f_var[SOME_TEXTS])
    assert torch.equal(part.targets, labels_of(batches)[SOME_TEXTS])
    # Fewer than there are, and no divisor of their number.
    monkeypatch.setattr("laplace_lora_ext.predictive.statistics._AT_ONCE", 3)
    assert_close(statistics.moments(precision).f_var, f_var)


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

    first = fitted(layers_to_transform=range(1), prior_precision=2.0)
    _, expected = first.predictive_moments(batch)
    assert_close(found, expected)
    of_none = torch.full((len(la.blocks),), torch.inf)
    assert not statistics.moments(of_none).f_var.any()
    # Otherwise the equality would hold of layers that play no part.
    _, of_all_layers = statistics.moments(2.0)
    assert not torch.allclose(found, of_all_layers)


# --- dtypes and gradients -------------------------------------------------------------


def test_moments_in_single_precision():
    la = fitted(dtype=torch.float32)
    batches = ragged_batches()
    statistics = la.predictive_statistics(batches)
    assert statistics.f_mu.dtype == torch.float32
    assert statistics.f_mu.device.type == "cpu"
    la.prior_precision = some_precision(la, "layerwise")
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
    with pytest.raises(ValueError, match="does not shuffle"):
        MixtureStatistics(members, ())


def test_statistics_of_no_data_or_of_other_labels_are_refused():
    la = fitted()
    with pytest.raises(ValueError, match="no data"):
        la.predictive_statistics([])
    batches = ragged_batches()
    unlabelled = [without_labels(batch) for batch in batches]
    assert la.predictive_statistics(unlabelled).targets is None
    with pytest.raises(ValueError, match="others have none"):
        la.predictive_statistics([batches[0], unlabelled[1]])
    wrong = batches[1] | {"labels": torch.tensor([0, 7, 1])}
    with pytest.raises(ValueError, match="batch 1: labels must be"):
        la.predictive_statistics([batches[0], wrong])
    # A number that is not among those that are compared with the fit's.
    la.blocks[0].owner.base_layer.weight.data[0, 1] = torch.nan
    with pytest.raises(ValueError, match=r"batch 0: .*non-finite"):
        la.predictive_statistics(batches)

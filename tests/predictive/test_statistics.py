"""One pass over the data answers what any prior precision would predict."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.support.dense import labels_of, predicted
from tests.support.models import first_batch, ragged_batches, without_labels
from tests.support.posteriors import fitted, priors_of_blocks

# Of two batches, and not in their order.
SOME_TEXTS = torch.tensor([6, 1])


# --- against dense algebra ------------------------------------------------------------


def statistics_of(la: Any, batches: Sequence[Any]):
    """Compute statistics in float64, as predictions of batches are."""
    return la.predictive_statistics(batches, dtype=torch.float64)


# Tail alone, rank and tail, rank alone, full rank.
@pytest.mark.parametrize(
    ("kind", "rank", "tail", "n_priors"),
    [
        ("bert", 0, True, None),
        ("gpt2", 3, True, 1),
        ("bert", 3, False, None),
        ("bert", 100, False, 1),
    ],
)
def test_moments_are_those_of_predictions_under_any_prior(
    kind, rank, tail, n_priors, monkeypatch
):
    la = fitted(kind, rank=rank, tail=tail, temperature=0.7)
    batches = ragged_batches(seed=5)
    statistics = statistics_of(la, batches)
    by_default = la.predictive_statistics(batches)
    la.prior_precision = precision = priors_of_blocks(la)[:n_priors]
    expected = predicted(la, batches)
    moments = statistics.moments(precision)
    assert_close(tuple(moments), tuple(expected), rtol=1e-9, atol=1e-9)
    in_float32 = by_default.moments(precision)
    assert in_float32.f_mu.dtype == torch.float32
    assert_close(
        tuple(in_float32.to(torch.float64)), tuple(moments), rtol=1e-5, atol=1e-5
    )

    f_var = moments.f_var
    part = statistics[SOME_TEXTS]
    assert_close(part.moments(precision).f_var, f_var[SOME_TEXTS])
    assert torch.equal(part.targets, labels_of(batches)[SOME_TEXTS])
    # Fewer than there are, and no divisor of their number.
    monkeypatch.setattr("laplace_lora_ext.predictive.statistics._AT_ONCE", 3)
    assert_close(statistics.moments(precision).f_var, f_var)


# --- an infinite prior precision ------------------------------------------------------


def test_an_infinite_prior_precision_leaves_layers_out(la, batch):
    statistics = statistics_of(la, [batch])
    of_first_layer = torch.tensor(
        [2.0 if ".layer.0." in block.name else torch.inf for block in la.blocks]
    )
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


def test_moments_have_gradients_of_the_prior_precision(la):
    statistics = statistics_of(la, [first_batch()])
    precision = priors_of_blocks(la).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda precision: statistics.moments(precision).f_var, (precision,)
    )


def test_labels_in_some_batches_alone_are_refused(la):
    first, second, _ = ragged_batches()
    with pytest.raises(ValueError, match="others have none"):
        la.predictive_statistics([first, without_labels(second)])

"""The broadest posterior whose draws agree with the model on the training data."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.testing import assert_close
from torch.utils.data import DataLoader

from tests.support.models import ragged_batches, without_labels
from tests.support.posteriors import fitted, generator
from tests.support.ranks import Texts

METHOD = "agreement"

Batch = dict[str, Tensor]


def change(la: Any, batches: list[Batch], n_samples: int = 20_000) -> float:
    """Compute draws' mean total variation distance, text by text."""
    # Others than the search has, which would agree with themselves.
    torch.manual_seed(1)
    distances = []
    for batch in batches:
        inputs = without_labels(batch)
        f_mu, f_var = la.predictive_moments(inputs)
        for mean, covariance in zip(f_mu, f_var, strict=True):
            identity = torch.eye(len(mean)).to(mean)
            # What all logits share may have no variance at all.
            jitter = 1e-10 * identity
            of_text = MultivariateNormal(mean, covariance + jitter)
            drawn = of_text.sample((n_samples,))
            differences = drawn.softmax(-1) - mean.softmax(-1)
            of_draws = differences.abs().sum(-1) / 2
            distances.append(of_draws.mean())
    of_texts = torch.stack(distances)
    return of_texts.mean().item()


@pytest.mark.parametrize("max_change", [0.05, 0.2])
def test_draws_change_the_predictions_by_as_much_as_is_allowed(max_change):
    la = fitted()
    unlabelled = [without_labels(batch) for batch in ragged_batches()]
    history = la.optimize_prior_precision(
        method=METHOD,
        train_loader=unlabelled,
        max_change=max_change,
        n_samples=5_000,
        generator=generator(),
    )
    # The sampling error of both estimates, and 1 % of a prior precision.
    expected = pytest.approx(max_change, rel=0.03)
    assert change(la, ragged_batches()) == expected
    assert history.chosen.objective == expected
    # In few steps; a narrower prior changes less.
    assert len(history.trials) < 20
    order = history.prior_precision.flatten().argsort()
    # Without exception, for all points have the same draws.
    assert history.objective[order].diff().max() < 0


@pytest.mark.parametrize("start", [1e-5, 1e5, torch.arange(1.0, 9.0)], ids=str)
def test_the_start_is_scaled_as_a_whole_wherever_it_is(start):
    la = fitted()
    history = la.optimize_prior_precision(
        method=METHOD,
        train_loader=ragged_batches(),
        init_prior_prec=start,
        n_samples=1000,
        generator=generator(),
    )
    factors = la.prior_precision / start
    assert_close(factors, factors[:1].expand_as(factors))
    # The change that is allowed unless told otherwise.
    assert change(la, ragged_batches()) == pytest.approx(0.1, rel=0.05)
    # What is chosen was measured, and no other is nearer.
    distances = (history.objective - 0.1).abs()
    assert distances[history.choice] == distances.min() < 1e-2


# --- some texts of many ---------------------------------------------------------------


@pytest.fixture
def many() -> DataLoader:
    """Sixty texts."""
    return DataLoader(Texts(60), batch_size=5)


@pytest.fixture
def of_many(many: DataLoader):
    """A posterior that is fitted to them."""
    la = fitted()
    la.fit(many)
    return la


def changes(la: Any, data: Any, generator: torch.Generator | None = None) -> Tensor:
    """Compute the change at each point by twenty texts.

    The first point is the same for all.
    """
    history = la.optimize_prior_precision(
        method=METHOD, max_examples=20, train_loader=data, generator=generator
    )
    return history.objective


def test_of_a_loader_no_more_than_what_is_drawn_passes_through_the_model(of_many, many):
    n_texts = []
    of_many.model.register_forward_hook(lambda *call: n_texts.append(len(call[-1])))
    changes(of_many, many)
    assert sum(n_texts) == 20
    # Of a list all do.
    n_texts.clear()
    changes(of_many, list(many))
    assert sum(n_texts) == 60


def test_the_texts_depend_on_the_generator_alone(of_many, many):
    first = changes(of_many, many, generator(0))
    assert torch.equal(changes(of_many, many, generator(0)), first)
    # Of the same prior precision, so that the texts must be others.
    assert changes(of_many, many, generator(1))[0] != first[0]
    assert torch.equal(changes(of_many, many), changes(of_many, many))


def test_what_can_not_agree_is_said():
    la = fitted()
    message = "that the adapter is trained"
    # Of so narrow a prior no draw differs from the model.
    with pytest.warns(UserWarning, match=message):
        la.optimize_prior_precision(
            method=METHOD,
            train_loader=ragged_batches(),
            init_prior_prec=1e20,
            n_samples=5,
        )


def test_data_that_can_be_read_once_are_the_same_at_every_prior_precision():
    la = fitted()

    def objective(data: Any) -> Tensor:
        history = la.optimize_prior_precision(
            method=METHOD, train_loader=data, n_samples=50
        )
        return history.objective

    batches = ragged_batches()
    found = objective(iter(batches))
    expected = objective(batches)
    assert torch.equal(found, expected)

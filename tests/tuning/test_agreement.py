"""The broadest posterior whose draws agree with the model on the training data."""

from typing import Any

import pytest
import torch
from torch.distributions import MultivariateNormal
from torch.testing import assert_close
from torch.utils.data import DataLoader

from tests.support.models import ragged_batches, without_labels
from tests.support.posteriors import STRUCTURES, fitted, generator
from tests.support.ranks import Texts

METHOD = "agreement"

Batch = dict[str, torch.Tensor]


def change(
    la: Any,
    batches: list[Batch],
    n_samples: int = 20_000,
) -> float:
    """Compute draws' mean total variation distance, text by text."""
    torch.manual_seed(1)
    distances = []
    for batch in batches:
        f_mu, f_var = la.predictive_moments(without_labels(batch))
        for mean, covariance in zip(f_mu, f_var, strict=True):
            # What all logits share may have no variance at all.
            jitter = 1e-10 * torch.eye(len(mean)).to(mean)
            of_text = MultivariateNormal(mean, covariance + jitter)
            drawn = of_text.sample((n_samples,))
            differences = drawn.softmax(-1) - mean.softmax(-1)
            of_draws = differences.abs().sum(-1) / 2
            distances.append(of_draws.mean())
    return torch.stack(distances).mean().item()


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("max_change", [0.05, 0.2])
def test_draws_change_the_predictions_by_as_much_as_is_allowed(structure, max_change):
    la = fitted(structure=structure)
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
    assert history.objective[-1].item() == expected


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("max_change", [0.05, 0.2])
def test_few_steps_are_taken_and_a_narrower_prior_changes_less(structure, max_change):
    la = fitted(structure=structure)
    history = la.optimize_prior_precision(
        method=METHOD,
        train_loader=ragged_batches(),
        max_change=max_change,
        n_samples=500,
        generator=generator(),
    )
    assert len(history.step) < 20
    order = history.prior_precision.flatten().argsort()
    changes = history.objective[order]
    assert (changes.diff() < 0).all()


@pytest.mark.parametrize("start", [1e-5, 1e5, torch.arange(1.0, 9.0)])
def test_the_start_is_scaled_as_a_whole_wherever_it_is(start):
    la = fitted()
    la.optimize_prior_precision(
        method=METHOD,
        train_loader=ragged_batches(),
        init_prior_prec=start,
        n_samples=1000,
        generator=generator(),
    )
    factors = la.prior_precision / start
    assert_close(factors, factors[:1].expand_as(factors))
    assert change(la, ragged_batches()) == pytest.approx(0.1, rel=0.05)


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


def changes(
    la: Any,
    data: Any,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Compute the change at each point by twenty texts.

    The first point is the same for all.
    """
    history = la.optimize_prior_precision(
        method=METHOD,
        max_examples=20,
        train_loader=data,
        generator=generator,
    )
    return history.objective


def count_texts(la: Any) -> list[int]:
    """Make a list that gets how many texts each pass has."""
    n_texts: list[int] = []

    def note_size(
        module: torch.nn.Module,
        args: Any,
        logits: torch.Tensor,
    ) -> None:
        n_texts.append(len(logits))

    la.model.register_forward_hook(note_size)
    return n_texts


def test_of_a_loader_no_more_than_what_is_drawn_passes_through_the_model(of_many, many):
    n_texts = count_texts(of_many)
    changes(of_many, many)
    assert sum(n_texts) == 20


def test_of_a_list_all_texts_pass_through_the_model(of_many, many):
    batches = list(many)
    n_texts = count_texts(of_many)
    changes(of_many, batches)
    assert sum(n_texts) == 60


@pytest.mark.parametrize("is_listed", [False, True])
def test_the_texts_depend_on_the_generator_alone(of_many, many, is_listed):
    data = list(many) if is_listed else many
    first = changes(of_many, data, generator(0))
    same = changes(of_many, data, generator(0))
    other = changes(of_many, data, generator(1))
    assert torch.equal(same, first)
    assert other[0] != first[0]


def test_without_a_generator_the_texts_are_the_same_each_time(of_many, many):
    first = changes(of_many, many)
    same = changes(of_many, many)
    assert torch.equal(same, first)


def test_what_can_not_agree_is_said():
    la = fitted()
    with pytest.warns(UserWarning, match="that the adapter is trained"):
        la.optimize_prior_precision(
            method=METHOD,
            train_loader=ragged_batches(),
            init_prior_prec=1e20,
            n_samples=5,
        )


@pytest.mark.parametrize("structure", STRUCTURES)
def test_data_that_can_be_read_once_are_the_same_at_every_prior_precision(structure):
    la = fitted(structure=structure)

    def objective(data: Any) -> torch.Tensor:
        history = la.optimize_prior_precision(
            method=METHOD,
            train_loader=data,
            n_samples=50,
        )
        return history.objective

    batches = ragged_batches()
    found = objective(iter(batches))
    assert torch.equal(found, objective(batches))

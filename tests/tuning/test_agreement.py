"""The broadest posterior whose draws agree with the model on the training data."""

import pytest
import torch
from torch.distributions import MultivariateNormal
from torch.testing import assert_close
from torch.utils.data import DataLoader

from tests.support.models import ragged_batches, without_labels
from tests.support.posteriors import STRUCTURES, fitted, generator
from tests.support.ranks import Texts

METHOD = "agreement"


def change(la, batches, n_samples: int = 20_000) -> float:
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
    assert change(la, ragged_batches()) == pytest.approx(max_change, rel=0.03)
    assert history.objective[-1].item() == pytest.approx(max_change, rel=0.03)
    order = history.prior_precision.flatten().argsort()
    changes = history.objective[order]
    assert (changes.diff() < 0).all()
    assert len(history.step) < 20


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


def test_no_more_than_what_is_drawn_passes_through_the_model():
    la = fitted()
    many = DataLoader(Texts(60), batch_size=5)
    la.fit(many)
    n_texts = []

    def note_size(module, args, logits):
        n_texts.append(len(logits))

    la.model.register_forward_hook(note_size)

    def objective(train_loader, generator=None):
        """Compute the change at each point, the first of which is the same for all."""
        n_texts.clear()
        history = la.optimize_prior_precision(
            method=METHOD,
            max_examples=20,
            train_loader=train_loader,
            generator=generator,
        )
        return history.objective

    first = objective(many)
    assert sum(n_texts) == 20
    assert torch.equal(objective(many), first)
    other = objective(many, generator(1))
    assert other[0] != first[0]
    # Of a list all texts pass, and generators give other draws.
    first = objective(list(many), generator(0))
    assert sum(n_texts) == 60
    other = objective(list(many), generator(1))
    assert sum(n_texts) == 60
    assert other[0] != first[0]


def test_what_can_not_agree_is_said():
    with pytest.warns(UserWarning, match="that the adapter is trained"):
        fitted().optimize_prior_precision(
            method=METHOD,
            train_loader=ragged_batches(),
            init_prior_prec=1e20,
            n_samples=5,
        )


@pytest.mark.parametrize("structure", STRUCTURES)
def test_data_that_can_be_read_once_are_the_same_at_every_prior_precision(structure):
    la = fitted(structure=structure)

    def objective(data):
        history = la.optimize_prior_precision(
            method=METHOD, train_loader=data, n_samples=50
        )
        return history.objective

    once = iter(ragged_batches())
    assert torch.equal(objective(once), objective(ragged_batches()))

"""The broadest posterior whose draws agree with the model on the training data."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.testing import assert_close
from torch.utils.data import DataLoader, SubsetRandomSampler

from laplace_lora_ext import Agreement
from laplace_lora_ext.tuning import agreement
from tests.support.models import ragged_batches, without_labels
from tests.support.posteriors import fitted, generator
from tests.support.ranks import Texts

METHOD = "agreement"


def change(la: Any, batches: Iterable[Any], n_samples: int = 20_000) -> float:
    """Compute draws' mean total variation distance, text by text."""
    # Others than the search has, which would agree with themselves.
    torch.manual_seed(1)
    distances = []
    for batch in batches:
        f_mu, f_var = la.predictive_moments(la.model.inputs(batch))
        # What all logits share may have no variance at all.
        jitter = 1e-10 * torch.eye(f_mu.shape[1]).to(f_mu)
        drawn = MultivariateNormal(f_mu, f_var + jitter).sample((n_samples,))
        differences = drawn.softmax(-1) - f_mu.softmax(-1)
        distances.append(differences.abs().sum(-1).mean(0) / 2)
    return torch.cat(distances).mean().item()


def test_draws_change_the_predictions_by_as_much_as_is_allowed(la, monkeypatch):
    # So few numbers that each text is sampled by itself.
    monkeypatch.setattr(agreement, "_CHUNK", 1)
    max_change = 0.05
    # Which can be read once.
    unlabelled = (without_labels(batch) for batch in ragged_batches())
    history = la.optimize_prior_precision(
        method=METHOD,
        train_loader=unlabelled,
        max_change=max_change,
        n_samples=5_000,
        generator=generator(),
    )
    # The sampling error of both estimates, and half of 1 % of a prior precision.
    expected = pytest.approx(max_change, rel=0.01)
    assert change(la, ragged_batches()) == expected
    assert history.chosen.objective == expected
    # In few steps; a narrower prior changes less.
    assert len(history.trials) < 20
    order = history.prior_precision.flatten().argsort()
    # Without exception, for all points have the same draws.
    assert history.objective[order].diff().max() < 0


@pytest.mark.parametrize("start", [1e-5, 1e5, torch.arange(1.0, 9.0)], ids=str)
def test_the_start_is_scaled_as_a_whole_wherever_it_is(la, start):
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


def test_a_search_ends_where_nothing_agrees():
    # Of so narrow a prior no draw differs from the model.
    search = Agreement(train_loader=ragged_batches(), init_prior_prec=1e20, n_samples=5)
    (chosen,) = search(fitted()).chosen.prior_precision.tolist()
    assert chosen == pytest.approx(1e12)


def test_no_more_texts_than_are_drawn_pass_through_the_model(la):
    many = DataLoader(Texts(60), batch_size=5)
    la.fit(many)
    passed: list[Tensor] = []
    la.model.register_forward_hook(lambda *call: passed.append(call[-1].detach()))

    def search(data: Any, seed: int) -> list[Tensor]:
        passed.clear()
        options = {"train_loader": data, "generator": generator(seed)}
        changes = Agreement(max_examples=20, **options)(la).objective
        return [changes, torch.cat(passed)]

    changes, logits = search(many, 0)
    assert len(logits) == 20
    # Both depend on the generator alone.
    assert all(map(torch.equal, search(many, 0), [changes, logits]))
    assert not torch.equal(search(many, 1)[1], logits)
    # What a sampler leaves out is not drawn.
    part = DataLoader(Texts(60), sampler=SubsetRandomSampler(range(30, 60)))
    assert min(agreement.draw_some(part, 20, seed=0).dataset.indices) >= 30
    # Of a list all do.
    assert len(search(list(many), 0)[1]) == 60

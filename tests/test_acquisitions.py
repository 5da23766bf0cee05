"""What to label or measure next, and choices from a pool."""

from itertools import product

import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader

from laplace_lora_ext import LaplaceMixture, acquisitions
from tests.support.models import ragged_batches
from tests.support.posteriors import (
    another_training,
    fitted,
    generator,
    plain_regression,
)

POOL = {"lengths": (7, 4, 5, 7, 3, 6), "seed": 3}


def drawn_probabilities(n_draws=7, n_texts=6, n_classes=3):
    shape = (n_draws, n_texts, n_classes)
    logits = torch.randn(shape, generator=generator()).double()
    return (3 * logits).softmax(-1)


def joint_information(probabilities, places):
    """Compute what some labels tell of the weights, over all outcomes."""
    n_classes = probabilities.shape[2]
    total = 0.0
    for labels in product(range(n_classes), repeat=len(places)):
        of_labels = torch.ones(len(probabilities)).double()
        for place, label in zip(places, labels, strict=True):
            of_labels = of_labels * probabilities[:, place, label]
        total += torch.special.entr(of_labels.mean())
    # Given the weights, labels are independent: their entropies add up.
    of_labels = torch.special.entr(probabilities[:, places])
    given_weights = of_labels.sum((1, 2)).mean()
    return total - given_weights


def test_expected_improvement_is_the_mean_of_what_is_ahead():
    mean = torch.tensor([0.0, 1.0, -2.0]).double()
    deviation = torch.tensor([1.0, 0.5, 0.0]).double()
    noise = torch.randn(400_000, 3, generator=generator()).double()
    draws = mean + deviation * noise
    expected = (draws - 0.7).clamp_min(0).mean(0)
    found = acquisitions.expected_improvement(mean, deviation, best=0.7)
    assert_close(found, expected, rtol=0, atol=3e-3)


def test_thompson_lets_each_function_choose_its_best_of_those_that_are_left():
    functions = torch.tensor(
        [
            [3.0, 2.0, 1.0],
            [3.0, 1.0, 2.0],
            [3.0, 2.0, 1.0],
        ]
    )
    assert acquisitions.thompson(functions, 3).tolist() == [0, 2, 1]


def test_margin_and_entropy_are_largest_where_classes_are_as_probable():
    probabilities = torch.tensor(
        [
            [0.5, 0.5, 0.0],
            [0.9, 0.1, 0.0],
        ]
    )
    found = acquisitions.margin(probabilities)
    assert_close(found, torch.tensor([1.0, 0.2]))
    assert acquisitions.entropy(probabilities).argmax() == 0


def test_bald_is_the_information_of_one_label():
    probabilities = drawn_probabilities()
    expected = [joint_information(probabilities, [place]) for place in range(6)]
    assert_close(acquisitions.bald(probabilities), torch.stack(expected))


@pytest.mark.parametrize("most_outcomes", [1024, 27])
def test_batch_bald_chooses_greedily_by_joint_information(most_outcomes, monkeypatch):
    monkeypatch.setattr(acquisitions, "_OUTCOMES", most_outcomes)
    probabilities = drawn_probabilities()
    # A second copy of a text tells little that the first has not told.
    probabilities = torch.cat([probabilities, probabilities], dim=1)
    expected: list[int] = []
    for _ in range(3):
        left = [place for place in range(12) if place not in expected]
        information = [
            joint_information(probabilities, [*expected, place]) for place in left
        ]
        best = torch.stack(information).argmax()
        expected.append(left[best])
    found = acquisitions.batch_bald(probabilities, 3, generator())
    texts = [place % 6 for place in found.tolist()]
    assert texts == [place % 6 for place in expected]
    assert len(set(texts)) == 3


def test_thinned_outcomes_have_the_joint_entropy_in_the_mean(monkeypatch):
    monkeypatch.setattr(acquisitions, "_OUTCOMES", 20_000)
    probabilities = drawn_probabilities()
    first = probabilities[:, 0].T
    second = probabilities[:, 1].T
    outcomes = (first[:, None] * second).flatten(0, 1)
    shares = torch.ones(len(outcomes)).double()
    expected = acquisitions._joint_entropies(outcomes, shares, probabilities)
    thinned = acquisitions._thinned(outcomes, shares, generator())
    found = acquisitions._joint_entropies(*thinned, probabilities)
    assert_close(found, expected, rtol=0.03, atol=0)


@pytest.mark.parametrize("by", acquisitions.OF_CLASSES)
def test_texts_are_chosen_over_all_batches_of_a_pool(by):
    la = fitted()
    pool = ragged_batches(**POOL)
    found = la.acquire(pool, 2, by=by)
    assert torch.equal(found, la.acquire(pool, 2, by=by))
    if by in ("entropy", "margin"):
        probabilities = torch.cat(
            [la(batch, link_approx="mean_field") for batch in pool]
        )
        scores = getattr(acquisitions, by)(probabilities)
    else:
        samples: list[torch.Tensor] = []
        for seed in range(300):
            function = la.function(seed)
            samples.append(torch.cat([function(batch) for batch in pool]))
        scores = acquisitions.bald(torch.stack(samples).softmax(-1))
    # BALD's scores are estimated from other draws; what is chosen first must be near
    # the best.
    assert scores[found[0]] >= 0.8 * scores.max()
    if by in ("entropy", "margin"):
        assert torch.equal(found, scores.topk(2).indices)


def test_numbers_are_chosen_by_mean_and_deviation():
    la, X = plain_regression(n_outputs=1)
    pool = DataLoader(list(X), batch_size=5)
    mean, covariance = la(X)
    deviation = covariance[:, 0, 0].sqrt()
    bound = mean[:, 0] + 2 * deviation
    found = la.acquire(pool, 3, by="upper_confidence_bound")
    assert torch.equal(found, bound.topk(3).indices)
    improvement = acquisitions.expected_improvement(mean[:, 0], deviation, best=0.3)
    found = la.acquire(pool, 3, by="expected_improvement", best=0.3)
    assert torch.equal(found, improvement.topk(3).indices)
    found = la.acquire(pool, 3, by="thompson")
    assert len(set(found.tolist())) == 3


def test_a_mixture_draws_functions_of_all_members():
    mixture = LaplaceMixture([fitted(), fitted(model=another_training())])
    pool = ragged_batches(**POOL)
    for by in acquisitions.OF_CLASSES:
        chosen = mixture.acquire(pool, 3, by=by).tolist()
        assert len(set(chosen)) == 3


def test_what_cannot_be_chosen_is_refused():
    la = fitted()
    pool = ragged_batches()
    n_pool = sum(len(batch["labels"]) for batch in pool)
    for by in acquisitions.OF_CLASSES:
        with pytest.raises(ValueError, match=f"The pool has {n_pool} examples"):
            la.acquire(pool, n_pool + 1, by=by)
    with pytest.raises(ValueError, match="by='thompson' is none of"):
        la.acquire(pool, 1, by="thompson")
    shuffled = DataLoader(range(3), shuffle=True)
    with pytest.raises(ValueError, match="shuffled pool"):
        la.acquire(shuffled, 1)
    of_numbers, X = plain_regression(n_outputs=1)
    with pytest.raises(ValueError, match="pass best="):
        of_numbers.acquire([X], 1, by="expected_improvement")
    of_two, X = plain_regression(n_outputs=2)
    for by in ("thompson", "upper_confidence_bound"):
        with pytest.raises(ValueError, match="2 outputs"):
            of_two.acquire([X], 1, by=by)

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

N_TEXTS = 6

# --- acquisition functions ------------------------------------------------------------


@pytest.fixture
def probabilities():
    """Class probabilities `(draws, texts, classes)` of draws that differ."""
    logits = torch.randn(7, N_TEXTS, 3, generator=generator()).double()
    return (3 * logits).softmax(-1)


def joint_information(
    probabilities: torch.Tensor,
    places: list[int],
) -> torch.Tensor:
    """Compute what some labels tell of the weights, over all outcomes."""
    n_draws, _, n_classes = probabilities.shape
    joint_entropy = torch.zeros(()).double()
    for labels in product(range(n_classes), repeat=len(places)):
        p = torch.ones(n_draws).double()
        for place, label in zip(places, labels, strict=True):
            p = p * probabilities[:, place, label]
        joint_entropy += torch.special.entr(p.mean())
    # Given the weights, labels are independent: their entropies add up.
    given_weights = torch.special.entr(probabilities[:, places])
    return joint_entropy - given_weights.sum((1, 2)).mean()


def test_expected_improvement_is_the_mean_of_what_is_ahead():
    mean = torch.tensor([0.0, 1.0, -2.0]).double()
    deviation = torch.tensor([1.0, 0.5, 0.0]).double()
    noise = torch.randn(400_000, 3, generator=generator()).double()
    draws = mean + deviation * noise
    improvements = (draws - 0.7).clamp_min(0)
    found = acquisitions.expected_improvement(mean, deviation, best=0.7)
    # Four standard errors of a mean of 400,000, or more.
    assert_close(found, improvements.mean(0), rtol=0, atol=3e-3)


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


def test_bald_is_the_information_of_one_label(probabilities):
    expected = [joint_information(probabilities, [place]) for place in range(N_TEXTS)]
    found = acquisitions.bald(probabilities)
    assert_close(found, torch.stack(expected))


def chosen_greedily(
    probabilities: torch.Tensor,
    n: int,
) -> list[int]:
    """Choose texts one by one, each by what it tells beside those before."""
    chosen: list[int] = []
    for _ in range(n):
        left = [place for place in range(probabilities.shape[1]) if place not in chosen]
        information = [
            joint_information(probabilities, [*chosen, place]) for place in left
        ]
        best = torch.stack(information).argmax()
        chosen.append(left[best])
    return chosen


# Three labels have 27 outcomes, of which a limit of 27 drops none.
@pytest.mark.parametrize("most_outcomes", [1024, 27])
def test_batch_bald_chooses_greedily_by_joint_information(
    most_outcomes,
    probabilities,
    monkeypatch,
):
    monkeypatch.setattr(acquisitions, "_OUTCOMES", most_outcomes)
    # A second copy of a text tells little that the first has not told.
    twice = torch.cat([probabilities, probabilities], dim=1)
    expected = chosen_greedily(twice, 3)
    found = acquisitions.batch_bald(twice, 3, generator()).tolist()
    # Of two copies it does not matter which.
    texts = [place % N_TEXTS for place in found]
    assert texts == [place % N_TEXTS for place in expected]
    assert len(set(texts)) == 3


def test_thinned_outcomes_have_the_joint_entropy_in_the_mean(
    probabilities,
    monkeypatch,
):
    # So many draws of outcomes that their mean is near what they estimate.
    monkeypatch.setattr(acquisitions, "_OUTCOMES", 20_000)
    first = probabilities[:, 0].T
    second = probabilities[:, 1].T
    of_pairs = first[:, None] * second
    outcomes = of_pairs.flatten(0, 1)
    shares = torch.ones(len(outcomes)).double()
    expected = acquisitions._joint_entropies(outcomes, shares, probabilities)
    drawn, shares = acquisitions._thinned(outcomes, shares, generator())
    found = acquisitions._joint_entropies(drawn, shares, probabilities)
    assert_close(found, expected, rtol=0.03, atol=0)


# --- choices from a pool --------------------------------------------------------------


@pytest.fixture
def pool():
    """Six texts that the posteriors are not fitted to, in two batches."""
    return ragged_batches(lengths=(7, 4, 5, 7, 3, 6), seed=3)


@pytest.mark.parametrize("by", ["entropy", "margin"])
def test_the_most_doubtful_texts_are_chosen_over_all_batches(by, pool):
    la = fitted()
    predicted = [la(batch, link_approx="mean_field") for batch in pool]
    score = getattr(acquisitions, by)
    scores = score(torch.cat(predicted))
    found = la.acquire(pool, 2, by=by)
    assert torch.equal(found, scores.topk(2).indices)


@pytest.mark.parametrize("by", ["bald", "batch_bald"])
def test_the_most_telling_texts_are_chosen_over_all_batches(by, pool):
    la = fitted()
    samples = []
    for seed in range(300):
        function = la.function(seed)
        logits = torch.cat([function(batch) for batch in pool])
        samples.append(logits.softmax(-1))
    scores = acquisitions.bald(torch.stack(samples))
    first, _ = la.acquire(pool, 2, by=by)
    # These scores are estimated from other draws; what is chosen first must be near
    # the best.
    assert scores[first] >= 0.8 * scores.max()


@pytest.mark.parametrize("by", acquisitions.OF_CLASSES)
def test_a_choice_is_the_same_each_time(by, pool):
    la = fitted()
    found = la.acquire(pool, 2, by=by)
    assert torch.equal(found, la.acquire(pool, 2, by=by))


def test_numbers_are_chosen_by_mean_and_deviation():
    la, X = plain_regression(n_outputs=1)
    pool = DataLoader(list(X), batch_size=5)
    f_mu, f_var = la(X)
    mean = f_mu[:, 0]
    deviation = f_var[:, 0, 0].sqrt()

    bound = mean + 2 * deviation
    found = la.acquire(pool, 3, by="upper_confidence_bound")
    assert torch.equal(found, bound.topk(3).indices)

    improvement = acquisitions.expected_improvement(mean, deviation, best=0.3)
    found = la.acquire(pool, 3, by="expected_improvement", best=0.3)
    assert torch.equal(found, improvement.topk(3).indices)

    found = la.acquire(pool, 3, by="thompson")
    assert len(set(found.tolist())) == 3


def test_a_mixture_draws_functions_of_all_members(pool):
    mixture = LaplaceMixture([fitted(), fitted(model=another_training())])
    for by in acquisitions.OF_CLASSES:
        chosen = mixture.acquire(pool, 3, by=by).tolist()
        assert len(set(chosen)) == 3


# --- what is refused ------------------------------------------------------------------


def test_what_cannot_be_chosen_of_texts_is_refused(pool):
    la = fitted()
    for by in acquisitions.OF_CLASSES:
        with pytest.raises(ValueError, match=f"The pool has {N_TEXTS} examples"):
            la.acquire(pool, N_TEXTS + 1, by=by)
    with pytest.raises(ValueError, match="by='thompson' is none of"):
        la.acquire(pool, 1, by="thompson")
    # Places in a pool whose order changes say nothing.
    shuffled = DataLoader(range(3), shuffle=True)
    with pytest.raises(ValueError, match="shuffled pool"):
        la.acquire(shuffled, 1)


def test_numbers_without_a_best_one_cannot_be_improved():
    la, X = plain_regression(n_outputs=1)
    with pytest.raises(ValueError, match="pass best="):
        la.acquire([X], 1, by="expected_improvement")


@pytest.mark.parametrize("by", ["thompson", "upper_confidence_bound"])
def test_two_numbers_an_example_have_no_order(by):
    la, X = plain_regression(n_outputs=2)
    with pytest.raises(ValueError, match="2 outputs"):
        la.acquire([X], 1, by=by)

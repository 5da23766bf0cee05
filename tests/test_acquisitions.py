"""What to label or measure next, and choices from a pool."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.special import entr
from torch.testing import assert_close
from torch.utils.data import DataLoader

from laplace_lora_ext import LaplaceMixture, acquisitions
from tests.support.models import ragged_batches
from tests.support.posteriors import (
    another_training,
    fitted,
    generator,
    normal,
    plain_regression,
)

N_TEXTS = 6

# --- acquisition functions ------------------------------------------------------------


@pytest.fixture
def probabilities():
    """Class probabilities `(draws, texts, classes)` of draws that differ."""
    n_draws = 7
    logits = 3 * normal(n_draws, N_TEXTS, 3)
    return logits.softmax(-1)


def joint_information(
    probabilities: Tensor,
    places: list[int],
) -> Tensor:
    """Compute what some labels tell of the weights, `H(y) - E_w H(y | w)`."""
    of_places = probabilities[:, places]
    n_draws, n_places, n_classes = of_places.shape
    classes = range(n_classes)
    joint_entropy = torch.zeros((), dtype=torch.float64)
    for labels in product(classes, repeat=n_places):
        p = torch.ones(n_draws, dtype=torch.float64)
        for number, label in enumerate(labels):
            p = p * of_places[:, number, label]
        mean = p.mean()
        joint_entropy += entr(mean)
    # Given the weights, labels are independent: their entropies add up.
    of_labels = entr(of_places)
    given_weights = of_labels.sum((1, 2))
    return joint_entropy - given_weights.mean()


def test_expected_improvement_is_the_mean_of_what_is_ahead():
    mean = torch.tensor([0.0, 1.0, -2.0]).double()
    # The last number is known, and no improvement.
    deviation = torch.tensor([1.0, 0.5, 0.0]).double()
    best = 0.7
    noise = normal(400_000, 3)
    draws = mean + deviation * noise
    differences = draws - best
    improvements = differences.clamp_min(0)
    expected = improvements.mean(0)
    found = acquisitions.expected_improvement(mean, deviation, best)
    # Four standard errors of a mean of 400,000, or more.
    assert_close(found, expected, rtol=0, atol=3e-3)


def test_thompson_lets_each_function_choose_its_best_of_those_that_are_left():
    functions = torch.tensor(
        [
            [3.0, 2.0, 1.0],
            [3.0, 1.0, 2.0],
            [3.0, 2.0, 1.0],
        ]
    )
    # The first is the best of all three, and is chosen once.
    found = acquisitions.thompson(functions, 3)
    expected = torch.tensor([0, 2, 1])
    assert torch.equal(found, expected)


def test_margin_and_entropy_are_largest_where_classes_are_as_probable():
    probabilities = torch.tensor(
        [
            [0.5, 0.5, 0.0],
            [0.9, 0.1, 0.0],
        ]
    )
    margins = acquisitions.margin(probabilities)
    expected = torch.tensor([1.0, 0.2])
    assert_close(margins, expected)
    entropies = acquisitions.entropy(probabilities)
    assert entropies.argmax() == 0


def test_bald_is_the_information_of_one_label(probabilities):
    expected = []
    for place in range(N_TEXTS):
        expected.append(joint_information(probabilities, [place]))
    found = acquisitions.bald(probabilities)
    assert_close(list(found), expected)


def chosen_greedily(
    probabilities: Tensor,
    n: int,
) -> list[int]:
    """Choose texts one by one, each by what it tells beside those before."""
    _, n_texts, _ = probabilities.shape
    chosen: list[int] = []
    for _ in range(n):
        information = torch.zeros(n_texts, dtype=torch.float64)
        for place in range(n_texts):
            if place not in chosen:
                together = [*chosen, place]
                of_labels = joint_information(probabilities, together)
                information[place] = of_labels
        best = information.argmax()
        chosen.append(int(best))
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
    by_hand = chosen_greedily(twice, 3)
    chosen = acquisitions.batch_bald(twice, 3, generator())
    # Of two copies it does not matter which.
    expected = torch.tensor(by_hand) % N_TEXTS
    found = chosen % N_TEXTS
    assert torch.equal(found, expected)
    assert len(found.unique()) == 3


def test_thinned_outcomes_have_the_joint_entropy_in_the_mean(
    probabilities,
    monkeypatch,
):
    def entropies(outcomes, shares):
        return acquisitions._joint_entropies(outcomes, shares, probabilities)

    # So many draws of outcomes that their mean is near what they estimate.
    monkeypatch.setattr(acquisitions, "_OUTCOMES", 20_000)
    # The probabilities of two texts' labels, `(classes, draws)` each.
    first = probabilities[:, 0].T
    second = probabilities[:, 1].T
    of_pairs = first[:, None] * second
    outcomes = of_pairs.flatten(0, 1)
    shares = torch.ones(len(outcomes), dtype=torch.float64)
    drawn, of_drawn = acquisitions._thinned(outcomes, shares, generator())
    found = entropies(drawn, of_drawn)
    expected = entropies(outcomes, shares)
    # Twenty thousand draws estimate an entropy within a few per cent.
    assert_close(found, expected, rtol=0.03, atol=0)


# --- choices from a pool --------------------------------------------------------------


@pytest.fixture
def pool():
    """Six texts that the posteriors are not fitted to, in two batches."""
    return ragged_batches(
        lengths=(7, 4, 5, 7, 3, 6),
        # Another than that of the texts which they are fitted to.
        seed=3,
    )


each_choice_of_texts = pytest.mark.parametrize("by", acquisitions.OF_CLASSES)


def choose(la, pool, by: str, n: int = 2) -> Tensor:
    """Choose texts, and check that they are so many and each another one."""
    places = la.acquire(pool, n, by=by)
    assert len(places) == n
    assert len(places.unique()) == n
    return places


def assert_largest(places: Tensor, scores: Tensor) -> None:
    """Check that places are those of the largest scores, in order."""
    largest = scores.topk(len(places))
    assert torch.equal(places, largest.indices)


@pytest.mark.parametrize("by", ["entropy", "margin"])
def test_the_most_doubtful_texts_are_chosen_over_all_batches(by, pool):
    la = fitted()
    of_batches = [la(batch, link_approx="mean_field") for batch in pool]
    predicted = torch.cat(of_batches)
    score = getattr(acquisitions, by)
    scores = score(predicted)
    found = choose(la, pool, by)
    assert_largest(found, scores)


@pytest.mark.parametrize("by", ["bald", "batch_bald"])
def test_the_most_telling_texts_are_chosen_over_all_batches(by, pool):
    la = fitted()
    samples = []
    for seed in range(300):
        function = la.function(seed)
        of_batches = [function(batch) for batch in pool]
        logits = torch.cat(of_batches)
        samples.append(logits.softmax(-1))
    probabilities = torch.stack(samples)
    scores = acquisitions.bald(probabilities)
    first, _ = choose(la, pool, by)
    # These scores are estimated from other draws; what is chosen first must be near
    # the best.
    enough = 0.8 * scores.max()
    assert scores[first] >= enough


@each_choice_of_texts
def test_a_choice_is_the_same_each_time(by, pool):
    la = fitted()
    found = choose(la, pool, by)
    again = choose(la, pool, by)
    assert torch.equal(found, again)


@dataclass(frozen=True)
class Numbers:
    """A posterior of numbers, a pool, and what it predicts of the pool."""

    la: Any
    pool: DataLoader
    mean: Tensor
    deviation: Tensor

    def chosen(
        self,
        by: str,
        **settings: Any,
    ) -> Tensor:
        """Choose three of the pool."""
        places = self.la.acquire(
            self.pool,
            3,
            by=by,
            **settings,
        )
        assert len(places) == 3
        return places


@pytest.fixture
def numbers() -> Numbers:
    la, X = plain_regression(n_outputs=1)
    f_mu, f_var = la(X)
    variance = f_var.flatten()
    examples = list(X)
    # Of twelve examples the last batch is smaller.
    pool = DataLoader(examples, batch_size=5)
    return Numbers(
        la=la,
        pool=pool,
        mean=f_mu.flatten(),
        deviation=variance.sqrt(),
    )


def test_numbers_are_chosen_by_two_deviations_above_the_mean(numbers):
    bound = numbers.mean + 2 * numbers.deviation
    found = numbers.chosen("upper_confidence_bound")
    assert_largest(found, bound)


def test_numbers_are_chosen_by_their_improvement_of_the_best(numbers):
    improvement = acquisitions.expected_improvement(
        numbers.mean,
        numbers.deviation,
        best=0.3,
    )
    found = numbers.chosen("expected_improvement", best=0.3)
    assert_largest(found, improvement)


def test_drawn_functions_choose_different_numbers(numbers):
    found = numbers.chosen("thompson")
    assert len(found.unique()) == 3


@each_choice_of_texts
def test_a_mixture_draws_functions_of_all_members(by, pool):
    first = fitted()
    second = fitted(model=another_training())
    mixture = LaplaceMixture([first, second])
    choose(mixture, pool, by, n=3)


# --- what is refused ------------------------------------------------------------------


@each_choice_of_texts
def test_more_than_the_pool_has_is_refused(by, pool):
    la = fitted()
    too_many = N_TEXTS + 1
    with pytest.raises(ValueError, match=f"The pool has {N_TEXTS} examples"):
        la.acquire(pool, too_many, by=by)


def test_texts_are_not_chosen_by_what_is_for_numbers(pool):
    la = fitted()
    with pytest.raises(ValueError, match="by='thompson' is none of"):
        la.acquire(pool, 1, by="thompson")


def test_places_in_a_pool_whose_order_changes_are_refused():
    la = fitted()
    shuffled = DataLoader(range(3), shuffle=True)
    with pytest.raises(ValueError, match="shuffled pool"):
        la.acquire(shuffled, 1)


def test_numbers_without_a_best_one_cannot_be_improved():
    la, X = plain_regression(n_outputs=1)
    with pytest.raises(ValueError, match="pass best="):
        la.acquire([X], 1, by="expected_improvement")


@pytest.mark.parametrize(
    "by",
    ["thompson", "upper_confidence_bound"],
)
def test_two_numbers_an_example_have_no_order(by):
    la, X = plain_regression(n_outputs=2)
    with pytest.raises(ValueError, match="2 outputs"):
        la.acquire([X], 1, by=by)

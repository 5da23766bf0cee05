"""Which texts a model decides alone, and what labelled ones prove of it."""

from itertools import combinations

import pytest
import torch
from scipy.stats import binomtest
from torch import Tensor

from laplace_lora_ext.predictive.predictions import Prediction
from laplace_lora_ext.predictive.review import Proof, review


def some_probabilities(n_texts: int = 9, n_classes: int = 3) -> Tensor:
    """Draw probabilities of all degrees of sureness."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(n_texts, n_classes, generator=generator) * 3
    return logits.softmax(-1)


@pytest.mark.parametrize("accuracy", [0.5, 0.8, 0.9, 0.95, 1.0])
def test_no_larger_set_keeps_the_promise(accuracy):
    p = some_probabilities()
    found = review(p, accuracy)
    sureness = p.double().max(1).values
    sizes = [
        size
        for size in range(1, len(p) + 1)
        for places in combinations(range(len(p)), size)
        if sureness[list(places)].mean() >= accuracy
    ]
    assert int(found.decided.sum()) == max(sizes, default=0)
    assert found.n_to_read == len(p) - found.decided.sum()
    assert found.share == pytest.approx(max(sizes, default=0) / len(p))
    assert torch.equal(found.labels, p.argmax(1))
    if sizes:
        assert found.promise >= accuracy
        assert found.promise == pytest.approx(sureness[found.decided].mean().item())


def test_people_read_the_most_doubtful_texts():
    p = some_probabilities()
    found = review(p, capacity=4)
    least_sure_first = p.max(1).values.argsort()
    assert torch.equal(found.order, least_sure_first)
    assert set(least_sure_first[:4].tolist()) == set(
        (~found.decided).nonzero()[:, 0].tolist()
    )
    assert found.accuracy == found.promise
    everything = review(p, capacity=100)
    assert not everything.decided.any()
    assert "Nothing is proven" in str(everything.proof(p, p.argmax(1)))


def test_costs_decide_what_is_cheapest_to_miss():
    p = some_probabilities()
    costs = torch.tensor([1.0, 20.0, 3.0])
    found = review(p, 0.7, costs=costs.tolist())
    # By hand: who decides k pays for all other classes.
    by_decision = torch.stack(
        [sum(p[:, c].double() * costs[c] for c in range(3) if c != k) for k in range(3)]
    )
    assert torch.equal(found.labels, by_decision.argmin(0))
    torch.testing.assert_close(found.doubt, by_decision.min(0).values)
    assert not torch.equal(found.labels, p.argmax(1))
    assert found.doubt[found.decided].mean() <= 0.3


def test_near_certainty_is_not_rounded():
    p = torch.tensor([[1.0, 1e-12], [1.0, 3e-12]])
    assert review(p, 1.0).doubt.tolist() == pytest.approx([1e-12, 3e-12])


@pytest.mark.parametrize("n_right", [0, 1, 30, 37, 38])
def test_the_bound_is_clopper_pearsons(n_right):
    proof = Proof(n_right, 38, 0.95, confidence=0.9)
    # One side of a test of two has half of its level.
    interval = binomtest(n_right, 38).proportion_ci(0.8, "exact")
    assert proof.at_least == pytest.approx(interval.low, abs=1e-9)


def test_how_many_more_labels_would_prove_it():
    proof = Proof(37, 38, 0.95, confidence=0.9)
    more = proof.n_more
    assert more is not None
    assert Proof(37 + more, 38 + more, 0.95, 0.9).at_least >= 0.95
    assert Proof(36 + more, 37 + more, 0.95, 0.9).at_least < 0.95
    assert Proof(37, 38, 1.0, 0.9).n_more is None
    assert Proof(400, 400, 0.95, 0.9).n_more == 0
    assert f"37 were right: at least {proof.at_least:.2f}" in str(proof)
    assert f"{more} more" in str(proof)


def test_labelled_texts_are_decided_by_the_same_limit():
    p = some_probabilities()
    found = review(p, 0.9)
    labels = p.argmax(1)
    labels[found.order[-1]] += 1
    proof = found.proof(p, labels % 3)
    n_decided = int(found.decided.sum())
    assert (proof.n_right, proof.n_decided) == (n_decided - 1, n_decided)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "accuracy or capacity"),
        ({"accuracy": 0.9, "capacity": 3}, "not both"),
        ({"accuracy": 95}, "0 to 1"),
        ({"capacity": -1}, "0 or more"),
        ({"accuracy": 0.9, "costs": [1.0, 2.0]}, "3 positive numbers"),
        ({"accuracy": 0.9, "costs": [1.0, 2.0, 0.0]}, "3 positive numbers"),
    ],
)
def test_what_makes_no_queue_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        review(some_probabilities(), **options)


def test_several_labels_make_no_queue():
    p = some_probabilities()
    labels = (p > 0.5).long()
    prediction = Prediction(p, labels, p, p, p, p)
    with pytest.raises(ValueError, match="one class each"):
        prediction.review(0.9)

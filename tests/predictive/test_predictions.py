"""Predictions of classes and numbers, and queues, against their definitions."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import binomtest, norm
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext import Moments, NumberPrediction, Prediction
from laplace_lora_ext.predictive.links import log_probabilities
from laplace_lora_ext.predictive.predictions import Proof, Review
from tests.support.models import first_batch
from tests.support.posteriors import fitted, generator, normal, plain_regression
from tests.support.tasks import two

# --- classes --------------------------------------------------------------------------


def test_predictions_have_the_links_probabilities():
    la, batch = fitted(), first_batch()
    moments = la.predictive_moments(batch)

    def decision(link: str, seed: int = 0) -> Prediction:
        draws = {"n_samples": 50, "generator": generator(seed)}
        return la.predict(batch, link_approx=link, **draws)

    for link in ("mean_field", "probit", "mc"):
        expected = log_probabilities(moments, link, 50, generator()).exp()
        found = decision(link)
        assert_close(found.probabilities, expected)
        assert torch.equal(found.labels, expected.argmax(-1))
        epistemic = found.epistemic_entropy
        assert_close(found.total_entropy, found.aleatoric_entropy + epistemic)
        assert torch.equal(decision(link).epistemic_entropy, epistemic)
        assert not torch.equal(decision(link, seed=1).epistemic_entropy, epistemic)
    with pytest.raises(ValueError, match="link_approx 'bridge'"):
        la.predict(batch, link_approx="bridge")


# --- queues ---------------------------------------------------------------------------


def review(p: Tensor, *args: Any, **options: Any) -> Review:
    return Prediction.of_draws(p, p[None]).review(*args, **options)


def some_probabilities() -> Tensor:
    """Draw probabilities of three classes, of all degrees of sureness."""
    return (3 * normal(9, 3)).float().softmax(-1)


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
    largest = max(sizes, default=0)
    assert int(found.decided.sum()) == largest
    assert found.n_to_read == len(p) - largest
    assert found.share == pytest.approx(largest / len(p))
    assert torch.equal(found.labels, p.argmax(1))
    if sizes:
        assert found.promise >= accuracy
        assert found.promise == pytest.approx(sureness[found.decided].mean().item())


def test_what_is_certain_is_decided_alone():
    assert review(torch.eye(3), accuracy=1.0).share == 1


def test_people_read_the_most_doubtful_texts():
    p = some_probabilities()
    found = review(p, capacity=4)
    least_sure_first = p.max(1).values.argsort()
    assert torch.equal(found.order, least_sure_first)
    assert not found.decided[least_sure_first[:4]].any()
    assert found.decided[least_sure_first[4:]].all()
    assert found.accuracy == found.promise
    everything = review(p, capacity=100)
    assert (everything.n_to_read, everything.share) == (len(p), 0)
    assert not everything.decided.any()
    assert "Nothing is proven" in str(everything.proof(p, p.argmax(1)))


def test_costs_decide_what_is_cheapest_to_miss():
    p = some_probabilities()
    costs = torch.tensor([1.0, 20.0, 3.0])
    found = review(p, 0.7, costs=costs.tolist())
    # By hand: who decides k pays for all other classes.
    of_all = p.double() * costs
    by_decision = of_all.sum(1, keepdim=True) - of_all
    assert torch.equal(found.labels, by_decision.argmin(1))
    assert_close(found.doubt, by_decision.min(1).values)
    assert not torch.equal(found.labels, p.argmax(1))
    assert found.doubt[found.decided].mean() <= 0.3
    with pytest.raises(ValueError, match="mean cost"):
        found.proof(p, p.argmax(1))
    # Near certainty is not rounded.
    p = torch.tensor([[1.0, 1e-12], [1.0, 3e-12]])
    assert review(p, 1.0).doubt.tolist() == pytest.approx([1e-12, 3e-12])


def test_labelled_texts_prove_what_clopper_and_pearson_say():
    for n_right in (0, 1, 37, 38):
        proof = Proof(n_right, 38, 0.95, confidence=0.9)
        # One side of a test of two has half of its level.
        interval = binomtest(n_right, 38).proportion_ci(0.8, "exact")
        assert proof.at_least == pytest.approx(interval.low, abs=1e-9)
    proof = Proof(37, 38, 0.95, confidence=0.9)
    more = proof.n_more
    assert more is not None
    assert Proof(37 + more, 38 + more, 0.95, 0.9).at_least >= 0.95
    assert Proof(36 + more, 37 + more, 0.95, 0.9).at_least < 0.95
    assert "no number of labels" in str(Proof(37, 38, 1.0, 0.9))
    assert "which proves" in str(Proof(400, 400, 0.95, 0.9))
    assert f"37 were right: at least {proof.at_least:.2f}" in str(proof)
    assert f"{more} more" in str(proof)
    # They are decided by the queue's own limit of doubt.
    p = some_probabilities()
    found = review(p, 0.9)
    labels = p.argmax(1)
    labels[found.order[-1]] += 1
    proof = found.proof(p, labels % 3)
    n_decided = int(found.decided.sum())
    assert proof == Proof(n_decided - 1, n_decided, 0.9, confidence=0.9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "accuracy or capacity"),
        ({"accuracy": 0.9, "capacity": 3}, "not both"),
        ({"accuracy": 95}, "0 to 1"),
        ({"accuracy": 0.9, "costs": [1.0, 2.0]}, "for each class"),
    ],
)
def test_what_makes_no_queue_is_refused(options, message):
    p = some_probabilities()
    with pytest.raises(ValueError, match=message):
        review(p, **options)
    of_labels = Prediction(p, (p > 0.5).long(), p, p, p)
    with pytest.raises(ValueError, match="one class each"):
        of_labels.review(0.9)


# --- numbers --------------------------------------------------------------------------

# The tails, the middle, and one between.
LEVELS = [0.01, 0.3, 0.5, 0.95]
# What `plain_regression` is fitted with.
NOISE_VARIANCE = 0.5**2


def variances_of(f_var: Tensor) -> Tensor:
    """Take variances `(N, outputs)` out of covariances."""
    return f_var.diagonal(dim1=1, dim2=2)


def test_a_posterior_predicts_normal_targets():
    la, X = plain_regression()
    f_mu, f_var = la(X)
    prediction = la.predict(X)
    assert isinstance(prediction, NumberPrediction)
    variance = variances_of(f_var)
    assert_close(prediction.mean, f_mu)
    assert_close(prediction.epistemic_std, variance.sqrt())
    assert_close(prediction.total_std, (variance + NOISE_VARIANCE).sqrt())
    for level in LEVELS:
        expected = prediction.mean + norm.ppf(level) * prediction.total_std
        assert_close(prediction.quantile(level), expected)
    # As much lies below an interval as above.
    ends = prediction.quantile(0.05), prediction.quantile(0.95)
    assert_close(prediction.interval(), ends)
    # As batches, or from moments.
    for data in ([X[:5], X[5:]], la.predictive_moments(X)):
        assert_close(tuple(la.predict(data)), tuple(prediction))
    with pytest.raises(ValueError, match="numbers"):
        la.predict_proba(X)


def test_a_mixture_predicts_the_mean_of_its_members_distributions():
    # So unlike that a mean of the deviations is not one of the variances.
    both = two("numbers")
    both.first.sigma_noise = 0.2
    both.second.sigma_noise = 0.6
    (batch,) = both.batches
    mixture = both.mixture()
    f_mu, f_var = mixture(batch)
    together = mixture.predict(batch)
    variance = variances_of(f_var)
    total_variance = variance + (0.2**2 + 0.6**2) / 2
    assert_close(together.mean, f_mu)
    assert_close(together.epistemic_std, variance.sqrt())
    assert_close(together.total_std, total_variance.sqrt())

    members = [member.predict(batch) for member in both.members]
    for level in LEVELS:
        x = together.quantile(level)
        below = [norm(each.mean, each.total_std).cdf(x) for each in members]
        np.testing.assert_allclose(np.mean(below, axis=0), level, rtol=1e-9)
    y = batch["labels"].double()
    densities = torch.stack([each.log_density(y).exp() for each in members])
    assert_close(together.log_density(y), densities.mean(0).log())


def ranked_probability_score(means: Tensor, stds: Tensor, target: float) -> float:
    """Integrate a mixture's squared distance from the target's step."""
    members = norm(means.numpy(), stds.numpy())

    def squared(x: float) -> float:
        return (members.cdf(x).mean() - (x >= target)) ** 2

    # In two parts, as the integrand jumps at the target; beyond 40 nothing is left.
    below, _ = quad(squared, -40, target)
    above, _ = quad(squared, target, 40)
    return below + above


def test_the_ranked_probability_score_is_its_integral():
    # Of two numbers for each of three examples, by four members.
    roots = normal(4, 3, 2, 2, seed=1)
    members = map(Moments, normal(4, 3, 2), roots @ roots.mT)
    prediction = NumberPrediction.of(list(members), [0.3] * 4)
    targets = 2 * normal(3, 2, seed=2)
    scores = prediction.crps(targets)
    for row, column in np.ndindex(3, 2):
        expected = ranked_probability_score(
            prediction.means[row, :, column],
            prediction.stds[row, :, column],
            targets[row, column].item(),
        )
        assert scores[row, column].item() == pytest.approx(expected, rel=1e-6)

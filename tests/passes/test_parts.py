"""Batches in parts: the same numbers in less memory."""

import pytest
import torch

from laplace_lora_ext.passes.parts import parts_of
from tests.support.models import TwoLinear, ragged_batches, with_lora
from tests.support.posteriors import (
    count_forward_passes,
    features_of,
    fitted,
    generator,
    linearized,
    make,
)

EXACT = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture
def small(monkeypatch):
    """Two texts of seven tokens with three outputs go at once."""
    monkeypatch.setattr("laplace_lora_ext.passes.parts._AT_ONCE", 2 * 7 * 3)


def facts(la):
    (batch,) = ragged_batches(batch_size=8)
    statistics = la.predictive_statistics([batch], dtype=torch.float64)
    model = linearized(la, [batch])
    return (
        *la.predictive_moments(batch),
        *statistics.moments(0.1),
        statistics.targets,
        torch.tensor(statistics.batch_sizes),
        features_of(model),
        model._own,
        model.targets,
    )


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_parts_bring_the_same_numbers(kind, request):
    la = fitted(kind)
    whole = facts(la)
    calls = count_forward_passes(la)
    request.getfixturevalue("small")
    torch.testing.assert_close(facts(la), whole, **EXACT)
    assert len(calls) == 3 * 4


def test_what_joins_examples_is_not_divided(small):
    la = fitted()
    (batch,) = ragged_batches(batch_size=8)
    calls = count_forward_passes(la)
    _, f_var = la.predictive_moments(batch, joint=True)
    assert f_var.shape == (24, 24)
    assert len(calls) == 1


class Normalized(TwoLinear):
    """Its logits depend on the batch's mean."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        return self.second(hidden - hidden.mean(0))


def test_logits_that_depend_on_the_batch_are_not_divided(monkeypatch):
    X, y = torch.randn(8, 5, generator=generator()).double(), torch.arange(8) % 3
    la = make(with_lora(Normalized(), "first", "second"))
    la.fit([(X, y)])
    whole, features = la.predictive_moments(X), features_of(la.linearize([(X, y)]))
    monkeypatch.setattr("laplace_lora_ext.passes.parts._AT_ONCE", 2 * 3)
    torch.testing.assert_close(la.predictive_moments(X), whole, **EXACT)
    statistics = la.predictive_statistics([(X, y)], dtype=torch.float64)
    torch.testing.assert_close(statistics.f_mu, whole.f_mu, **EXACT)
    torch.testing.assert_close(features_of(la.linearize([(X, y)])), features, **EXACT)


def test_labels_that_do_not_fit_are_named_as_before(small):
    la = fitted()
    (batch,) = ragged_batches(batch_size=8)
    with pytest.raises(ValueError, match="batch 0: labels must be from 0 to 2"):
        la.predictive_statistics([batch | {"labels": batch["labels"] + 5}])


@pytest.mark.parametrize(
    ("x", "sizes"),
    [
        (torch.zeros(5, 7).long(), [2, 2, 1]),
        (torch.zeros(5, 7, 4), [5]),  # features, not tokens
        (torch.zeros(50, 3), [14, 14, 14, 8]),
        ({"input_ids": torch.zeros(5, 7).long(), "n": torch.zeros(3)}, [5]),
        ({"input_ids": torch.zeros(3, 2, 7).long()}, [1, 1, 1]),
        ({"x": torch.zeros(50, 3), "names": ["a"] * 50}, [14, 14, 14, 8]),
        ([torch.zeros(50)], [50]),
    ],
)
def test_sizes_of_parts(small, x, sizes):
    def length(part):
        if isinstance(part, list):
            return len(part[0])
        if isinstance(part, dict):
            assert {len(value) for value in part.values()} <= {len(next(iter(part.values()))), 3}
            return len(next(iter(part.values())))
        return len(part)

    parts = list(parts_of(x, 3))
    assert [length(part) for part, _ in parts] == sizes
    everything = torch.arange(sum(sizes))
    assert torch.equal(torch.cat([everything[chosen] for _, chosen in parts]), everything)


def test_an_array_is_taken_apart_as_a_tensor_is(small):
    la, (batch,) = fitted(), ragged_batches(lengths=(7,) * 8, batch_size=8)
    calls = count_forward_passes(la)
    la.predict_proba(batch["input_ids"].numpy(), "probit")
    assert len(calls) == 4

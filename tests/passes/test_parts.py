"""Batches in parts: the same numbers in less memory."""

import pytest
import torch

from tests.support.models import TwoLinear, ragged_batches, with_lora
from tests.support.posteriors import count_forward_passes, fitted, generator, make

EXACT = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture
def small(monkeypatch):
    """Two texts of seven tokens with three outputs go at once."""
    monkeypatch.setattr("laplace_lora_ext.passes.derivatives._ON_CPU", 2 * 7 * 3)


def facts(la, batch):
    statistics = la.predictive_statistics([batch], dtype=torch.float64)
    return (
        *la.predictive_moments(batch),
        *statistics.moments(0.1),
        statistics.targets,
    )


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_parts_bring_the_same_numbers(kind, request):
    la, (batch,) = fitted(kind), ragged_batches(batch_size=8)
    whole, calls = facts(la, batch), count_forward_passes(la)
    request.getfixturevalue("small")
    torch.testing.assert_close(facts(la, batch), whole, **EXACT)
    assert len(calls) == 2 * 4
    calls.clear()
    la.predictive_moments(batch, joint=True)  # which joins all examples
    assert len(calls) == 1
    with pytest.raises(ValueError, match="batch 0: labels must be from 0 to 2"):
        la.predictive_statistics([batch | {"labels": batch["labels"] + 5}])


class Normalized(TwoLinear):
    """Its logits depend on the batch's mean."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        return self.second(hidden - hidden.mean(0))


def test_logits_that_depend_on_the_batch_are_not_divided(monkeypatch):
    X, y = torch.randn(8, 5, generator=generator()).double(), torch.arange(8) % 3
    la = make(with_lora(Normalized(), "first", "second"))
    la.fit([(X, y)])
    whole = la.predictive_moments(X)
    monkeypatch.setattr("laplace_lora_ext.passes.derivatives._ON_CPU", 2 * 3)
    torch.testing.assert_close(la.predictive_moments(X), whole, **EXACT)
    statistics = la.predictive_statistics([(X, y)], dtype=torch.float64)
    torch.testing.assert_close(statistics.f_mu, whole.f_mu, **EXACT)

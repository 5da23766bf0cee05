"""Layers without a gradient, and batches in parts."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext.models.batches import part_of
from laplace_lora_ext.passes.graph import Graph
from tests.support.dense import EXACT, full_rank
from tests.support.models import TwoLinear, first_batch, pairs, with_lora
from tests.support.posteriors import count_forward_passes, make

# --- parts of predictions -------------------------------------------------------------


def allow_at_once(monkeypatch, n_rows: int) -> None:
    """Let so many rows through a layer at once: tokens of all texts, for each logit."""
    monkeypatch.setattr("laplace_lora_ext.passes.recorder._ON_CPU", n_rows)


def test_parts_bring_the_same_numbers(la, monkeypatch):
    batch = first_batch(batch_size=8)

    def facts() -> dict[str, Any]:
        statistics = la.predictive_statistics([batch], dtype=torch.float64)
        return {
            "moments": tuple(la.predictive_moments(batch)),
            "of statistics": tuple(statistics.moments(0.1)),
            "targets": statistics.targets,
        }

    whole = facts()
    calls = count_forward_passes(la)
    # Two texts of seven tokens each, for each of three outputs.
    allow_at_once(monkeypatch, 2 * 7 * 3)
    assert_close(facts(), whole, **EXACT)
    # Four parts of moments, and of statistics; once all texts are compared with their
    # parts.
    assert len(calls) == 2 * 4 + 1
    # Covariances between examples come of the whole batch.
    la.predictive_moments(batch, joint=True)
    assert len(calls) == 2 * 4 + 1 + 1
    # Wrong labels are named by the batch, and not by the part.
    wrong = batch | {"labels": batch["labels"] + 5}
    with pytest.raises(ValueError, match="batch 0: labels must be from 0 to 2"):
        la.predictive_statistics([wrong])


def test_lists_and_tensors_of_examples_are_divided():
    batch = {"ids": torch.arange(3), "texts": ["a", "b", "c"]}
    found = part_of(batch, slice(1, 2), 3)
    assert found == {"ids": torch.tensor([1]), "texts": ["b"]}


def test_a_long_text_takes_a_few_of_its_vectors_at_a_time(la, monkeypatch):
    batch = first_batch(batch_size=1)
    whole = tuple(la.predictive_moments(batch))
    run, sizes = Graph._pass, []

    def note(graph: Graph, vectors: Tensor, *args: Any) -> None:
        sizes.append(len(vectors))
        run(graph, vectors, *args)

    monkeypatch.setattr(Graph, "_pass", note)
    allow_at_once(monkeypatch, 2 * batch["input_ids"].numel())
    assert_close(tuple(la.predictive_moments(batch)), whole, **EXACT)
    assert sizes == [2, 1]  # of three outputs


# --- examples that depend on each other -----------------------------------------------


class Standardising(TwoLinear):
    """Reads examples as they stand among the others, which no gradient shows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x - x.mean(0)) / x.std(0))


def test_logits_that_depend_on_the_batch_are_not_divided(monkeypatch):
    ((X, y),) = pairs(n=8)
    la = make(with_lora(Standardising(), "first", "second"), **full_rank())
    la.fit([(X, y)])
    whole = la.predictive_moments(X)
    # Rounding grows with the logits.
    assert la.model.agree(1e4 * whole.f_mu, 1e4 * whole.f_mu + 1)
    function = la.function(seed=0)(X)
    # Of two examples, for each of three outputs.
    allow_at_once(monkeypatch, 2 * 3)
    calls = count_forward_passes(la)
    for n_calls in (6, 1, 1):  # four parts, the comparison, and all of them
        calls.clear()
        assert_close(tuple(la.predictive_moments(X)), tuple(whole), **EXACT)
        assert len(calls) == n_calls
    assert_close(la.function(seed=0)(X), function, **EXACT)
    statistics = la.predictive_statistics([(X, y)], dtype=torch.float64)
    assert_close(statistics.f_mu, whole.f_mu, **EXACT)


class Windows(TwoLinear):
    """Reads two rows for each example."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unflatten(0, (-1, 2)).mean(1))


def test_rows_that_are_windows_of_examples_are_not_divided(monkeypatch):
    ((X, _),) = pairs(n=8)
    la = make(with_lora(Windows(), "first", "second"), **full_rank())
    la.fit([(X, torch.tensor([0, 2, 1, 1]))])
    whole = tuple(la.predictive_moments(X))
    assert len(whole[0]) == 4
    # Of two rows, for each of three outputs.
    allow_at_once(monkeypatch, 2 * 3)
    calls = count_forward_passes(la)
    assert_close(tuple(la.predictive_moments(X)), whole, **EXACT)
    # The first part has fewer logits than rows; then all come at once.
    assert len(calls) == 2

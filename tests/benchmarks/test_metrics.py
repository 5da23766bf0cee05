"""Figures of predictions whose quality is known."""

import pytest
import torch

from benchmarks.metrics import (
    calibrated_ece,
    entropy,
    quality,
    reliability,
    selective_accuracy,
    shift_detection,
)


def test_figures_of_known_predictions():
    labels = torch.tensor([0, 1, 1, 0])
    sure = torch.eye(2)[labels]
    perfect = quality(sure, labels)
    assert perfect["accuracy"] == 1
    assert perfect["nll"] == perfect["ece"] == perfect["brier"] == 0
    wrong = quality(sure.flip(1), labels)
    assert wrong["brier"] == 2
    assert wrong["ece"] == 1
    even = torch.full((4, 2), 0.5)
    assert quality(even, labels)["nll"] == pytest.approx(0.6931, abs=1e-4)
    assert entropy(even) == pytest.approx([0.6931] * 4, abs=1e-4)
    assert shift_detection(sure, even)["shift_auroc"] == 1
    assert quality(0.3 * sure + 0.7 * even, labels)["ece"] == pytest.approx(0.35, abs=1e-6)
    with pytest.raises(ValueError, match="not finite"):
        quality(even / 0, labels)


def test_bins_hold_shares_confidences_and_accuracies():
    labels = torch.tensor([0, 1, 1, 0])
    sure = torch.eye(2)[labels]
    bins = reliability(0.3 * sure + 0.7 * torch.full((4, 2), 0.5), labels)
    assert len(bins) == 15
    (filled,) = [content for content in bins if content["accuracy"] is not None]
    assert filled["share"] == filled["accuracy"] == 1
    assert filled["confidence"] == pytest.approx(0.65)
    empty = {"share": 0.0, "confidence": None, "accuracy": None}
    assert [content for content in bins if content is not filled] == [empty] * 14
    assert reliability(sure.flip(1), labels)[-1] == {"share": 1, "confidence": 1, "accuracy": 0}


def test_selective_accuracy_keeps_the_most_certain():
    probabilities = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.99, 0.01], [0.5, 0.5]])
    accuracies = selective_accuracy(probabilities, torch.tensor([0, 1, 0, -1]))
    assert accuracies[0] == accuracies[9] == 1
    assert accuracies[14] == pytest.approx(2 / 3)
    assert accuracies[-1] == 0.5


def test_calibrated_probabilities_have_the_error_of_chance():
    sure = torch.tensor([[1.0, 0.0]]).repeat(50, 1)
    assert calibrated_ece(sure) == pytest.approx(0, abs=1e-6)
    errors = []
    for n in (100, 400, 1600):
        even = torch.tensor([[0.7, 0.3]]).repeat(n, 1)
        errors.append(calibrated_ece(even))
        # The mean distance of a share of n draws from its expectation, in a single bin.
        expected = (2 * 0.7 * 0.3 / torch.pi / n) ** 0.5
        assert errors[-1] == pytest.approx(expected, rel=0.4)
    assert errors == sorted(errors, reverse=True)

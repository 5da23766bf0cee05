"""Figures of predictions whose quality is known."""

import pytest
import torch

from benchmarks.metrics import (
    calibrated_ece,
    shift_detection,
)


def test_entropy_tells_shifted_texts_from_others():
    sure, even = torch.eye(2)[[0, 1, 1, 0]], torch.full((4, 2), 0.5)
    assert shift_detection(sure, even)["shift_auroc"] == 1


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

"""Figures of predictions whose quality is known."""

import torch

from benchmarks.metrics import shift_detection


def test_entropy_tells_shifted_texts_from_others():
    sure, even = torch.eye(2)[[0, 1, 1, 0]], torch.full((4, 2), 0.5)
    assert shift_detection(sure, even)["shift_auroc"] == 1

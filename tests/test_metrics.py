"""Figures of predictions whose quality is known."""

import pytest
import torch

from laplace_lora_ext.metrics import compare, quality
from tests.support.models import ragged_batches
from tests.support.posteriors import fitted, plain_regression


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
    too_modest = 0.3 * sure + 0.7 * even  # it says 0.65 and is always right
    assert quality(too_modest, labels)["ece"] == pytest.approx(0.35, abs=1e-6)
    with pytest.raises(ValueError, match="not finite"):
        quality(even / 0, labels)


@pytest.mark.filterwarnings("error:The model's outputs")
def test_the_trained_model_beside_its_posterior():
    la = fitted()
    batches = ragged_batches(seed=7)
    labels = torch.cat([batch["labels"] for batch in batches])
    found = compare(la, batches)
    posterior = torch.cat([la(batch, link_approx="mean_field") for batch in batches])
    assert found.posterior == quality(posterior, labels)
    f_mu = torch.cat([la.predictive_moments(batch).f_mu for batch in batches])
    assert found.trained == pytest.approx(quality(f_mu.softmax(-1), labels))
    head, trained, _ = str(found).splitlines()
    assert head.split() == ["accuracy", "nll", "ece", "brier"]
    name, accuracy, *_ = trained.split()
    assert name == "trained"
    assert accuracy == f"{found.trained['accuracy']:.4f}"


def test_numbers_have_no_figures_of_classes():
    la, _ = plain_regression()
    with pytest.raises(ValueError, match="regression has no class probabilities"):
        compare(la, [])

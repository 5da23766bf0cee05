"""Pictures, and the temperature that is the posterior's rival in them."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import nll_loss
from torch.testing import assert_close

from laplace_lora_ext.plots import Outcomes, reliability, risk_coverage
from laplace_lora_ext.predictive.predictions import Prediction


def some_outcomes(n_texts: int) -> Outcomes:
    """Draw labels of three classes, and a model that is too sure of itself."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(n_texts, 3, generator=generator)
    labels = torch.distributions.Categorical(logits=logits).sample()
    p = (logits / 2).softmax(-1)
    prediction = Prediction.of_draws(p, p[None])
    return Outcomes((3 * logits).softmax(-1), prediction, labels)


def loss_at(temperature: float, found: Outcomes) -> float:
    log_p = (found.trained.double().log() / temperature).log_softmax(-1)
    return nll_loss(log_p, found.labels).item()


def test_no_other_temperature_makes_the_labels_more_probable():
    found = some_outcomes(200)
    best = found.best_temperature()
    assert best > 1.5
    grid = torch.linspace(0.2, 10, 500).tolist()
    assert loss_at(best, found) <= min(loss_at(each, found) for each in grid) + 1e-9
    assert "temperature" not in found.probabilities
    cooled = found._replace(temperature=best).probabilities["temperature"]
    assert nll_loss(cooled.log(), found.labels).item() == pytest.approx(
        loss_at(best, found)
    )
    # Certainty has a temperature too.
    p = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    certain = Outcomes(p, found.prediction, torch.tensor([0, 1, 1]), temperature=2.0)
    assert certain.probabilities["temperature"].isfinite().all()
    assert 1 < certain.best_temperature() < 1000


@pytest.mark.parametrize(("n_texts", "n_points"), [(7, 7), (600, 15)])
def test_points_have_as_many_texts_each(n_texts, n_points):
    pytest.importorskip("matplotlib")
    found = some_outcomes(n_texts)
    ax = reliability(found)
    _, trained, posterior = ax.get_lines()
    confidence: Tensor = found.trained.max(1).values.double()
    by_hand = [part.mean() for part in confidence.sort().values.tensor_split(n_points)]
    assert_close(torch.tensor(trained.get_xdata()), torch.stack(by_hand))
    is_right = (found.prediction.labels == found.labels).double()
    order = found.prediction.probabilities.amax(1).argsort()
    shares = [is_right[part].mean() for part in order.tensor_split(n_points)]
    assert_close(torch.tensor(posterior.get_ydata()), torch.stack(shares))
    _, posterior = risk_coverage(found).get_lines()
    surest = found.prediction.probabilities.amax(1).topk(5).indices
    risk = 1 - is_right[surest].mean().item()
    assert posterior.get_ydata()[4] == pytest.approx(risk)
    assert posterior.get_xdata()[4] == pytest.approx(5 / n_texts)

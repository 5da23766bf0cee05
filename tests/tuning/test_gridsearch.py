"""The best of a grid of prior precisions, by brute force."""

import re
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from laplace.utils.metrics import RunningNLLMetric
from torch.distributions import MultivariateNormal, Normal
from torch.nn.functional import nll_loss
from torch.testing import assert_close

from laplace_lora_ext import GridSearch, PredictiveStatistics
from laplace_lora_ext.tuning import gridsearch
from tests.support.models import ragged_batches
from tests.support.posteriors import (
    PRIORS_ALONE,
    STRUCTURES,
    fitted,
    generator,
    plain_regression,
    some_precision,
    validation_loss,
)


def test_gridsearch_scales_a_layerwise_prior(validation):
    la = fitted(dtype=torch.float64)
    base = some_precision(la, "layerwise")
    history = la.optimize_prior_precision(
        method="gridsearch",
        val_loader=validation,
        init_prior_prec=base,
        **PRIORS_ALONE,
    )
    factors = torch.logspace(-2, 2, 7)
    points = torch.outer(factors.double(), base)
    assert_close(history.prior_precision, points)
    losses = []
    for point in points:
        loss = validation_loss(la, point, validation, link_approx="mean_field")
        losses.append(loss)
    assert history.objective.tolist() == pytest.approx(losses)


def test_gridsearch_of_a_scalar_prior_has_the_hosts_grid(validation):
    la = fitted()
    history = la.optimize_prior_precision(
        method="gridsearch",
        val_loader=validation,
        init_prior_prec=5.0,
        **PRIORS_ALONE,
    )
    assert_close(history.prior_precision[:, 0], torch.logspace(-2, 2, 7))


def log_loss(probs, y):
    """A loss of the user's own."""
    return nll_loss(probs.log(), y)


@dataclass(frozen=True)
class Case:
    """How a posterior is made, what it predicts, and the loss of that."""

    predictions: Mapping[str, Any]
    loss: Any = None
    posterior: Mapping[str, Any] = field(default_factory=dict)


# Without the tail, and in the precision that models usually have.
SINGLE = {"dtype": torch.float32, "tail": False}
SAMPLED = {"pred_type": "nn", "link_approx": "mc", "n_samples": 2}
CASES = {
    "mc": Case({"link_approx": "mc", "n_samples": 30}),
    "bridge_norm": Case({"link_approx": "bridge_norm", "n_samples": 30}),
    "probit": Case({"link_approx": "probit"}, posterior=SINGLE),
    "mean_field": Case({"link_approx": "mean_field"}, posterior=SINGLE),
    "bridge": Case({"link_approx": "bridge"}, posterior=SINGLE),
    "the host's metric": Case({"link_approx": "probit"}, loss=RunningNLLMetric()),
    "a function": Case(
        {"link_approx": "probit"},
        loss=log_loss,
        posterior={"tail": False},
    ),
}
for structure in STRUCTURES:
    CASES[f"drawn networks, {structure}"] = Case(
        SAMPLED, posterior={"structure": structure}
    )


@pytest.mark.parametrize("name", CASES)
def test_gridsearch_equals_brute_force(name):
    case = CASES[name]
    la = fitted(**case.posterior)
    # Each batch of drawn networks has draws of its own.
    batch_size = 3 if "pred_type" in case.predictions else 8
    batches = ragged_batches(seed=7, batch_size=batch_size)
    grid = torch.logspace(-2, 2, 7)
    torch.manual_seed(0)
    losses = [validation_loss(la, point, batches, **case.predictions) for point in grid]
    torch.manual_seed(0)
    history = la.optimize_prior_precision(
        method="gridsearch",
        val_loader=batches,
        loss=case.loss,
        **case.predictions,
        **PRIORS_ALONE,
    )
    assert history.objective.tolist() == pytest.approx(losses, rel=1e-5)
    lowest = losses.index(min(losses))
    assert la.prior_precision.item() == pytest.approx(grid[lowest].item())
    assert history.prior_precision.shape == (7, 1)


@pytest.mark.parametrize("n_outputs", [1, 2])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_regression_is_chosen_by_the_density_of_its_targets(structure, n_outputs):
    la, X = plain_regression(n_outputs, structure)
    y = torch.randn(12, n_outputs, generator=generator(3)).double()
    targets = y[:, 0] if n_outputs == 1 else y  # they may be flat
    history = la.optimize_prior_precision(
        method="gridsearch",
        val_loader=[(X[:5], targets[:5]), (X[5:], targets[5:])],
        grid_size=7,
        optimize_scale=False,
    )
    objective = history.objective.tolist()
    noise = 0.5**2 * torch.eye(n_outputs).double()
    for point, found in zip(history.prior_precision, objective, strict=True):
        la.prior_precision = point
        f_mu, f_var = la(X)
        predictive = MultivariateNormal(f_mu, f_var + noise)
        expected = -predictive.log_prob(y).mean().item()
        assert found == pytest.approx(expected, rel=1e-6)
    assert len(set(objective)) == 7


def in_turn(losses):
    """Make a loss of which each call gives the next number."""
    numbers = iter(losses)

    def loss(*outputs_and_targets):
        return torch.tensor(next(numbers), dtype=torch.float64)

    return loss


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ([1, torch.nan], "not a number at prior precisions"),
        ([torch.inf] * 2, "finite nowhere"),
    ],
)
def test_losses_that_choose_nothing_are_refused(validation, losses, message):
    la = fitted(prior_precision=0.4)
    search = GridSearch(
        val_loader=validation,
        grid_size=2,
        loss=in_turn(losses),
    )
    with pytest.raises(ValueError, match=message):
        search(la)
    assert la.prior_precision.tolist() == [0.4]


def warnings_of(losses, la=None, data=None, **grid):
    """Collect what is said when the points of a grid have these losses."""
    if la is None:
        la = fitted()
    if data is None:
        data = ragged_batches(seed=7)
    search = GridSearch(
        val_loader=data,
        grid_size=len(losses),
        loss=in_turn(losses),
        **grid,
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        search(la)
    messages = [str(warning.message) for warning in said]
    return [message for message in messages if "prior precision" in message]


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        ([3.0, 2.0, 1.0], r"last, 1e\+04: there is nothing to broaden"),
        ([3.0, 1 - 1e-9, 1.0], "last"),  # all that rounding tells apart
        ([torch.inf, 2.0, 2.0, 1.0], "last"),
        ([1.0, 2.0, 3.0], "first, 0.0001: still more variance"),
        ([1.0, 2.0, 1.0], "first"),  # which is taken
    ],
)
def test_a_choice_at_an_end_of_the_grid_is_said_once(losses, says):
    (message,) = warnings_of(losses)
    assert re.search(says, message)
    assert "sigma_noise" not in message


@pytest.mark.parametrize(
    "losses",
    [
        [2.0, 1.0, 1.5],
        [2.0, 1.0, 1.001],
        [1.0, 2.0],  # no grid has a middle
        [2.0, 1.0],
        [1.0],
    ],
)
def test_a_choice_between_the_ends_of_the_grid_is_not(losses):
    assert warnings_of(losses) == []


@pytest.mark.parametrize(
    ("losses", "size"),
    [([3.0, 2.0, 1.0], "large"), ([1.0, 2.0, 3.0], "small")],
)
def test_of_numbers_the_noise_may_be_wrong(losses, size):
    la, X = plain_regression()
    y = X[:, :2]
    (message,) = warnings_of(losses, la, [(X, y)])
    assert f"sigma_noise may be too {size}" in message


def test_a_grid_that_multiplies_a_base_has_ends_too():
    la = fitted()
    base = some_precision(la, "layerwise")
    (message,) = warnings_of([3.0, 2.0, 1.0], la, init_prior_prec=base)
    geometric_mean = base.log().mean().exp().item()
    assert f"the last, {1e4 * geometric_mean:.3g}:" in message


def test_a_matrix_that_is_no_covariance_is_the_worst(validation):
    la = fitted()

    def loss(probs, _):
        if la.prior_precision < 1:
            raise torch.linalg.LinAlgError
        return la.prior_precision.sum()

    search = GridSearch(val_loader=validation, loss=loss, **PRIORS_ALONE)
    history = search(la)
    assert history.objective[:3].tolist() == [torch.inf] * 3
    assert la.prior_precision.item() == pytest.approx(1)


def test_a_regression_by_drawn_networks_is_scored_by_its_variances():
    la, X = plain_regression()
    y = X[:, :2]
    predictions = {"pred_type": "nn", "link_approx": "mc", "n_samples": 5}
    search = GridSearch(
        val_loader=[(X, y)],
        grid_size=1,
        log_prior_prec_min=0,
        **predictions,
    )
    torch.manual_seed(0)
    history = search(la)
    torch.manual_seed(0)
    mean, variance = la(X, **predictions)
    noise = 0.5**2
    predictive = Normal(mean, (variance + noise).sqrt())
    of_targets = predictive.log_prob(y).sum(1)
    expected = -of_targets.mean().item()
    assert history.objective.item() == pytest.approx(expected)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("predictions", [{}, {"pred_type": "nn", "n_samples": 2}])
def test_data_that_can_be_read_once_are_the_same_at_every_point(structure, predictions):
    la = fitted(structure=structure)
    batches = ragged_batches(seed=7)

    def objective(data):
        torch.manual_seed(0)
        search = GridSearch(val_loader=data, **predictions, **PRIORS_ALONE)
        return search(la).objective

    assert torch.equal(objective(iter(batches)), objective(batches))


@pytest.mark.parametrize("link", ["mean_field", "probit", "bridge"])
@pytest.mark.parametrize("rows", [4, 256])  # several times, and all at the end
def test_losses_that_are_summed_in_one_pass_are_those_of_kept_statistics(
    link, rows, monkeypatch
):
    la = fitted(dtype=torch.float64)
    batches = [*ragged_batches(seed=7), *ragged_batches(seed=8)]
    statistics = la.predictive_statistics(batches)
    monkeypatch.setattr(gridsearch, "_ROWS", rows)

    def objective(data):
        search = GridSearch(val_loader=data, link_approx=link, **PRIORS_ALONE)
        return search(la).objective

    assert_close(objective(batches), objective(statistics), rtol=1e-6, atol=0)


@pytest.mark.parametrize("limit", ["_ROWS", "_BYTES"])
def test_a_search_keeps_no_statistics_of_examples_that_it_has_scored(
    limit, monkeypatch
):
    la = fitted()
    batches = ragged_batches(seed=7, batch_size=2)
    of_one_batch = max(la.predictive_statistics([batch]).nbytes for batch in batches)
    of_two_batches = {"_ROWS": 4, "_BYTES": 2 * of_one_batch}
    monkeypatch.setattr(gridsearch, limit, of_two_batches[limit])
    statistics_of = la.statistics_by_batch()
    moments = PredictiveStatistics.moments
    columns: list[weakref.ref] = []
    bytes_alive: list[int] = []
    examples_at_once: list[int] = []

    def watched(batch):
        """Count the bytes of all statistics that are there after a batch."""
        statistics = statistics_of(batch)
        columns.extend(weakref.ref(column) for column in statistics.columns)
        alive = [column() for column in columns]
        bytes_alive.append(sum(column.nbytes for column in alive if column is not None))
        return statistics

    def counted(statistics, prior_precision):
        examples_at_once.append(len(statistics))
        return moments(statistics, prior_precision)

    monkeypatch.setattr(la, "statistics_by_batch", lambda *_: watched)
    monkeypatch.setattr(PredictiveStatistics, "moments", counted)

    def most_kept(n_times: int) -> tuple[int, int]:
        """Find the most bytes after any batch, and the most examples of a score."""
        for record in (columns, bytes_alive, examples_at_once):
            record.clear()
        search = GridSearch(val_loader=batches * n_times, **PRIORS_ALONE)
        search(la)
        assert len(bytes_alive) == n_times * len(batches)
        return max(bytes_alive), max(examples_at_once)

    most_bytes, most_examples = most_kept(6)
    assert (most_bytes, most_examples) == most_kept(1)
    # What waits to be scored, and the batch that comes.
    assert most_bytes <= 3 * of_one_batch
    assert most_examples <= 3 * 2

"""The best of a grid of prior precisions, by brute force."""

import re
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from laplace.utils.metrics import RunningNLLMetric
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal
from torch.nn.functional import nll_loss
from torch.testing import assert_close

from laplace_lora_ext import GridSearch, Moments, PredictiveStatistics
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

Batch = dict[str, Tensor]

# The points of `PRIORS_ALONE`.
POINTS = torch.logspace(-2, 2, 7)


# --- the grid -------------------------------------------------------------------------


def test_gridsearch_scales_a_layerwise_prior(validation):
    la = fitted(dtype=torch.float64)
    base = some_precision(la, "layerwise")
    history = la.optimize_prior_precision(
        method="gridsearch",
        val_loader=validation,
        init_prior_prec=base,
        **PRIORS_ALONE,
    )
    points = torch.outer(POINTS.double(), base)
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
    assert_close(history.prior_precision, POINTS[:, None])


# --- against brute force --------------------------------------------------------------


def log_loss(
    probs: Tensor,
    y: Tensor,
) -> Tensor:
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
SAMPLED = {
    "pred_type": "nn",
    "link_approx": "mc",
    "n_samples": 2,
}
CASES = {
    "mc": Case(
        predictions={"link_approx": "mc", "n_samples": 30},
    ),
    "bridge_norm": Case(
        predictions={"link_approx": "bridge_norm", "n_samples": 30},
    ),
    "probit": Case(
        predictions={"link_approx": "probit"},
        posterior=SINGLE,
    ),
    "mean_field": Case(
        predictions={"link_approx": "mean_field"},
        posterior=SINGLE,
    ),
    "bridge": Case(
        predictions={"link_approx": "bridge"},
        posterior=SINGLE,
    ),
    "the host's metric": Case(
        predictions={"link_approx": "probit"},
        loss=RunningNLLMetric(),
    ),
    "a function": Case(
        predictions={"link_approx": "probit"},
        loss=log_loss,
        posterior={"tail": False},
    ),
}
for structure in STRUCTURES:
    CASES[f"drawn networks, {structure}"] = Case(
        predictions=SAMPLED,
        posterior={"structure": structure},
    )


@pytest.mark.parametrize("name", CASES)
def test_gridsearch_equals_brute_force(name):
    case = CASES[name]
    la = fitted(**case.posterior)
    # Each batch of drawn networks has draws of its own.
    batch_size = 3 if "pred_type" in case.predictions else 8
    batches = ragged_batches(seed=7, batch_size=batch_size)
    # Both draw from the global generator, the same numbers.
    torch.manual_seed(0)
    losses = []
    for point in POINTS:
        loss = validation_loss(la, point, batches, **case.predictions)
        losses.append(loss)
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
    best = POINTS[lowest].item()
    assert la.prior_precision.item() == pytest.approx(best)
    assert history.prior_precision.shape == (7, 1)


# --- regression -----------------------------------------------------------------------


@pytest.mark.parametrize("n_outputs", [1, 2])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_regression_is_chosen_by_the_density_of_its_targets(structure, n_outputs):
    la, X = plain_regression(n_outputs, structure)
    y = torch.randn(12, n_outputs, generator=generator(3)).double()
    # Targets of one output may be flat.
    targets = y[:, 0] if n_outputs == 1 else y
    small = (X[:5], targets[:5])
    large = (X[5:], targets[5:])
    history = la.optimize_prior_precision(
        method="gridsearch",
        val_loader=[small, large],
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


def test_a_regression_by_drawn_networks_is_scored_by_its_variances():
    la, X = plain_regression()
    y = X[:, :2]
    predictions = {
        "pred_type": "nn",
        "link_approx": "mc",
        "n_samples": 5,
    }
    search = GridSearch(
        val_loader=[(X, y)],
        grid_size=1,
        log_prior_prec_min=0,
        **predictions,
    )
    # Both draw from the global generator, the same numbers.
    torch.manual_seed(0)
    history = search(la)
    torch.manual_seed(0)
    mean, variance = la(X, **predictions)
    noise = 0.5**2
    predictive = Normal(mean, (variance + noise).sqrt())
    of_targets = predictive.log_prob(y).sum(1)
    expected = -of_targets.mean().item()
    assert history.objective.item() == pytest.approx(expected)


# --- losses that choose nothing -------------------------------------------------------


def in_turn(losses: Sequence[float]) -> Callable[..., Tensor]:
    """Make a loss of which each call gives the next number."""
    numbers = iter(losses)

    def loss(*outputs_and_targets: Any) -> Tensor:
        return torch.tensor(next(numbers), dtype=torch.float64)

    return loss


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ([1, torch.nan], "not a number at prior precisions"),
        ([torch.inf, torch.inf], "finite nowhere"),
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


def test_a_matrix_that_is_no_covariance_is_the_worst(validation):
    la = fitted()

    def loss(
        probs: Tensor,
        _: Tensor,
    ) -> Tensor:
        if la.prior_precision < 1:
            raise torch.linalg.LinAlgError
        return la.prior_precision.sum()

    search = GridSearch(val_loader=validation, loss=loss, **PRIORS_ALONE)
    history = search(la)
    below_one = history.objective[:3]
    assert below_one.isinf().all()
    assert la.prior_precision.item() == pytest.approx(1)


# --- choices at an end of the grid ----------------------------------------------------


def warnings_of(
    losses: Sequence[float],
    la: Any = None,
    data: Any = None,
    **grid: Any,
) -> list[str]:
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
        # All that rounding tells apart.
        ([3.0, 1 - 1e-9, 1.0], "last"),
        ([torch.inf, 2.0, 2.0, 1.0], "last"),
        ([1.0, 2.0, 3.0], "first, 0.0001: still more variance"),
        # Of two that are as good, the first is taken.
        ([1.0, 2.0, 1.0], "first"),
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
        # These have no middle.
        [1.0, 2.0],
        [2.0, 1.0],
        [1.0],
    ],
)
def test_a_choice_between_the_ends_of_the_grid_is_not(losses):
    assert warnings_of(losses) == []


@pytest.mark.parametrize(
    ("losses", "size"),
    [
        ([3.0, 2.0, 1.0], "large"),
        ([1.0, 2.0, 3.0], "small"),
    ],
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
    last = 1e4 * geometric_mean
    assert f"the last, {last:.3g}:" in message


# --- one pass over the data -----------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    "predictions",
    [
        pytest.param({}, id="linearised"),
        pytest.param({"pred_type": "nn", "n_samples": 2}, id="drawn networks"),
    ],
)
def test_data_that_can_be_read_once_are_the_same_at_every_point(structure, predictions):
    la = fitted(structure=structure)
    batches = ragged_batches(seed=7)

    def objective(data: Iterable[Batch]) -> Tensor:
        torch.manual_seed(0)
        search = GridSearch(val_loader=data, **predictions, **PRIORS_ALONE)
        return search(la).objective

    found = objective(iter(batches))
    assert torch.equal(found, objective(batches))


@pytest.mark.parametrize("link", ["mean_field", "probit", "bridge"])
@pytest.mark.parametrize(
    "rows",
    [4, 256],
    ids=["scored several times", "scored at the end"],
)
def test_losses_that_are_summed_in_one_pass_are_those_of_kept_statistics(
    link,
    rows,
    monkeypatch,
):
    la = fitted(dtype=torch.float64)
    batches = [*ragged_batches(seed=7), *ragged_batches(seed=8)]
    statistics = la.predictive_statistics(batches)
    monkeypatch.setattr(gridsearch, "_ROWS", rows)

    def objective(data: Any) -> Tensor:
        search = GridSearch(val_loader=data, link_approx=link, **PRIORS_ALONE)
        return search(la).objective

    found = objective(batches)
    expected = objective(statistics)
    assert_close(found, expected, rtol=1e-6, atol=0)


class Watch:
    """Keeps, of searches by a posterior, what statistics there are at a time."""

    def __init__(
        self,
        la: Any,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.bytes_alive: list[int] = []
        self.examples_at_once: list[int] = []
        self._columns: list[weakref.ref] = []
        self._statistics_of = la.statistics_by_batch()
        self._moments = PredictiveStatistics.moments
        monkeypatch.setattr(la, "statistics_by_batch", lambda *_: self._of_batch)
        # A function, which becomes a method; a method would not.
        monkeypatch.setattr(
            PredictiveStatistics,
            "moments",
            lambda statistics, prior: self._score(statistics, prior),
        )

    def _of_batch(self, batch: Batch) -> PredictiveStatistics:
        """Count the bytes of all statistics that are there after a batch."""
        statistics = self._statistics_of(batch)
        for column in statistics.columns:
            self._columns.append(weakref.ref(column))
        n_bytes = 0
        for reference in self._columns:
            column = reference()
            if column is not None:
                n_bytes += column.nbytes
        self.bytes_alive.append(n_bytes)
        return statistics

    def _score(
        self,
        statistics: PredictiveStatistics,
        prior_precision: Tensor,
    ) -> Moments:
        self.examples_at_once.append(len(statistics))
        return self._moments(statistics, prior_precision)


@dataclass(frozen=True)
class Most:
    """The most bytes after any batch of a search, and the most examples of a score."""

    n_bytes: int
    n_examples: int


@pytest.mark.parametrize("limit", ["_ROWS", "_BYTES"])
def test_a_search_keeps_no_statistics_of_examples_that_it_has_scored(
    limit,
    monkeypatch,
):
    la = fitted()
    batches = ragged_batches(seed=7, batch_size=2)
    sizes = [la.predictive_statistics([batch]).nbytes for batch in batches]
    of_one_batch = max(sizes)
    of_two_batches = {"_ROWS": 4, "_BYTES": 2 * of_one_batch}
    monkeypatch.setattr(gridsearch, limit, of_two_batches[limit])

    def most_kept(n_times: int) -> Most:
        """Search with the batches so many times over."""
        with monkeypatch.context() as patched:
            watch = Watch(la, patched)
            search = GridSearch(val_loader=batches * n_times, **PRIORS_ALONE)
            search(la)
        assert len(watch.bytes_alive) == n_times * len(batches)
        return Most(
            n_bytes=max(watch.bytes_alive),
            n_examples=max(watch.examples_at_once),
        )

    most = most_kept(6)
    assert most == most_kept(1)
    # What waits to be scored, and the batch that comes.
    assert most.n_bytes <= 3 * of_one_batch
    assert most.n_examples <= 3 * 2

"""The best of a grid of prior precisions, by brute force."""

import re
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.testing import assert_close

from laplace_lora_ext import GridSearch, PredictiveStatistics
from laplace_lora_ext.predictive.moments import Contrasts
from laplace_lora_ext.predictive.posterior import Members
from laplace_lora_ext.tuning import gridsearch
from laplace_lora_ext.tuning.losses import LOGIT_SCALES, Likelihoods, expected_choice
from laplace_lora_ext.tuning.method import TuningHistory
from tests.support.models import head_of, lora_model, ragged_batches
from tests.support.posteriors import (
    PRIORS_ALONE,
    fitted,
    generator,
    plain_regression,
    some_precision,
    validation_loss,
)

Batch = dict[str, Tensor]

LINK = {"link_approx": "mean_field"}
# The points of `PRIORS_ALONE`.
POINTS = torch.logspace(-2, 2, 7)


# --- the grid -------------------------------------------------------------------------


def test_several_numbers_are_multiplied_and_a_single_one_is_ignored(validation):
    la = fitted()
    base = some_precision(la, "layerwise")
    for start, points in (
        (5.0, POINTS[:, None]),
        (base, torch.outer(POINTS.double(), base)),
    ):
        options = {"val_loader": validation, "init_prior_prec": start}
        history = GridSearch(**options, **PRIORS_ALONE)(la)
        assert_close(history.prior_precision, points)
        losses = [validation_loss(la, point, validation, **LINK) for point in points]
        assert history.objective.tolist() == pytest.approx(losses, rel=1e-5)


# --- against brute force --------------------------------------------------------------


# Predictions, and a posterior.
CASES = {
    "mc": ({"link_approx": "mc", "n_samples": 30}, {}),
    "probit": ({"link_approx": "probit"}, {"dtype": torch.float32, "tail": False}),
    "kron": (LINK, {"structure": "kron"}),
    "full": ({"link_approx": "mc", "n_samples": 30}, {"structure": "full"}),
}


@pytest.mark.parametrize("name", CASES)
def test_gridsearch_equals_brute_force(name):
    predictions, posterior = CASES[name]
    la = fitted(**posterior)
    # As draws are of all texts together, these are one batch.
    batches = ragged_batches(seed=7, batch_size=8)
    # The same draws at every point.
    losses = [
        validation_loss(la, point, batches, generator=generator(0), **predictions)
        for point in POINTS
    ]
    torch.manual_seed(1)  # on whose state nothing depends
    history = GridSearch(val_loader=batches, **predictions, **PRIORS_ALONE)(la)
    assert history.objective.tolist() == pytest.approx(losses, rel=1e-5)
    # The point next to the mean of their logarithms, weighted by likelihoods.
    weights = torch.softmax(-8 * torch.tensor(losses), 0)
    mean = weights @ POINTS.log()
    expected = POINTS[(POINTS.log() - mean).abs().argmin()].item()
    assert la.prior_precision.item() == pytest.approx(expected)
    assert history.prior_precision.shape == (7, 1)


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag"])
def test_many_classes_are_searched_by_their_contrasts(structure):
    # Batches whose examples need unlike numbers of contrasts.
    batches = ragged_batches(n_classes=14, seed=7, batch_size=1)
    model = lora_model("bert", n_labels=14)
    head_of(model).weight.data *= 60
    la = fitted(model=model, batches=batches, structure=structure)
    logits = [la.predictive_moments(batch).f_mu for batch in batches]
    n_needed = {len(Contrasts().directions(of_text)) for of_text in logits}
    assert len(n_needed) > 1
    history = GridSearch(val_loader=batches, **PRIORS_ALONE)(la)
    losses = [validation_loss(la, point, batches, **LINK) for point in POINTS]
    assert history.objective.tolist() == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    ("structure", "n_outputs"), [("lowrank_kron", 1), ("lowrank_kron", 2), ("diag", 2)]
)
def test_a_regression_is_chosen_by_the_density_of_its_targets(structure, n_outputs):
    la, X = plain_regression(n_outputs, structure)
    y = torch.randn(12, n_outputs, generator=generator(3)).double()
    # Targets of one output may be flat.
    targets = y[:, 0] if n_outputs == 1 else y
    batches = [(X[:5], targets[:5]), (X[5:], targets[5:])]
    search = GridSearch(val_loader=batches, grid_size=7, optimize_scale=False)
    history = search(la)
    objective = history.objective.tolist()
    noise = 0.5**2 * torch.eye(n_outputs).double()
    for point, found in zip(history.prior_precision, objective, strict=True):
        la.prior_precision = point
        f_mu, f_var = la(X)
        density = MultivariateNormal(f_mu, f_var + noise)
        expected = -density.log_prob(y).mean().item()
        assert found == pytest.approx(expected, rel=1e-6)
    assert len(set(objective)) == 7


# --- which point is chosen ------------------------------------------------------------


def history_of(
    losses: Sequence[float],
    grid: Tensor | None = None,
    n_examples: int = 1,
    scales: tuple[float, ...] = (1.0,),
) -> TuningHistory:
    """Make the history of a grid whose points have these losses at any scale."""
    if grid is None:
        grid = torch.logspace(-4, 4, len(losses))
    means = torch.tensor(losses, dtype=torch.float64)
    sums = n_examples * means[:, None].expand(-1, len(scales))
    return expected_choice(grid, sums, n_examples, Likelihoods("mean_field", 1, scales))


def test_few_examples_choose_the_mean_and_many_the_best():
    losses = [0.9, 0.7, 0.4, 0.3, 0.5]
    # One example weighs them by 0.14, 0.17, 0.23, 0.25, 0.21, with the mean at 2.2.
    assert [history_of(losses, n_examples=n).choice for n in (1, 100)] == [2, 3]
    # Nothing is known of an infinite loss, but that it is not this point.
    assert history_of([torch.inf, 0.3, 0.3]).choice in (1, 2)
    # Of two kinds, of which the first is known and the second is not.
    grid = torch.cartesian_prod(*[torch.tensor([0.01, 1.0, 100.0])] * 2)
    choice = history_of([9.0] * 6 + [0] * 3, grid).choice
    assert grid[choice].tolist() == [100, 1]


def test_no_variance_is_chosen_where_it_is_better_by_a_nat():
    grid = torch.tensor([0.1, 1, 10, 1e12])
    for last, choice in ((-0.51, 3), (-0.49, 1)):
        losses = [0.6, 0.5, 0.6, last]
        history = history_of(losses, grid, scales=LOGIT_SCALES)
        assert history.choice == choice


# --- losses that choose nothing -------------------------------------------------------


def test_losses_that_choose_nothing_are_refused():
    with pytest.raises(ValueError, match="not a number"):
        history_of([1.0, torch.nan])
    with pytest.raises(ValueError, match="finite nowhere"):
        history_of([torch.inf, torch.inf])


@pytest.mark.parametrize("structure", ["lowrank_kron", "full"])
def test_a_matrix_that_is_no_covariance_is_the_worst(
    structure, validation, monkeypatch
):
    la = fitted(structure=structure)
    owner = PredictiveStatistics if structure == "lowrank_kron" else type(la)
    name = "moments" if structure == "lowrank_kron" else "functional_variance"
    covariance = getattr(owner, name)

    def of_large_priors(self: Any, asked: Tensor) -> Any:
        prior = asked if structure == "lowrank_kron" else self.prior_precision
        if prior < 1:
            raise torch.linalg.LinAlgError
        return covariance(self, asked)

    monkeypatch.setattr(owner, name, of_large_priors)
    history = GridSearch(val_loader=validation, **PRIORS_ALONE)(la)
    is_infinite = history.objective.isinf()
    assert is_infinite.tolist() == [True] * 3 + [False] * 4
    assert la.prior_precision >= 1


# --- choices at an end of the grid ----------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        ([3.0, 2.0, 1.0], r"last, 1e\+04"),
        # All that rounding tells apart.
        ([3.0, 1 - 1e-9, 1.0], "last"),
        ([torch.inf, 2.0, 2.0, 1.0], "last"),
        ([1.0, 2.0, 3.0], "first, 0.0001"),
        # Of two that are as good, the first is taken.
        ([1.0, 2.0, 1.0], "first"),
        ([2.0, 1.0, 1.001], None),
        # These have no middle.
        ([1.0, 2.0], None),
        ([1.0, 1.0, 1.0], None),
    ],
)
def test_a_choice_at_an_end_of_the_grid_is_said_once(losses, says):
    base = torch.tensor([1.0, 100.0])
    # A grid that multiplies a base has ends too, told by the geometric mean.
    points = torch.logspace(-4, 4, len(losses))
    for grid in (points, torch.outer(points / 10, base)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            GridSearch(val_loader=[]).remark(Members(), history_of(losses, grid))
        found = [str(warning.message) for warning in said]
        assert len(found) == (says is not None)
        assert not says or re.search(says, found[0])


# --- one pass over the data -----------------------------------------------------------


@pytest.mark.parametrize(("link", "rows"), [("mean_field", 4), ("probit", 256)])
def test_losses_that_are_summed_in_one_pass_are_those_of_kept_statistics(
    link, rows, monkeypatch
):
    la = fitted(dtype=torch.float64)
    batches = [*ragged_batches(seed=7), *ragged_batches(seed=8)]
    statistics = la.predictive_statistics(batches)
    monkeypatch.setattr(gridsearch, "_ROWS", rows)

    found, expected = (
        GridSearch(val_loader=data, link_approx=link, **PRIORS_ALONE)(la).objective
        for data in (batches, statistics)
    )
    assert_close(found, expected, rtol=1e-6, atol=0)


def most_alive(la: Any, batches: list[Batch], monkeypatch: Any) -> int:
    """Search; count the most bytes of statistics that are alive at once."""
    columns: list[weakref.ref] = []
    n_bytes: list[int] = []
    make = gridsearch.statistics_of_batch

    def watched(*args: Any, **kwargs: Any) -> Any:
        statistics = make(*args, **kwargs)
        columns.extend(weakref.ref(column) for column in statistics.columns)
        alive = [column() for column in columns]
        n_bytes.append(sum(each.nbytes for each in alive if each is not None))
        return statistics

    with monkeypatch.context() as patched:
        patched.setattr(gridsearch, "statistics_of_batch", watched)
        GridSearch(val_loader=batches, **PRIORS_ALONE)(la)
    assert len(n_bytes) == len(batches)
    return max(n_bytes)


@pytest.mark.parametrize("limit", ["_ROWS", "_BYTES"])
def test_a_search_keeps_no_statistics_of_examples_that_it_has_scored(
    limit, monkeypatch
):
    la = fitted()
    batches = ragged_batches(seed=7, batch_size=2)
    of_one_batch = la.predictive_statistics(batches[:1]).nbytes
    of_two_batches = {"_ROWS": 4, "_BYTES": 2 * of_one_batch}
    monkeypatch.setattr(gridsearch, limit, of_two_batches[limit])
    # What waits to be scored, and the batch that comes.
    assert most_alive(la, batches * 6, monkeypatch) <= 3 * of_one_batch

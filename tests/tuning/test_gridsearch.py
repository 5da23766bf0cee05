"""Grids of prior precisions: losses by brute force, and which point is chosen."""

import math
import re
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext import GridSearch, LaplaceMixture, TuningHistory
from laplace_lora_ext.tuning import gridsearch
from laplace_lora_ext.tuning.gridsearch import (
    LOGIT_SCALES,
    PENALTIES,
    Likelihoods,
    expected_choice,
    warn_at_ends,
)
from laplace_lora_ext.tuning.method import draw_seed
from tests.support.cases import Gaussian
from tests.support.models import RAGGED, Batch, ragged_batches
from tests.support.posteriors import (
    GRID,
    PRIORS_ALONE,
    count_forward_passes,
    fitted,
    generator,
    normal,
    plain_regression,
    validation_loss,
)
from tests.support.texts import fitted_text, text_batches

# --- against brute force --------------------------------------------------------------


def note_choices(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Note what the next search gives to `expected_choice`."""
    noted: list[Any] = []

    def note(*args: Any) -> TuningHistory:
        noted.extend(args)
        return expected_choice(*args)

    monkeypatch.setattr(gridsearch, "expected_choice", note)
    return noted


def test_the_loss_is_that_of_every_pair(monkeypatch):
    la = fitted(structure="full")
    # As draws are of all texts together, these are one batch.
    batches = ragged_batches(seed=7, batch_size=8)
    noted = note_choices(monkeypatch)
    torch.manual_seed(1)  # on whose state nothing depends
    options = {"link_approx": "mc", "n_samples": 30}
    la.logit_scale = 2.5  # of an earlier search, say
    passes = count_forward_passes(la)
    history = GridSearch(val_loader=batches, **options, **GRID)(la)
    assert len(passes) == len(batches)
    assert len(history.trials) == GRID["grid_size"] + 1
    _, of_points, *_ = noted
    for trial, sums in zip(history.trials, of_points, strict=True):
        for index in (0, 6, 8):
            la.logit_scale = LOGIT_SCALES[index]
            draws = options | {"generator": generator(0)}
            expected = validation_loss(la, trial.prior_precision, batches, **draws)
            assert sums[index].item() / 8 == pytest.approx(expected, rel=1e-5)


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
    score = Likelihoods("mean_field", 1, scales)
    return expected_choice(grid, sums, n_examples, score, torch.zeros(len(grid)))


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


def test_a_prior_precision_is_near_the_usual_one_before_any_data(monkeypatch):
    members = [fitted(), fitted(batches=ragged_batches(seed=5)[:1], temperature=0.5)]
    usual = []
    for la, prior in zip(members, (3.0, 0.2), strict=True):
        la.prior_precision = prior
        trace = la.H.to_matrix().trace() / la.temperature
        usual.append(300 * trace / (la.n_data * la.n_outputs))
    alone, both = members[0], LaplaceMixture(members)
    for search, factors in (
        (alone, 1 / torch.stack(usual[:1])),
        (both, torch.tensor([3.0, 0.2]) / torch.stack(usual)),
    ):
        noted = note_choices(monkeypatch)
        GridSearch(val_loader=ragged_batches(), **GRID)(search)
        grid, *_, log_priors = noted
        points = torch.outer(grid.double(), factors)
        standardised = points.log10().mean(1) / 1.5
        assert_close(log_priors, -standardised.square() / 2, rtol=1e-6, atol=1e-9)
    # Where examples know nothing of it, it is the mean.
    score = Likelihoods("mean_field", 1, (1.0,))
    grid = torch.logspace(-4, 4, 9)
    log_priors = -((grid.double().log10() - 1) ** 2)
    assert expected_choice(grid, torch.ones(9, 1), 1, score, log_priors).choice == 5


def test_no_variance_is_chosen_where_it_is_better_by_two_nats():
    grid = torch.tensor([0.1, 1, 10, 1e12])
    for last, choice in ((-1.51, 3), (-1.49, 1)):
        losses = [0.6, 0.5, 0.6, last]
        history = history_of(losses, grid, scales=LOGIT_SCALES)
        assert history.choice == choice


def test_losses_that_choose_nothing_are_refused():
    with pytest.raises(ValueError, match="not a number"):
        history_of([1.0, torch.nan])
    with pytest.raises(ValueError, match="finite nowhere"):
        history_of([torch.inf, torch.inf])


def test_a_matrix_that_is_no_covariance_is_the_worst(monkeypatch):
    la = fitted(structure="full")
    covariance = type(la).functional_variance

    def of_large_priors(self: Any, Js: Tensor) -> Tensor:
        if self.prior_precision < 1:
            raise torch.linalg.LinAlgError
        return covariance(self, Js)

    monkeypatch.setattr(type(la), "functional_variance", of_large_priors)
    history = GridSearch(val_loader=ragged_batches(), **GRID)(la)
    assert history.objective.isinf().tolist() == [True] * 3 + [False] * 5
    assert la.prior_precision >= 1


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        ([3.0, 2.0, 1.0], r"last, 1e\+04"),
        # All that rounding tells apart.
        ([3.0, 1 - 1e-9, 1.0], "last"),
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
    # A grid that multiplies a base has ends too, told by the geometric mean.
    points = torch.logspace(-4, 4, len(losses))
    for grid in (points, torch.outer(points / 10, torch.tensor([1.0, 100.0]))):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            warn_at_ends(history_of(losses, grid))
        found = [str(warning.message) for warning in said]
        assert len(found) == (says is not None)
        assert not says or re.search(says, found[0])


# --- a scale of the logits ------------------------------------------------------------

LOGS = torch.tensor(LOGIT_SCALES, dtype=torch.float64).log()


def trial_of(losses: Tensor) -> Any:
    """Choose a scale by two examples' summed losses at each of them."""
    score = Likelihoods("mean_field", 1, LOGIT_SCALES)
    return score.trial(torch.ones(1), losses, n_examples=2)


# Below 1, above it, and where there is nothing to choose between them.
@pytest.mark.parametrize(
    ("best", "penalty"), [(-0.9, PENALTIES[0]), (0.9, PENALTIES[1]), (0, 0)]
)
def test_many_examples_choose_the_best_scale_and_each_has_a_penalty(best, penalty):
    curvature = 3e3
    found = trial_of(curvature * (LOGS - best) ** 2)
    # The loss a (log s - b)², with the penalty c (log s)², is least at a b / (a + c).
    expected = curvature * best / (curvature + penalty)
    # Between two of the scales that are weighed.
    assert math.log(found.logit_scale) == pytest.approx(expected, abs=3e-4)
    # Both are means over the two examples.
    loss = curvature * (math.log(found.logit_scale) - best) ** 2 / 2
    assert found.loss == pytest.approx(loss, abs=1e-6)


def test_few_examples_choose_the_mean_of_all_scales():
    # With the penalty below 1, a line is another normal distribution of log s.
    mean, rate = -1.5, 2 * PENALTIES[0]
    found = trial_of(-rate * mean * LOGS)
    fine = torch.linspace(LOGS[0], LOGS[-1], 100_000).double()
    penalty = torch.where(fine < 0, *PENALTIES) * fine**2
    weights = (rate * mean * fine - penalty).exp()
    expected = (weights * fine).sum() / weights.sum()
    assert math.log(found.logit_scale) == pytest.approx(expected.item(), abs=5e-3)
    # That of the normal distribution, whose ends are cut off.
    assert abs(expected - mean) < 0.2
    assert found.objective == pytest.approx(-weights.mean().log().item() / 2, abs=5e-3)
    loss = -rate * mean * math.log(found.logit_scale) / 2
    assert found.loss == pytest.approx(loss)


def test_a_search_that_ends_without_variance_says_so(la):
    assert "without variance" not in repr(la)
    # The model is right, yet not sure.
    texts = ragged_batches(lengths=RAGGED * 3, seed=7)
    for batch in texts:
        batch["labels"] = la.predictive_moments(batch).f_mu.argmax(-1)
    with pytest.warns(UserWarning, match="the last"):
        GridSearch(val_loader=texts, **PRIORS_ALONE)(la)
    with warnings.catch_warnings():
        # The last point is no fault where a scale is chosen.
        warnings.simplefilter("error")
        GridSearch(val_loader=texts, **GRID)(la)
    # All other priors of this grid are far too broad.
    base = torch.linspace(0.5, 2, len(la.blocks))
    few = {"log_prior_prec_max": -3, "grid_size": 2, "init_prior_prec": base}
    GridSearch(val_loader=30 * texts, **few)(la)
    assert "without variance" in repr(la)
    assert "do not vary" in la.summary()
    prediction = la.predict(texts)
    assert not prediction.epistemic_entropy.any()
    assert prediction.total_entropy.all()


def test_training_data_are_no_validation_data(la):
    for seed, is_warned in ((1, True), (7, False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            GridSearch(val_loader=ragged_batches(seed=seed), **GRID)(la)
        said = " ".join(str(each.message) for each in caught)
        assert ("seem to be the training data" in said) is is_warned


# --- the noise of numbers -------------------------------------------------------------


def numbers(la: Any, X: Tensor, scale: float = 1.0) -> list[tuple[Tensor, Tensor]]:
    """Make targets with noise of a known size around the model."""
    f_mu, _ = la.predictive_moments(X)
    y = f_mu + scale * normal(*f_mu.shape, seed=3)
    # Of unlike sizes, so that a mean of batches is not that of their examples.
    return [(X[:5], y[:5]), (X[5:], y[5:])]


def loss_of(la: Any, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Average the negative log-density of the targets."""
    target = Gaussian()
    target.noise = la.sigma_noise
    return torch.cat([target.nll(la(X), y) for X, y in batches]).mean().item()


@pytest.mark.parametrize(("structure", "n_outputs"), [("lowrank_kron", 1), ("full", 2)])
def test_each_prior_has_the_noise_that_is_best_for_it(structure, n_outputs):
    la, X = plain_regression(n_outputs, structure)
    batches = numbers(la, X, scale=0.3)
    history = GridSearch(val_loader=batches, **GRID)(la)
    # The last point is the noise alone.
    *trials, last = history.trials
    for trial in trials:
        losses = []
        for factor in (1.0, 0.99, 1.01):
            la.sigma_noise = factor * trial.sigma_noise
            # The search's priors are relative to the noise, which moves alone here.
            la.prior_precision = trial.prior_precision / factor**2
            losses.append(loss_of(la, batches))
        assert losses[0] == pytest.approx(trial.objective, rel=1e-5)
        assert losses[0] == min(losses)

    y = torch.cat([y for _, y in batches])
    residuals = y - la.predictive_moments(X).f_mu
    variance = residuals.square().mean().item()
    # The mean negative log-density of normals at the variance of their own residuals.
    expected = n_outputs * (math.log(2 * math.pi * variance) + 1) / 2
    assert last.objective == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("structure", "scale"), [("lowrank_kron", 1e-3), ("diag", 1e3)]
)
def test_targets_of_any_scale_have_their_noise(structure, scale):
    la, X = plain_regression(1, structure)
    for block in la.blocks:
        block.weight.data.mul_(0.1)  # slopes below 1
    la.fit([(X, X[:, :1])])
    history = GridSearch(val_loader=numbers(la, X, scale))(la)
    variances = la(X)[1].flatten() + la.sigma_noise**2
    # Chance moves the standard deviation of twelve draws by 1 / sqrt(24), or 20%.
    assert 0.5 < variances.sqrt().mean().item() / scale < 1.6
    # The noise alone leaves no variance, whatever the unit.
    for point, has_variance in ((-2, True), (-1, False)):
        la.hyperparameters = replace(history, choice=point).chosen
        assert ("without variance" not in repr(la)) == has_variance
    # Then the last is no fault.
    worst_first = sorted(history.trials, key=lambda trial: -trial.objective)
    warnings.simplefilter("error")
    warn_at_ends(replace(history, trials=worst_first))


# --- one pass over the data -----------------------------------------------------------


def test_a_search_keeps_no_statistics_of_examples_that_it_has_scored(la, monkeypatch):
    batches = ragged_batches(seed=7, batch_size=2)
    expected = GridSearch(val_loader=batches * 6, **PRIORS_ALONE)(la).objective
    monkeypatch.setattr(gridsearch, "_ROWS", 4)
    of_batches: list[weakref.ref] = []
    n_alive: list[int] = []
    make = gridsearch.statistics_of_batch

    def watched(*args: Any, **kwargs: Any) -> Any:
        statistics = make(*args, **kwargs)
        of_batches.append(weakref.ref(statistics.f_mu))
        n_alive.append(sum(each() is not None for each in of_batches))
        return statistics

    monkeypatch.setattr(gridsearch, "statistics_of_batch", watched)
    for data in (batches * 6, la.predictive_statistics(batches * 6)):
        found = GridSearch(val_loader=data, **PRIORS_ALONE)(la).objective
        assert_close(found, expected, rtol=1e-6, atol=0)
    assert len(n_alive) == 6 * len(batches)
    # What waits to be scored, and the batch that comes.
    assert max(n_alive) <= 3


# --- texts that are written -----------------------------------------------------------


# Few, for each of them costs a pass at each point.
N_SAMPLES = 2
GRID_OF_TEXTS = {"log_prior_prec_min": -1, "log_prior_prec_max": 3, "grid_size": 5}


def validation_texts() -> list[Batch]:
    return text_batches(lengths=(6, 5, 7, 4), seed=7)


def test_losses_of_texts_are_those_of_scores_and_the_least_is_chosen():
    la = fitted_text()
    base = torch.linspace(0.5, 2, len(la.blocks))
    passes = count_forward_passes(la)
    history = la.optimize_prior_precision(
        method="gridsearch",
        val_loader=iter(validation_texts()),  # which are read once
        init_prior_prec=base,
        generator=generator(3),
        n_samples=N_SAMPLES,
        **GRID_OF_TEXTS,
    )
    # Each point is a pass of the model and of each draw.
    assert len(passes) == 5 * (N_SAMPLES + 1) * len(validation_texts())
    tried = history.prior_precision
    expected = torch.outer(torch.logspace(-1, 3, 5), base)
    assert_close(tried.float(), expected, rtol=1e-6, atol=0)
    best = tried[history.objective.argmin()]
    assert_close(la.prior_precision, best.to(la.prior_precision))
    # The search draws a seed once: all its batches and points have the same draws.
    seed = draw_seed(generator(3))
    for point, objective in zip(tried, history.objective, strict=True):
        la.prior_precision = point
        scores = [
            la.score(batch, N_SAMPLES, generator(seed)) for batch in validation_texts()
        ]
        log_probs = [each.tokens.log_prob[each.labelled] for each in scores]
        assert_close(objective, -torch.cat(log_probs).mean(), rtol=1e-10, atol=0)
    # The evidence can choose too.
    la.optimize_prior_precision(n_steps=50)

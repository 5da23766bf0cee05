"""The experiment that chooses the penalty on the scale of the logits."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, nll_loss

from benchmarks.experiments.penalty import (
    PRESENT,
    PRIORS,
    SCALES,
    Draws,
    losses_of,
    penalties_of,
)
from tests.benchmarks.support import run, values_of
from tests.support.models import ragged_batches
from tests.support.posteriors import fitted

# --- rules ----------------------------------------------------------------------------

LENIENT = "1 (log s)² below 1, 0 above"
STRICT = "1 (log s)² below 1, 4 above"
PRIOR_ALONE = "prior alone"
TEMPERATURE_ALONE = "temperature alone"
TRAINED_MODEL = "trained model"
RULES = [
    LENIENT,
    STRICT,
    PRIOR_ALONE,
    TEMPERATURE_ALONE,
    TRAINED_MODEL,
]

# Pairs of a prior precision and a scale, by their places.
SCALED_DOWN = (1, 0)
SCALED_UP = (1, len(SCALES) - 1)
NOT_SCALED = (1, PRESENT)
# Without variance.
LAST = len(PRIORS) - 1
NO_VARIANCE = (LAST, PRESENT)
TEMPERED = (LAST, 5)
# What is chosen where all pairs that a rule may choose are as good.
FIRST_UNSCALED = (0, PRESENT)
FIRST_TEMPERED = (LAST, 0)


def losses_with(lowest, depth):
    """Make summed losses `(priors, scales)` that are lower at one place."""
    losses = np.ones((len(PRIORS), len(SCALES)))
    losses[lowest] -= depth
    return losses


@pytest.mark.parametrize(
    ("rule", "lowest", "depth", "chosen"),
    [
        # At the last scale, 20, a penalty of 4 asks for 4 (log 20)², about 36 nats.
        (LENIENT, SCALED_UP, 35, SCALED_UP),
        (STRICT, SCALED_UP, 37, SCALED_UP),
        (STRICT, SCALED_UP, 35, FIRST_UNSCALED),
        # At the first, 0.04, one of 1 asks for (log 0.04)², about 10.4 nats.
        (STRICT, SCALED_DOWN, 11, SCALED_DOWN),
        (STRICT, SCALED_DOWN, 10, FIRST_UNSCALED),
        (PRIOR_ALONE, NOT_SCALED, 1, NOT_SCALED),
        (PRIOR_ALONE, SCALED_DOWN, 100, FIRST_UNSCALED),
        (TEMPERATURE_ALONE, TEMPERED, 1, TEMPERED),
        (TEMPERATURE_ALONE, SCALED_DOWN, 100, FIRST_TEMPERED),
        (TRAINED_MODEL, SCALED_DOWN, 100, NO_VARIANCE),
    ],
)
def test_a_rule_chooses_the_lowest_of_the_pairs_that_it_may(
    rule,
    lowest,
    depth,
    chosen,
):
    penalties = penalties_of(below=[1.0], above=[0.0, 4.0])
    assert list(penalties) == RULES
    losses = losses_with(lowest, depth)
    objective = losses + penalties[rule]
    best = objective.argmin()
    place = np.unravel_index(best, objective.shape)
    assert place == chosen


# --- draws ----------------------------------------------------------------------------


@pytest.fixture
def judged():
    """Forty draws of one of five texts that chooses between two pairs."""
    # The first text alone likes the first pair, and all others the second.
    losses = np.ones((5, 1, 2))
    losses[0] = [[0.0, 9.0]]
    losses[1:] = [[5.0, 1.0]]
    draws = Draws(
        losses,
        n_held=1,
        n_draws=40,
        seed=0,
    )
    no_penalty = np.zeros((1, 2))
    return draws.judged(no_penalty)


def test_the_texts_that_judge_are_not_those_that_choose(judged):
    chosen_by_first = judged.nll == 5
    assert 0 < chosen_by_first.mean() < 1
    # It likes the first pair and chose it: the others lose 4 by it.
    regret = judged.regret[chosen_by_first]
    assert np.all(regret == 4)


def test_the_text_that_was_not_drawn_judges(judged):
    chosen_by_another = judged.nll != 5
    # It chose the second pair; three of its like and the first judge.
    nll = judged.nll[chosen_by_another]
    regret = judged.regret[chosen_by_another]
    assert np.all(nll == (9 + 3 * 1) / 4)
    assert np.all(regret == 0)


# --- losses ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batches():
    return ragged_batches()


@pytest.fixture(scope="module")
def labels(batches):
    return torch.cat([batch["labels"] for batch in batches])


@pytest.fixture
def la():
    return fitted()


@pytest.fixture
def losses(la, batches, labels):
    statistics = la.predictive_statistics(batches)
    return losses_of(statistics, labels)


def test_losses_are_those_of_predictions_at_the_prior_and_the_scale(
    la,
    batches,
    labels,
    losses,
):
    la.prior_precision = 1e-4  # the first of the grid
    la.logit_scale = float(SCALES[3])
    p = torch.cat([la(batch, link_approx="mean_field") for batch in batches])
    expected = nll_loss(p.log(), labels, reduction="none")
    found = losses[:, 0, 3]
    # Predictions are in float32, in which the model is.
    assert found == pytest.approx(expected.numpy(), rel=1e-4)


def test_without_variance_the_scale_1_leaves_the_models_own_loss(
    la,
    batches,
    labels,
    losses,
):
    assert SCALES[PRESENT] == 1
    logits = [la.predictive_moments(batch).f_mu for batch in batches]
    of_model = cross_entropy(torch.cat(logits), labels, reduction="none")
    found = losses[:, LAST, PRESENT]
    assert found == pytest.approx(of_model.numpy(), rel=1e-4)


# --- the experiment -------------------------------------------------------------------


def test_every_rule_has_a_row_for_each_task(intents, tmp_path):
    finished = run(
        tmp_path / "results",
        "penalty --quiet",
        tasks=("travel",),
        data=intents(n_intents=3, n_texts=12),
        train_examples=15,
        test_examples=24,
        steps=3,
        draws=4,
        below=(1.0,),
        above=(0.0, 4.0),
    )
    assert values_of(finished.rows, "rule") == RULES
    # A fifth of fifteen texts.
    assert values_of(finished.rows, "held_out") == [3] * len(RULES)

"""The experiment that chooses the penalty on the scale of the logits."""

import numpy as np
import pytest
import torch

from benchmarks.experiments.penalty import (
    PRESENT,
    PRIORS,
    SCALES,
    Draws,
    losses_of,
    penalties_of,
)
from tests.benchmarks.support import run
from tests.support.models import ragged_batches
from tests.support.posteriors import fitted

LAST = len(PRIORS) - 1  # of the priors: without variance
RULES = [
    "1 (log s)² below 1, 0 above",
    "1 (log s)² below 1, 4 above",
    "prior alone",
    "temperature alone",
    "trained model",
]


def losses_with(lowest, depth):
    """Make summed losses `(priors, scales)` that are lower at one place."""
    losses = np.ones((len(PRIORS), len(SCALES)))
    losses[lowest] -= depth
    return losses


@pytest.mark.parametrize(
    ("rule", "lowest", "depth", "chosen"),
    [
        # At the last scale, 20, a penalty of 4 asks for 4 (log 20)², about 36 nats.
        (RULES[0], (1, -1), 35, (1, len(SCALES) - 1)),
        (RULES[1], (1, -1), 37, (1, len(SCALES) - 1)),
        (RULES[1], (1, -1), 35, (0, PRESENT)),
        # At the first, 0.2, one of 1 asks for (log 0.2)², about 2.6 nats.
        (RULES[1], (1, 0), 3, (1, 0)),
        (RULES[1], (1, 0), 2, (0, PRESENT)),
        (RULES[2], (1, PRESENT), 1, (1, PRESENT)),
        (RULES[2], (1, 0), 100, (0, PRESENT)),
        (RULES[3], (-1, 5), 1, (LAST, 5)),
        (RULES[3], (1, 5), 100, (LAST, 0)),
        (RULES[4], (1, 5), 100, (LAST, PRESENT)),
    ],
)
def test_a_rule_chooses_the_lowest_of_the_pairs_that_it_may(
    rule, lowest, depth, chosen
):
    penalties = penalties_of(below=[1.0], above=[0.0, 4.0])
    assert list(penalties) == RULES
    objective = losses_with(lowest, depth) + penalties[rule]
    place = np.unravel_index(objective.argmin(), objective.shape)
    assert place == chosen


def test_the_texts_that_judge_are_not_those_that_choose():
    # The first text alone likes the first pair, and all others the second.
    losses = np.ones((5, 1, 2))
    losses[0] = [[0.0, 9.0]]
    losses[1:] = [[5.0, 1.0]]
    draws = Draws(losses, n_held=1, n_draws=40, seed=0)
    judged = draws.judged(penalty=np.zeros((1, 2)))
    # One that likes the first pair chose it: the others lose 4 by it.
    chosen_by_first = judged.nll == 5
    assert 0 < chosen_by_first.mean() < 1
    assert np.all(judged.regret[chosen_by_first] == 4)
    # One of the others chose the second; three of these and the first judge.
    assert np.all(judged.nll[~chosen_by_first] == (9 + 3 * 1) / 4)
    assert np.all(judged.regret[~chosen_by_first] == 0)


def test_losses_are_those_of_predictions_at_the_prior_and_the_scale():
    la = fitted()
    batches = ragged_batches()
    labels = torch.cat([batch["labels"] for batch in batches])
    losses = losses_of(la.predictive_statistics(batches), labels)
    la.prior_precision = 1e-4  # the first of the grid
    la.logit_scale = float(SCALES[3])
    p = torch.cat([la(batch, link_approx="mean_field") for batch in batches])
    expected = -p.log()[torch.arange(len(labels)), labels]
    # Predictions are in float32, in which the model is.
    assert losses[:, 0, 3] == pytest.approx(expected.numpy(), rel=1e-4)
    # Without variance the scale 1 leaves the model's own loss.
    assert SCALES[PRESENT] == 1
    logits = la.predictive_moments(batches[0]).f_mu
    of_model = torch.nn.functional.cross_entropy(
        logits, batches[0]["labels"], reduction="none"
    )
    of_first = losses[: len(logits), -1, PRESENT]
    assert of_first == pytest.approx(of_model.numpy(), rel=1e-4)


def test_every_rule_has_a_row_for_each_task(intents, capsys, tmp_path):
    finished = run(
        capsys,
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
    rows = finished.figures["rows"]
    assert [row["rule"] for row in rows] == RULES
    assert {row["held_out"] for row in rows} == {3}

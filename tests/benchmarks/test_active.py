"""The experiment that chooses texts to be labelled, at its smallest."""

from itertools import product

import pytest
import torch

from benchmarks.experiments.active import PLAIN, RULES
from benchmarks.frozen import k_centres
from benchmarks.report import paired_differences
from tests.benchmarks.support import rows_by, rows_with, run, values_of


@pytest.fixture
def data(intents):
    """Write six intents, twelve texts of each."""
    return intents(n_intents=6, n_texts=12)


SEEDS = (0, 1)
# Two of each intent, and a batch of three in each of two rounds.
LABELS = (8, 11, 14)


def test_every_rule_begins_alike_and_labels_a_batch_a_round(data):
    finished = run(
        data / "results",
        "active --quiet",
        data=data,
        intents=4,
        train_examples=72,
        test_examples=12,
        rounds=2,
        batch=3,
        steps=4,
        share=0.5,
        seeds=SEEDS,
        cache=data / "cache",
    )
    rows = rows_by(finished.rows, "seed", "name", "labels")
    in_order = product(SEEDS, RULES, LABELS)
    assert list(rows) == list(in_order)
    for seed in SEEDS:
        # All rules begin with the same texts.
        first = rows_with(finished.rows, seed=seed, labels=8)
        accuracies = set(values_of(first, "accuracy"))
        losses = set(values_of(first, "nll"))
        assert len(accuracies) == 1
        assert len(losses) == 1
    # What is chosen makes a difference.
    last = rows_with(finished.rows, labels=14)
    losses = set(values_of(last, "nll"))
    assert len(losses) > len(RULES)
    task = finished.figures["task"]
    assert task["classes"] == ["a", "b", "c", "d"]
    for name in RULES:
        assert name in finished.printed


def test_more_labels_than_texts_are_refused(data):
    with pytest.raises(SystemExit, match="48 texts to choose from, and 208"):
        run(
            data / "refused",
            "active --quiet",
            data=data,
            intents=4,
            train_examples=72,
            rounds=20,
            batch=10,
        )


def test_differences_are_of_the_same_seed():
    table = [
        (PLAIN, 0, 1.0),
        (PLAIN, 0, 2.0),
        (PLAIN, 1, 5.0),
        ("other", 1, 5.5),
        ("other", 0, 1.4),
        ("none", 0, None),
        ("none", 1, None),
    ]
    rows = []
    for name, seed, nll in table:
        row = {
            "name": name,
            "seed": seed,
            "nll": nll,
        }
        rows.append(row)
    other, none = paired_differences(rows, PLAIN, ("nll",))
    # -0.1 and 0.5: their deviation is 0.6 / √2, their mean's error 0.3.
    assert other == {"name": "other", "nll": "+0.200 ± 0.300"}
    assert none == {"name": "none", "nll": "-"}


def test_centres_are_far_from_all_that_is_known_and_from_each_other():
    known = torch.zeros(1, 1)
    on_a_line = torch.tensor([1.0, 10.0, 9.9, -4.0, 0.0])
    candidates = on_a_line[:, None]
    three = k_centres(candidates, known, 3)
    # The second is the farthest; beside it the third is near.
    assert three == [1, 3, 0]
    # What is known already is chosen as well, where nothing else is left.
    all_of_them = k_centres(candidates, known, 5)
    assert sorted(all_of_them) == list(range(5))

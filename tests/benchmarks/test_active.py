"""The experiment that chooses texts to be labelled, at its smallest."""

from itertools import product

import pytest
import torch

from benchmarks.experiments.active import PLAIN, RULES
from benchmarks.frozen import k_centres
from benchmarks.report import paired_differences
from tests.benchmarks.support import rows_with, run


@pytest.fixture
def data(intents):
    """Write six intents, twelve texts of each."""
    return intents(n_intents=6, n_texts=12)


def measure(capsys, data, name, **options):
    """Run the experiment on four of the intents."""
    return run(
        capsys,
        data / name,
        "active --quiet",
        data=data,
        intents=4,
        train_examples=72,
        test_examples=12,
        rounds=2,
        batch=3,
        steps=4,
        share=0.5,
        cache=data / "cache",
        **options,
    )


def test_every_rule_begins_alike_and_labels_a_batch_a_round(capsys, data):
    finished = measure(capsys, data, "results", seeds=(0, 1))
    rows = finished.figures["rows"]
    found = [(row["seed"], row["name"], row["labels"]) for row in rows]
    assert found == list(product((0, 1), RULES, (8, 11, 14)))
    for seed in (0, 1):
        first = rows_with(rows, seed=seed, labels=8)
        assert len({row["accuracy"] for row in first}) == 1
        assert len({row["nll"] for row in first}) == 1
    # What is chosen makes a difference.
    last = rows_with(rows, labels=14)
    assert len({row["nll"] for row in last}) > len(RULES)
    assert finished.figures["task"]["classes"] == ["a", "b", "c", "d"]
    for name in RULES:
        assert name in finished.printed


def test_more_labels_than_texts_are_refused(capsys, data):
    with pytest.raises(SystemExit, match="48 texts to choose from, and 208"):
        run(
            capsys,
            data / "refused",
            "active --quiet",
            data=data,
            intents=4,
            train_examples=72,
            rounds=20,
            batch=10,
        )


def test_differences_are_of_the_same_seed():
    rows = [
        {"name": PLAIN, "seed": 0, "nll": 1.0},
        {"name": PLAIN, "seed": 0, "nll": 2.0},
        {"name": PLAIN, "seed": 1, "nll": 5.0},
        {"name": "other", "seed": 1, "nll": 5.5},
        {"name": "other", "seed": 0, "nll": 1.4},
        {"name": "none", "seed": 0, "nll": None},
        {"name": "none", "seed": 1, "nll": None},
    ]
    other, none = paired_differences(rows, PLAIN, ("nll",))
    # -0.1 and 0.5: their deviation is 0.6 / √2, their mean's error 0.3.
    assert other == {"name": "other", "nll": "+0.200 ± 0.300"}
    assert none == {"name": "none", "nll": "-"}


def test_centres_are_far_from_all_that_is_known_and_from_each_other():
    known = torch.tensor([[0.0]])
    candidates = torch.tensor([[1.0], [10.0], [9.9], [-4.0], [0.0]])
    # The second is the farthest; beside it the third is near.
    assert k_centres(candidates, known, 3) == [1, 3, 0]
    assert sorted(k_centres(candidates, known, 5)) == [0, 1, 2, 3, 4]

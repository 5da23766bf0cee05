"""Domains learnt one after the other, at the smallest."""

from operator import itemgetter
from typing import Any

import pytest
import torch

from benchmarks.domains import read_domains
from benchmarks.experiments import remember
from tests.benchmarks.support import (
    parsed,
    rows_with,
    run,
    values_of,
    write_intents,
)

DOMAINS = {"one": "abc", "two": "def", "three": "ghi"}


@pytest.fixture
def data(tmp_path, encoder, monkeypatch):
    """A folder of made-up intents of three domains; a tiny encoder reads them."""
    monkeypatch.setattr("benchmarks.domains.encoder_folder", lambda: encoder)
    folder = tmp_path / "data"
    write_intents(DOMAINS, 8, folder)
    return folder


@pytest.fixture
def options(data):
    return parsed(
        "remember",
        data=data,
        train_examples=18,
        test_examples=6,
    )


# --- reading --------------------------------------------------------------------------


@pytest.fixture
def domains(options):
    """Two of the three domains, the other way round."""
    return read_domains("two+one", options, 0)


def test_labels_count_on_from_one_domain_to_the_next(domains):
    assert domains.names == ["two", "one"]
    of_two, of_one = domains.train
    assert len(of_two) == 18
    assert len(of_one) == 18
    labels_of_two = values_of(of_two, "labels")
    labels_of_one = values_of(of_one, "labels")
    assert set(labels_of_two) == {0, 1, 2}
    assert set(labels_of_one) == {3, 4, 5}


def test_labels_are_the_places_of_intents(domains):
    classes = list(domains.pretrained.task.classes)
    assert classes == ["d", "e", "f", "a", "b", "c"]
    for task in domains.tasks:
        for example in (*task.train, *task.test):
            _, intent, _ = example.text.split()
            assert classes[example.label] == intent


def test_classes_of_other_domains_are_outside(domains):
    of_domain = torch.ones(3, 3).bool()
    inside = torch.block_diag(of_domain, of_domain)
    assert torch.equal(domains.outside == 0, inside)


def test_an_unknown_domain_is_refused(options):
    with pytest.raises(SystemExit, match="no domain 'four'"):
        read_domains("four", options, 0)


def test_replay_keeps_five_texts_of_each_intent(data):
    options = parsed(
        "remember",
        data=data,
        train_examples=24,
        test_examples=6,
    )
    domains = read_domains("one+two", options, 0)
    no_model: Any = None
    replay = remember.Replay(domains, no_model)
    of_first, _ = domains.train
    replay.keep(of_first)
    labels = values_of(replay.replayed(), "labels")
    five_of_each = [0, 1, 2] * 5
    # Of eight texts of each intent.
    assert sorted(labels) == sorted(five_of_each)


# --- the experiment -------------------------------------------------------------------

SEEDS = (0, 1)
NAMES = [method.name for method in remember.METHODS]


@pytest.fixture
def finished(data, tmp_path):
    """A run on all domains; the weights are chosen on another order of them."""
    return run(
        tmp_path / "results",
        "remember --quiet",
        task="one+two+three",
        chosen_on="three+two+one",
        data=data,
        train_examples=18,
        test_examples=6,
        steps=4,
        learning_rate=0.05,
        seeds=SEEDS,
        cache=tmp_path / "cache",
    )


def test_every_method_learns_the_domains_in_turn(finished):
    names = values_of(finished.rows, "name")
    in_order = dict.fromkeys(names)
    assert list(in_order) == NAMES
    n_domains = len(DOMAINS)
    # After each of them, all are measured.
    n_measured = n_domains * n_domains
    assert len(names) == len(SEEDS) * len(NAMES) * n_measured
    for seed in SEEDS:
        # All have learnt the first domain alike, and differ afterwards.
        first = rows_with(
            finished.rows,
            seed=seed,
            learnt=1,
        )
        last = rows_with(
            finished.rows,
            seed=seed,
            learnt=3,
            domain="one",
        )
        losses_of_first = values_of(first, "nll")
        losses_of_last = values_of(last, "nll")
        assert len(set(losses_of_first)) == n_domains
        assert len(set(losses_of_last)) == len(NAMES)
    assert "±" in finished.printed


def test_the_best_weight_of_another_order_is_used(finished):
    for method in remember.METHODS:
        if method.weights:
            tried = rows_with(finished.figures["tried"], name=method.name)
            assert values_of(tried, "weight") == list(method.weights)
            best = min(tried, key=itemgetter("nll"))
            used = rows_with(finished.rows, name=method.name)
            weights = values_of(used, "weight")
            assert set(weights) == {best["weight"]}

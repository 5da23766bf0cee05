"""Domains learnt one after the other, at the smallest."""

import pytest
import torch

from benchmarks.domains import read_domains
from benchmarks.experiments import remember
from tests.benchmarks.support import parsed, rows_with, run, write_intents

DOMAINS = {"one": "abc", "two": "def", "three": "ghi"}


@pytest.fixture
def data(tmp_path, encoder, monkeypatch):
    """A folder of made-up intents of three domains; a tiny encoder reads them."""
    monkeypatch.setattr("benchmarks.domains.encoder_folder", lambda: encoder)
    write_intents(DOMAINS, 8, tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def options(data):
    return parsed("remember", data=data, train_examples=18, test_examples=6)


def test_labels_count_on_from_one_domain_to_the_next(options):
    domains = read_domains("two+one", options, 0)
    classes = list(domains.pretrained.task.classes)
    assert classes == list("defabc")
    assert domains.names == ["two", "one"]
    of_two, of_one = domains.train
    assert len(of_two) == 18
    assert len(of_one) == 18
    assert {record["labels"] for record in of_two} == {0, 1, 2}
    assert {record["labels"] for record in of_one} == {3, 4, 5}
    for task in domains.tasks:
        for example in [*task.train, *task.test]:
            _, intent, _ = str(example.text).split()
            assert classes[int(example.label or 0)] == intent
    # Three classes of each domain are inside of it.
    own = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3))
    assert torch.equal(domains.outside == 0, own.bool())


def test_an_unknown_domain_is_refused(options):
    with pytest.raises(SystemExit, match="no domain 'four'"):
        read_domains("four", options, 0)


def test_every_method_learns_the_domains_in_turn(data, tmp_path, capsys):
    finished = run(
        capsys,
        tmp_path / "results",
        "remember --quiet",
        task="one+two+three",
        chosen_on="three+two+one",
        data=data,
        train_examples=18,
        test_examples=6,
        steps=4,
        learning_rate=0.05,
        seeds=(0, 1),
        cache=tmp_path / "cache",
    )
    rows = finished.figures["rows"]
    names = [method.name for method in remember.METHODS]
    in_order = dict.fromkeys(row["name"] for row in rows)
    assert list(in_order) == names
    n_stages = n_domains = 3
    assert len(rows) == 2 * len(names) * n_stages * n_domains
    for seed in (0, 1):
        # All have learnt the first domain alike, and differ afterwards.
        first = rows_with(rows, seed=seed, learnt=1)
        assert len({row["nll"] for row in first}) == n_domains
        last = rows_with(rows, seed=seed, learnt=3, domain="one")
        assert len({row["nll"] for row in last}) == len(names)
    assert "±" in finished.printed

    for method in remember.METHODS:
        if method.weights:
            tried = rows_with(finished.figures["tried"], name=method.name)
            weights = [row["weight"] for row in tried]
            losses = [row["nll"] for row in tried]
            best = weights[losses.index(min(losses))]
            assert weights == list(method.weights)
            used = rows_with(rows, name=method.name)
            assert {row["weight"] for row in used} == {best}


def test_replay_keeps_five_texts_of_each_intent(data):
    options = parsed("remember", data=data, train_examples=24, test_examples=6)
    domains = read_domains("one+two", options, 0)
    replay = remember.Replay(domains, None)  # pyright: ignore[reportArgumentType]
    replay.keep(domains.train[0])
    labels = [record["labels"] for record in replay.replayed()]
    assert sorted(labels) == [0] * 5 + [1] * 5 + [2] * 5

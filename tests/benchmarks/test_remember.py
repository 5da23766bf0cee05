"""Domains learnt one after the other, at the smallest."""

import json

import pytest

from benchmarks.domains import read_domains
from benchmarks.experiments import remember
from tests.benchmarks.support import parsed, run

DOMAINS = {"one": "abc", "two": "def", "three": "ghi"}


@pytest.fixture
def data(tmp_path, encoder, monkeypatch):
    """A folder of made-up intents of three domains; a tiny encoder reads them."""
    monkeypatch.setattr("benchmarks.domains.encoder_folder", lambda: encoder)
    folder = tmp_path / "data" / "clinc" / "clinc_oos" / "plus"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        lines = [
            json.dumps(
                {"text": f"{split} {intent} {n}", "intent": intent, "domain": domain}
            )
            for domain, intents in DOMAINS.items()
            for intent in intents
            for n in range(8)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path / "data"


@pytest.fixture
def sizes(data, tmp_path):
    """Options of a run of seconds."""
    return {
        "data": data,
        "train_examples": 18,
        "test_examples": 6,
        "steps": 4,
        "learning_rate": 0.05,
        "seeds": (0, 1),
        "cache": tmp_path / "cache",
    }


def test_labels_count_on_from_one_domain_to_the_next(data):
    options = parsed("remember", data=data, train_examples=18, test_examples=6)
    domains = read_domains("two+one", options, 0)
    assert list(domains.pretrained.task.classes) == list("defabc")
    assert domains.names == ["two", "one"]
    labels = [[record["labels"] for record in records] for records in domains.train]
    assert [sorted(set(of_domain)) for of_domain in labels] == [[0, 1, 2], [3, 4, 5]]
    assert [len(records) for records in domains.train] == [18, 18]
    for task in domains.tasks:
        for example in [*task.train, *task.test]:
            _, intent, _ = str(example.text).split()
            assert domains.pretrained.task.classes[int(example.label or 0)] == intent
    own = domains.outside == 0
    assert own.tolist() == [[(i < 3) == (j < 3) for j in range(6)] for i in range(6)]
    with pytest.raises(SystemExit, match="no domain 'four'"):
        read_domains("four", options, 0)


def test_every_method_learns_the_domains_in_turn(data, sizes, tmp_path, capsys):
    finished = run(
        capsys,
        tmp_path / "results",
        "remember --quiet",
        task="one+two+three",
        chosen_on="three+two+one",
        **sizes,
    )
    rows = finished.figures["rows"]
    names = [method.name for method in remember.METHODS]
    assert list(dict.fromkeys(row["name"] for row in rows)) == names
    assert len(rows) == 2 * len(names) * 3 * 3
    for seed in (0, 1):
        first = [row for row in rows if row["learnt"] == 1 and row["seed"] == seed]
        # All have learnt the first domain alike, and differ afterwards.
        assert len({row["nll"] for row in first}) == 3
        last = [
            row["nll"]
            for row in rows
            if (row["learnt"], row["domain"], row["seed"]) == (3, "one", seed)
        ]
        assert len(set(last)) == len(names)
    tried = finished.figures["tried"]
    for method in remember.METHODS:
        if method.weights:
            own = [row for row in tried if row["name"] == method.name]
            best = min(own, key=lambda row: row["nll"])["weight"]
            assert tuple(row["weight"] for row in own) == method.weights
            assert {row["weight"] for row in rows if row["name"] == method.name} == {
                best
            }
    assert "±" in finished.printed


def test_replay_keeps_five_texts_of_each_intent(data):
    options = parsed("remember", data=data, train_examples=24, test_examples=6)
    domains = read_domains("one+two", options, 0)
    replay = remember.Replay(domains, None)  # pyright: ignore[reportArgumentType]
    replay.keep(domains.train[0])
    labels = [record["labels"] for record in replay.replayed()]
    assert sorted(labels) == [0] * 5 + [1] * 5 + [2] * 5

"""The task of requests that are joined to texts of several labels."""

from itertools import compress

import pytest

from benchmarks.tasks import LABELLED_TASKS
from tests.benchmarks.support import parsed, write_intents

DOMAINS = {
    "banking": ("pay", "save"),
    "travel": ("fly",),
    "work": ("pto",),
}
DOMAIN_OF = {
    "pay": "banking",
    "save": "banking",
    "fly": "travel",
    "pto": "work",
}
# Each intent has as many texts of each split: enough for six texts of three requests.
N_TEXTS = 5


@pytest.fixture
def read(tmp_path):
    """Read the task, with made-up requests of three domains."""
    write_intents(DOMAINS, N_TEXTS, tmp_path)

    def read_with(seed=0, train_examples=6):
        options = parsed(
            "labels --quiet",
            task="requests",
            data=tmp_path,
            train_examples=train_examples,
            test_examples=4,
            shifted_examples=2,
        )
        return LABELLED_TASKS["requests"].read(options, seed)

    return read_with


def requests_of(example):
    """Take a text apart."""
    return example.text.split(" and ")


def test_a_text_has_a_label_for_each_domain_that_it_asks_about(read):
    task = read()
    assert task.classes == ["banking", "travel", "work"]
    assert task.has_several_labels
    for example in (*task.train, *task.test):
        asked = set()
        for request in requests_of(example):
            # A made-up request is its split, its intent and a number.
            _, intent, _ = request.split()
            asked.add(DOMAIN_OF[intent])
        labelled = compress(task.classes, example.labels)
        assert set(labelled) == asked


def test_no_request_is_in_two_texts(read):
    task = read()
    requests = []
    for example in (*task.train, *task.test):
        requests += requests_of(example)
    assert len(set(requests)) == len(requests)


def test_texts_with_typos_have_the_labels_of_those_without(read):
    task = read()
    typos = task.shifted["typos"]
    # As many as are asked for.
    assert len(typos) == 2
    for typed, right in zip(typos, task.test, strict=False):
        assert typed.labels == right.labels


def test_the_seed_decides_what_is_drawn(read):
    task = read(seed=1)
    again = read(seed=1)
    other = read(seed=2)
    assert again == task
    assert other.train != task.train


def test_more_texts_than_there_are_requests_for_are_refused(read):
    with pytest.raises(ValueError, match="there are 20; ask for fewer"):
        read(train_examples=100)


def test_without_data_the_task_says_what_it_reads():
    options = parsed("labels --quiet", task="requests")
    with pytest.raises(SystemExit, match="requests reads JSON lines"):
        LABELLED_TASKS["requests"].read(options, 0)

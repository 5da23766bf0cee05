"""The tasks and the experiment of several labels, at their smallest."""

import ast
from itertools import compress
from operator import attrgetter

import pytest
import torch

from benchmarks.experiments.labels import exact_matches
from benchmarks.fine_tuning import prepare
from benchmarks.tasks import LABELLED_TASKS
from benchmarks.tasks.functions import SIGNS, functions
from benchmarks.tasks.signatures import CLASSES, signatures
from benchmarks.tasks.task import UNLABELLED
from tests.benchmarks.support import parsed, run

SOURCE = '''
def rollAxis(a, axis, mode, out):
    """Roll the given axis of an array.

    Parameters
    ----------
    a : array_like
        What to roll.
    axis : int, optional
        Which one.
    mode : {"wrap", "clip"}
        How.
    out : bool
        Whether.

    Returns
    -------
    rolled : ndarray
    """
'''
METHODS = [
    "Trained model",
    "Temperature of the held-out texts",
    "lowrank_kron",
    "The same, learnt variance",
    "The same with the head",
]
FEW = {
    "files_per_library": 12,
    "train_examples": 10,
    "test_examples": 6,
    "shifted_examples": 4,
}


def test_parameters_are_labelled_with_the_types_that_their_docstring_has():
    (example,) = signatures(ast.parse(SOURCE))
    assert example.text == (
        "a , axis , mode , out , : Roll the given axis of an array."
    ).replace(", :", ", roll axis :")
    assert example.labelled_words == ("a", "axis", "out")
    assert example.word_labels is not None
    names = [CLASSES[label] for label in example.word_labels if label != UNLABELLED]
    assert names == ["array", "whole number", "truth value"]


def test_a_function_has_a_label_for_each_thing_that_its_code_does():
    def labels_of(code):
        source = f"""
def mean_of(rows):
    \"\"\"Compute the mean of all rows there are.\"\"\"
    {code}
"""
        return [
            (example.text, tuple(compress(SIGNS, example.labels)))
            for example in functions(ast.parse(source))
        ]

    text = "mean of : Compute the mean of all rows there are."
    assert labels_of("") == []  # no code
    assert labels_of("return rows") == [(text, ())]
    assert labels_of("return [row[0] for row in rows]") == [
        (text, ("loops", "indexes"))
    ]
    (found,) = labels_of("if not rows: raise ValueError('a' + 'b')")
    assert found == (text, ("branches", "raises", "calculates"))


@pytest.mark.parametrize(
    ("name", "alike"),
    [
        ("signatures", attrgetter("labelled_words")),
        ("functions", attrgetter("text")),
    ],
)
def test_sets_share_no_text_and_are_reproducible(name, alike):
    def read(seed):
        options = parsed("labels --quiet", task=name, **FEW)
        return LABELLED_TASKS[name].read(options, seed)

    task = read(1)
    assert task == read(1)
    assert task.train != read(2).train
    everything = [*task.train, *task.test, *task.shifted["sklearn"]]
    assert len(task.train) == 10
    assert len({alike(example) for example in everything}) == len(everything)


@pytest.fixture
def of_drawn_texts(encoder, monkeypatch):
    """Have a tiny encoder read drawn texts."""
    monkeypatch.setattr("benchmarks.tasks.drawn.encoder_folder", lambda: encoder)


@pytest.mark.usefixtures("of_drawn_texts")
def test_the_first_token_of_a_word_has_its_label():
    pretrained = prepare(
        parsed("labels --quiet", task="signatures", **FEW), 0, LABELLED_TASKS
    )
    for example, record in zip(
        pretrained.task.train, pretrained.data["train"], strict=True
    ):
        # Parameters come first, and none is cut off.
        words = example.text.split()[: 2 * example.text.split(" : ")[0].count(",")]
        found = [
            token
            for token, label in zip(record["input_ids"], record["labels"], strict=True)
            if label != UNLABELLED
        ]
        expected = [
            pretrained.tokenizer([word], is_split_into_words=True)["input_ids"][0]
            for word in example.labelled_words
        ]
        assert set(example.labelled_words) <= set(words)
        assert found == expected


def test_a_text_is_right_where_all_of_its_labels_are():
    records = [{"labels": [0, -100, 1]}, {"labels": [1]}, {"labels": [0, 1]}]
    right = torch.eye(2)[[0, 1, 1, 0, 1]]
    assert exact_matches(right, records) == 1
    one_wrong = torch.eye(2)[[0, 0, 1, 0, 1]]
    assert exact_matches(one_wrong, records) == pytest.approx(2 / 3)


@pytest.mark.usefixtures("of_drawn_texts")
@pytest.mark.parametrize("task", LABELLED_TASKS)
def test_every_method_is_measured_for_each_seed(task, tmp_path, capsys):
    finished = run(
        capsys,
        tmp_path / "results",
        "labels --quiet",
        task=task,
        steps=3,
        seeds=(0, 1),
        cache=tmp_path / "cache",
        **FEW,
    )
    rows = finished.figures["rows"]
    assert [(row["seed"], row["name"]) for row in rows] == [
        (seed, name) for seed in (0, 1) for name in METHODS
    ]
    for row in rows:
        # Several of a text.
        assert row["labels"]["test"] > FEW["test_examples"]
        assert row["nll"] > 0
        assert 0 <= row["exact"] <= row["accuracy"]
        assert 0 <= row["shifted"]["sklearn"]["shift_auroc"] <= 1
    for of_model, tempered, *_ in (rows[:5], rows[5:]):
        assert tempered["accuracy"] == of_model["accuracy"]
        assert tempered["nll"] != of_model["nll"]
    for name in METHODS:
        assert name in finished.printed
    assert "±" in finished.printed

"""The tasks and the experiment of several labels, at their smallest."""

import ast
from itertools import compress, product
from operator import attrgetter

import pytest
import torch

from benchmarks.experiments.labels import exact_matches
from benchmarks.fine_tuning import TRAIN, prepare
from benchmarks.tasks import LABELLED_TASKS
from benchmarks.tasks.functions import SIGNS, functions
from benchmarks.tasks.signatures import CLASSES, signatures
from benchmarks.tasks.task import UNLABELLED
from tests.benchmarks.support import parsed, rows_by, run

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
SEEDS = (0, 1)
# So few files that they are read in a second.
FEW = {
    "files_per_library": 12,
    "train_examples": 10,
    "test_examples": 6,
    "shifted_examples": 4,
}


def test_parameters_are_labelled_with_the_types_that_their_docstring_has():
    (example,) = signatures(ast.parse(SOURCE))
    # The name of the function is the last of the words.
    assert example.text == (
        "a , axis , mode , out , roll axis : Roll the given axis of an array."
    )
    assert example.labelled_words == ("a", "axis", "out")
    assert example.word_labels is not None
    names = []
    for label in example.word_labels:
        if label != UNLABELLED:
            names.append(CLASSES[label])
    assert names == ["array", "whole number", "truth value"]


def examples_of(code):
    """Read the examples of a function with some code."""
    source = f"""
def mean_of(rows):
    \"\"\"Compute the mean of all rows there are.\"\"\"
    {code}
"""
    return list(functions(ast.parse(source)))


@pytest.mark.parametrize(
    ("code", "labels"),
    [
        ("return rows", []),
        ("return [row[0] for row in rows]", ["loops", "indexes"]),
        (
            "if not rows: raise ValueError('a' + 'b')",
            ["branches", "raises", "calculates"],
        ),
    ],
)
def test_a_function_has_a_label_for_each_thing_that_its_code_does(code, labels):
    (example,) = examples_of(code)
    assert example.text == "mean of : Compute the mean of all rows there are."
    assert list(compress(SIGNS, example.labels)) == labels


def test_a_function_without_code_is_no_example():
    assert examples_of("") == []


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
    again = read(1)
    other = read(2)
    assert again == task
    assert other.train != task.train
    assert len(task.train) == 10
    everything = [*task.train, *task.test, *task.shifted["sklearn"]]
    texts = {alike(example) for example in everything}
    assert len(texts) == len(everything)


@pytest.fixture
def of_drawn_texts(encoder, monkeypatch):
    """Have a tiny encoder read drawn texts."""
    monkeypatch.setattr("benchmarks.tasks.drawn.encoder_folder", lambda: encoder)


@pytest.mark.usefixtures("of_drawn_texts")
def test_the_first_token_of_a_word_has_its_label():
    options = parsed("labels --quiet", task="signatures", **FEW)
    pretrained = prepare(options, 0, LABELLED_TASKS)

    def first_token(word):
        tokens = pretrained.tokenizer([word], is_split_into_words=True)
        return tokens["input_ids"][0]

    texts = pretrained.task.train
    records = pretrained.data[TRAIN]
    for example, record in zip(texts, records, strict=True):
        # Parameters come first, a comma behind each, and none is cut off.
        signature, *_ = example.text.split(" : ")
        n_parameters = signature.count(",")
        parameters = example.text.split()[: 2 * n_parameters]
        assert set(example.labelled_words) <= set(parameters)
        found = []
        for token, label in zip(record["input_ids"], record["labels"], strict=True):
            if label != UNLABELLED:
                found.append(token)
        assert found == [first_token(word) for word in example.labelled_words]


@pytest.mark.parametrize(
    ("predicted", "share"),
    [
        pytest.param([0, 1, 1, 0, 1], 1, id="all right"),
        pytest.param([0, 0, 1, 0, 1], 2 / 3, id="one label wrong"),
    ],
)
def test_a_text_is_right_where_all_of_its_labels_are(predicted, share):
    # Two labels of the first text, one of the second, and two more, in a row.
    records = [
        {"labels": [0, -100, 1]},
        {"labels": [1]},
        {"labels": [0, 1]},
    ]
    probabilities = torch.eye(2)[predicted]
    found = exact_matches(probabilities, records)
    assert found == pytest.approx(share)


# Requests are no texts of installed sources: they need a folder of data.
@pytest.mark.usefixtures("of_drawn_texts")
@pytest.mark.parametrize("task", ["functions", "signatures"])
def test_every_method_is_measured_for_each_seed(task, tmp_path):
    finished = run(
        tmp_path / "results",
        "labels --quiet",
        task=task,
        steps=3,
        seeds=SEEDS,
        cache=tmp_path / "cache",
        **FEW,
    )
    rows = rows_by(finished.rows, "seed", "name")
    assert list(rows) == list(product(SEEDS, METHODS))
    for row in rows.values():
        # Several of a text.
        assert row["labels"]["test"] > FEW["test_examples"]
        assert row["nll"] > 0
        assert 0 <= row["exact"] <= row["accuracy"]
        foreign = row["shifted"]["sklearn"]
        assert 0 <= foreign["shift_auroc"] <= 1
    for seed in SEEDS:
        of_model = rows[seed, "Trained model"]
        tempered = rows[seed, "Temperature of the held-out texts"]
        # A temperature changes no class.
        assert tempered["accuracy"] == of_model["accuracy"]
        assert tempered["nll"] != of_model["nll"]
    for name in METHODS:
        assert name in finished.printed
    assert "±" in finished.printed

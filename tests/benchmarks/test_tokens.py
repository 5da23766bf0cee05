"""The task and the experiment of labels of tokens, at their smallest."""

import ast

import pytest

from benchmarks.fine_tuning import prepare
from benchmarks.tasks import WORD_TASKS
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


def test_sets_share_no_list_of_labelled_words_and_are_reproducible():
    def read(seed):
        options = parsed("tokens --quiet", **FEW)
        return WORD_TASKS["signatures"].read(options, seed)

    task = read(1)
    assert task == read(1)
    assert task.train != read(2).train
    everything = [*task.train, *task.test, *task.shifted["sklearn"]]
    assert len(task.train) == 10
    assert len({example.labelled_words for example in everything}) == len(everything)


@pytest.fixture
def encoder(tiny_models, monkeypatch):
    monkeypatch.setattr(
        "benchmarks.tasks.signatures.encoder_folder", lambda: tiny_models[False]
    )


def test_the_first_token_of_a_word_has_its_label(encoder):
    pretrained = prepare(parsed("tokens --quiet", **FEW), 0, WORD_TASKS)
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


def test_every_method_is_measured_for_each_seed(tmp_path, capsys, encoder):
    finished = run(
        capsys,
        tmp_path / "results",
        "tokens --quiet",
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
        assert row["tokens"]["test"] > FEW["test_examples"]
        assert row["nll"] > 0
        assert 0 <= row["shifted"]["sklearn"]["shift_auroc"] <= 1
    for of_model, tempered, *_ in (rows[:5], rows[5:]):
        assert tempered["accuracy"] == of_model["accuracy"]
        assert tempered["nll"] != of_model["nll"]
    for name in METHODS:
        assert name in finished.printed
    assert "±" in finished.printed

"""The tasks: what is read from a source or a row, and how sets are drawn of it."""

import random
import re
import sys
from types import SimpleNamespace

import pytest

from benchmarks.tasks import TASKS
from benchmarks.tasks.intents import mistyped
from benchmarks.tasks.names import asked_for_choice, asked_for_match
from benchmarks.tasks.numpydoc import SECTION_OF
from benchmarks.tasks.paper import PAPER_TASKS, read_paper_task
from benchmarks.tasks.paper_prompts import LETTERS
from benchmarks.tasks.task import Example
from tests.benchmarks.support import (
    PROMPTS,
    ROWS,
    parsed,
    pool,
    write_intents,
    write_task,
)

FEW_FILES = 5  # are read so quickly that they can be read again
# Of each task of balanced classes, how many it has, and how many files of a library it
# needs.
BALANCED = [
    ("submodules", 12, 150),
    ("exceptions", 4, 20),
    ("types", 8, 20),
    ("belongs", 2, FEW_FILES),
    ("sections", 6, FEW_FILES),
    ("verbs", 10, 60),
    ("comments", 2, FEW_FILES),
    ("defaults", 2, 10),
]


def read_task(name, seed=0, **options):
    """Draw the sets of a task."""
    return TASKS[name].read(parsed("stages --quiet", task=name, **options), seed)


def texts_of(*sets):
    """Collect the texts of some sets, each once."""
    return {example.text for examples in sets for example in examples}


# --- sets of libraries ----------------------------------------------------------------


@pytest.mark.parametrize(("name", "n_classes", "files"), BALANCED)
def test_sets_are_balanced_disjoint_and_reproducible(name, n_classes, files):
    def read(seed):
        return read_task(
            name,
            seed,
            files_per_library=files,
            train_examples=n_classes,
            test_examples=2 * n_classes,
        )

    task = read(1)
    if files == FEW_FILES:
        assert task == read(1)
        assert task.train != read(2).train
    assert len(task.classes) == n_classes
    labels = list(range(n_classes))
    assert sorted(example.label for example in task.train) == labels
    assert sorted(example.label for example in task.test) == sorted(labels * 2)
    # Not even a capital tells two of them apart.
    lower = {str(text).casefold() for text in texts_of(task.train, task.test)}
    assert len(lower) == 3 * n_classes


@pytest.mark.parametrize("name", ["docstrings", "names", "choices"])
def test_shifted_texts_are_of_another_library_and(name):
    task = read_task(
        name,
        files_per_library=30,
        train_examples=10,
        test_examples=5,
        shifted_examples=5,
    )
    labels = [example.label for example in task.shifted["matplotlib"]]
    assert len(labels) == 5
    if name == "docstrings":  # matplotlib is none of the libraries to choose from
        assert labels == [None] * 5
    assert len(texts_of(task.train, task.test)) == 15
    assert task.is_prompt == (name == "choices")


def test_texts_of_an_unseen_library_have_labels_and_are_none_of_the_others():
    sizes = {
        "files_per_library": 20,
        "train_examples": 12,
        "test_examples": 12,
        "shifted_examples": 12,
    }
    task = read_task("sections", **sizes)
    unseen = task.shifted["sklearn"]
    assert 0 < len(unseen) <= 12
    assert texts_of(unseen).isdisjoint(texts_of(task.train, task.test))
    # They come from one library, which the others leave out.
    options = parsed("stages --quiet", task="sections", **sizes)
    of_library = list(SECTION_OF.find(["sklearn"], options, 0))
    for example in unseen:
        assert 0 <= example.label < len(task.classes)
        assert (task.classes[example.label], example.text) in of_library
    assert "sklearn" not in SECTION_OF.libraries


def test_half_of_the_names_fit_and_the_others_are_of_the_same_file():
    documented = pool()
    file_of = {one.name: one.file for one in documented}
    examples = list(asked_for_match(documented, random.Random(0)))
    n_that_fit = sum(example.label for example in examples)
    assert n_that_fit == len(examples) / 2
    for one, example in zip(documented, examples, strict=True):
        name, summary = example.text
        assert summary == one.summary
        assert (name == one.name) == bool(example.label)
        assert file_of[name] == one.file


def test_one_of_four_names_is_right():
    documented = pool()
    examples = asked_for_choice(documented, random.Random(0))
    for one, example in zip(documented, examples, strict=True):
        choices = re.findall(r"([A-D])\. (name \d+)\.", example.text)
        letters = [letter for letter, _ in choices]
        names = [name for _, name in choices]
        assert letters == list(LETTERS)
        assert len(set(names)) == 4
        assert names[example.label] == one.name
        assert one.summary.lower() in example.text


# --- tasks of the paper ---------------------------------------------------------------


@pytest.mark.parametrize("name", PAPER_TASKS)
def test_rows_of_a_folder_and_of_the_hub_become_the_papers_prompts_and_pairs(
    name,
    tmp_path,
    monkeypatch,
):
    paper = PAPER_TASKS[name]
    rows, pairs = ROWS[name]
    expected = [Example(text, label) for text, label in pairs]
    asked = []
    write_task(name, tmp_path)

    def load_dataset(dataset, configuration, split):
        asked.append((dataset, configuration, split))
        return rows

    hub = SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    of_folder = read_paper_task(name, tmp_path)
    of_hub = read_paper_task(name)
    assert of_folder.test == expected[:1]
    assert of_hub.test == expected
    is_prompt = expected[0].text in PROMPTS
    for task in (of_folder, of_hub):
        assert task.train == expected
        assert task.is_prompt == is_prompt
        for example in task.train:
            assert 0 <= example.label < len(task.classes)
    assert asked == [
        (paper.dataset, paper.configuration, "train"),
        (paper.dataset, paper.configuration, "validation"),
    ]
    # What is cut of a long prompt is not where the answer comes from.
    ends_with_choices = paper.is_prompt and name != "boolq"
    assert paper.truncation_side == ("left" if ends_with_choices else "right")


# --- intents --------------------------------------------------------------------------


def words_at(place, examples) -> set[str]:
    return {example.text.split()[place] for example in examples}


def test_intents_come_from_their_own_splits_and_others_are_foreign(tmp_path):
    # Two domains of two intents, and texts out of scope.
    intents = {
        "travel": ["visa", "flight"],
        "banking": ["balance", "transfer"],
        "oos": ["oos"],
    }
    write_intents(intents, 4, tmp_path)

    def read(name="travel", seed=0):
        return read_task(name, seed, data=tmp_path, train_examples=6)

    task = read()
    assert task == read()
    assert task.train != read(seed=1).train
    assert list(task.classes) == ["flight", "visa"]
    assert [example.label for example in task.train] == [0, 1, 0, 1, 0, 1]
    for example in (*task.train, *task.test):
        assert task.classes[example.label] in example.text
    # A text begins with its split and its intent.
    assert words_at(0, task.train) == {"train"}
    assert words_at(0, task.test) == {"test"}
    assert words_at(1, task.shifted["oos"]) == {"oos"}
    assert words_at(1, task.shifted["other domains"]) == {"balance", "transfer"}
    assert list(read("clinc150").shifted) == ["oos", "typos"]
    for right, typed in zip(task.test, task.shifted["typos"], strict=True):
        assert typed.label == right.label
        assert sorted(typed.text) == sorted(right.text)


def test_typos_are_within_the_longer_words():
    text = "how can i reschedule my flight"
    found = mistyped(text, random.Random(1))
    assert found != text
    for word, typed in zip(text.split(), found.split(), strict=True):
        assert sorted(typed) == sorted(word)
        assert typed[0] == word[0]
        assert typed[-1] == word[-1]
        assert len(word) >= 4 or typed == word


def test_intents_without_a_folder_say_what_to_give():
    with pytest.raises(SystemExit, match="give --data FOLDER"):
        read_task("travel")

"""The tasks: what is read from a source or a row, and how sets are drawn of it."""

import random
import re
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.tasks import TASKS
from benchmarks.tasks.intents import mistyped
from benchmarks.tasks.names import asked_for_choice, asked_for_match
from benchmarks.tasks.numpydoc import SECTION_OF
from benchmarks.tasks.paper import PAPER_TASKS, read_paper_task
from benchmarks.tasks.paper_prompts import LETTERS
from benchmarks.tasks.task import Example, Task
from tests.benchmarks.support import (
    PROMPTS,
    ROWS,
    parsed,
    pool,
    write_intents,
    write_rows,
    write_task,
)


def read_task(name: str, seed: int = 0, **options: Any) -> Task:
    """Draw the sets of a task."""
    return TASKS[name].read(parsed("stages --quiet", task=name, **options), seed)


def texts_of(*sets: Sequence[Example]) -> set:
    """Collect the texts of some sets, each once."""
    return {example.text for examples in sets for example in examples}


def labels_of(examples: Sequence[Example]) -> list:
    return [example.label for example in examples]


# --- sets of libraries ----------------------------------------------------------------


def balanced(name: str, n_classes: int, files: int, seed: int = 1) -> Task:
    """Draw a training text of each class, and two test texts."""
    sizes = {"train_examples": n_classes, "test_examples": 2 * n_classes}
    return read_task(name, seed, files_per_library=files, **sizes)


# How many classes each task of balanced ones has, and how many files of a library it
# needs.
@pytest.mark.parametrize(
    ("name", "n_classes", "files"),
    [
        ("submodules", 12, 150),
        ("exceptions", 4, 20),
        ("types", 8, 20),
        ("belongs", 2, 5),
        ("sections", 6, 5),
        ("verbs", 10, 60),
        ("comments", 2, 5),
        ("defaults", 2, 10),
    ],
)
def test_sets_are_balanced_and_disjoint(name, n_classes, files):
    task = balanced(name, n_classes, files)
    each_once = list(range(n_classes))
    assert len(task.classes) == n_classes
    assert sorted(labels_of(task.train)) == each_once
    assert sorted(labels_of(task.test)) == sorted(2 * each_once)
    # Not even a capital tells two of them apart.
    lower = {str(text).casefold() for text in texts_of(task.train, task.test)}
    assert len(lower) == 3 * n_classes
    # These are read so quickly that they can be read again.
    if files == 5:
        assert balanced(name, n_classes, files) == task
        assert balanced(name, n_classes, files, seed=2).train != task.train


@pytest.mark.parametrize("name", ["docstrings", "names", "choices"])
def test_shifted_texts_are_of_another_library(name):
    sizes = {"train_examples": 10, "test_examples": 5, "shifted_examples": 5}
    task = read_task(name, files_per_library=30, **sizes)
    labels = labels_of(task.shifted["matplotlib"])
    assert len(labels) == 5
    if name == "docstrings":
        # matplotlib is none of the libraries to choose from.
        assert labels == [None] * 5
    assert len(texts_of(task.train, task.test)) == 15
    assert task.is_prompt == (name == "choices")


def test_texts_of_an_unseen_library_are_none_of_the_others_and_have_their_labels():
    sizes = {"train_examples": 12, "test_examples": 12, "shifted_examples": 12}
    sizes["files_per_library"] = 20
    task = read_task("sections", **sizes)
    unseen = task.shifted["sklearn"]
    assert 0 < len(unseen) <= 12
    assert texts_of(unseen).isdisjoint(texts_of(task.train, task.test))
    assert "sklearn" not in SECTION_OF.libraries
    options = parsed("stages --quiet", task="sections", **sizes)
    of_library = list(SECTION_OF.find(["sklearn"], options, 0))
    for example in unseen:
        assert (task.classes[example.label], example.text) in of_library


def test_half_of_the_names_fit_and_the_others_are_of_the_same_file():
    documented = pool()
    file_of = {one.name: one.file for one in documented}
    examples = list(asked_for_match(documented, random.Random(0)))
    assert sum(labels_of(examples)) == len(examples) / 2
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
        letters, names = zip(*choices, strict=True)
        assert list(letters) == list(LETTERS)
        assert len(set(names)) == 4
        assert names[example.label] == one.name
        assert one.summary.lower() in example.text


# --- tasks of the paper ---------------------------------------------------------------


@pytest.mark.parametrize("name", PAPER_TASKS)
def test_rows_become_the_papers_prompts_and_pairs(name, tmp_path, monkeypatch):
    paper = PAPER_TASKS[name]
    rows, pairs = ROWS[name]
    examples = [Example(text, label) for text, label in pairs]
    write_task(name, tmp_path)
    task = read_paper_task(name, tmp_path)
    assert task.train == examples
    assert task.test == examples[:1]
    assert task.is_prompt == (examples[0].text in PROMPTS)
    assert all(0 <= example.label < len(task.classes) for example in examples)
    # What is cut of a long prompt is not where the answer comes from.
    ends_with_choices = paper.is_prompt and name != "boolq"
    assert paper.truncation_side == ("left" if ends_with_choices else "right")

    asked = []

    def load_dataset(dataset, configuration, split):
        asked.append((dataset, configuration, split))
        return rows

    # The hub's own library would go to the net.
    hub = SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    of_hub = read_paper_task(name)
    assert of_hub.train == of_hub.test == examples
    place = (paper.dataset, paper.configuration)
    assert asked == [(*place, "train"), (*place, "validation")]


# --- intents --------------------------------------------------------------------------

# Two domains of two intents, and texts out of scope.
INTENTS = {
    "travel": ["visa", "flight"],
    "banking": ["balance", "transfer"],
    "oos": ["oos"],
}


@pytest.fixture
def read_intents(tmp_path):
    """Reads one of the tasks of intents, from made-up texts."""
    write_intents(INTENTS, 4, tmp_path)
    return lambda name="travel", seed=0: read_task(
        name, seed, data=tmp_path, train_examples=6
    )


def words_of(examples: Sequence[Example], place: int) -> set[str]:
    """Read made-up texts: splits come first, and then intents."""
    return {example.text.split()[place] for example in examples}


def assert_balanced(task: Task, classes: list[str]) -> None:
    """Demand as many training texts of each class, and splits of their own."""
    assert list(task.classes) == classes
    assert labels_of(task.train) == 3 * [0, 1]
    for example in (*task.train, *task.test):
        assert task.classes[example.label] in example.text
    assert words_of(task.train, 0) == {"train"}
    assert words_of(task.test, 0) == {"test"}


def test_intents_of_a_domain_are_balanced_and_come_from_their_own_splits(read_intents):
    task = read_intents()
    assert_balanced(task, ["flight", "visa"])
    assert read_intents() == task
    assert read_intents(seed=1).train != task.train


def test_sentences_are_balanced_in_training_and_all_there_in_the_test(tmp_path):
    for split, counts in {"train": (5, 7), "test": (1, 4)}.items():
        rows = [
            {"text": f"{split} {label} {number}", "label": label}
            for label, count in zip(("human", "entity"), counts, strict=True)
            for number in range(count)
        ]
        write_rows(rows, tmp_path / "trec" / "coarse" / f"{split}.jsonl")
    task = read_task("trec", 0, data=tmp_path, train_examples=6)
    assert sorted(labels_of(task.test)) == [0, 0, 0, 0, 1]
    assert_balanced(task, ["entity", "human"])
    # Of twelve texts six are left, whose labels are as they come.
    assert not {each.text for each in task.further} & {each.text for each in task.train}
    assert sorted(labels_of(task.further)) == [0, 0, 0, 0, 1, 1]
    for each in task.further:
        assert task.classes[each.label] in each.text


def test_intents_of_other_domains_are_foreign(read_intents):
    shifted = read_intents().shifted
    assert words_of(shifted["oos"], 1) == {"oos"}
    assert words_of(shifted["other domains"], 1) == {"balance", "transfer"}
    # Of all intents none are left.
    assert list(read_intents("clinc150").shifted) == ["oos", "typos"]


def test_typos_are_within_the_longer_words(read_intents):
    task = read_intents()
    for right, typed in zip(task.test, task.shifted["typos"], strict=True):
        assert typed.label == right.label
        assert sorted(typed.text) == sorted(right.text)
    text = "how can i reschedule my flight"
    found = mistyped(text, random.Random(1))
    assert found != text
    for word, typed in zip(text.split(), found.split(), strict=True):
        assert sorted(typed) == sorted(word)
        assert (typed[0], typed[-1]) == (word[0], word[-1])
        assert len(word) >= 4 or typed == word


def test_intents_without_a_folder_say_what_to_give():
    with pytest.raises(SystemExit, match="give --data FOLDER"):
        read_task("travel")

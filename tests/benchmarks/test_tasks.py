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

# Are read so quickly that they can be read again.
FEW_FILES = 5
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
QUICKLY_READ = [row for row in BALANCED if row[-1] == FEW_FILES]


def read_task(
    name: str,
    seed: int = 0,
    **options: Any,
) -> Task:
    """Draw the sets of a task."""
    asked = parsed("stages --quiet", task=name, **options)
    return TASKS[name].read(asked, seed)


def texts_of(*sets: Sequence[Example]) -> set[str]:
    """Collect the texts of some sets, each once."""
    texts = set()
    for examples in sets:
        for example in examples:
            texts.add(example.text)
    return texts


def labels_of(examples: Sequence[Example]) -> list:
    return [example.label for example in examples]


# --- sets of libraries ----------------------------------------------------------------


def balanced(
    name: str,
    n_classes: int,
    files: int,
    seed: int = 1,
) -> Task:
    """Draw a training text of each class, and two test texts."""
    return read_task(
        name,
        seed,
        files_per_library=files,
        train_examples=n_classes,
        test_examples=2 * n_classes,
    )


@pytest.mark.parametrize(("name", "n_classes", "files"), BALANCED)
def test_sets_are_balanced_and_disjoint(name, n_classes, files):
    task = balanced(name, n_classes, files)
    assert len(task.classes) == n_classes
    each_once = list(range(n_classes))
    each_twice = sorted(2 * each_once)
    assert sorted(labels_of(task.train)) == each_once
    assert sorted(labels_of(task.test)) == each_twice
    # Not even a capital tells two of them apart.
    lower = set()
    for text in texts_of(task.train, task.test):
        lower.add(str(text).casefold())
    assert len(lower) == 3 * n_classes


@pytest.mark.parametrize(("name", "n_classes", "files"), QUICKLY_READ)
def test_the_seed_decides_which_texts_are_drawn(name, n_classes, files):
    task = balanced(name, n_classes, files)
    again = balanced(name, n_classes, files)
    other = balanced(name, n_classes, files, seed=2)
    assert again == task
    assert other.train != task.train


@pytest.mark.parametrize("name", ["docstrings", "names", "choices"])
def test_shifted_texts_are_of_another_library(name):
    task = read_task(
        name,
        files_per_library=30,
        train_examples=10,
        test_examples=5,
        shifted_examples=5,
    )
    labels = labels_of(task.shifted["matplotlib"])
    assert len(labels) == 5
    if name == "docstrings":
        # matplotlib is none of the libraries to choose from.
        assert labels == [None] * 5
    texts = texts_of(task.train, task.test)
    assert len(texts) == 15
    assert task.is_prompt == (name == "choices")


UNSEEN = "sklearn"
SIZES = {
    "files_per_library": 20,
    "train_examples": 12,
    "test_examples": 12,
    "shifted_examples": 12,
}


def test_texts_of_an_unseen_library_are_none_of_the_others():
    task = read_task("sections", **SIZES)
    unseen = texts_of(task.shifted[UNSEEN])
    others = texts_of(task.train, task.test)
    assert unseen.isdisjoint(others)
    assert UNSEEN not in SECTION_OF.libraries


def test_texts_of_an_unseen_library_have_their_labels():
    task = read_task("sections", **SIZES)
    unseen = task.shifted[UNSEEN]
    assert 0 < len(unseen) <= 12
    options = parsed("stages --quiet", task="sections", **SIZES)
    of_library = list(SECTION_OF.find([UNSEEN], options, 0))
    for example in unseen:
        assert 0 <= example.label < len(task.classes)
        section = task.classes[example.label]
        assert (section, example.text) in of_library


def test_half_of_the_names_fit_and_the_others_are_of_the_same_file():
    documented = pool()
    file_of = {one.name: one.file for one in documented}
    draws = random.Random(0)
    examples = list(asked_for_match(documented, draws))
    n_that_fit = sum(labels_of(examples))
    assert n_that_fit == len(examples) / 2
    for one, example in zip(documented, examples, strict=True):
        name, summary = example.text
        assert summary == one.summary
        fits = name == one.name
        assert fits == bool(example.label)
        assert file_of[name] == one.file


def test_one_of_four_names_is_right():
    documented = pool()
    draws = random.Random(0)
    examples = asked_for_choice(documented, draws)
    for one, example in zip(documented, examples, strict=True):
        choices = re.findall(r"([A-D])\. (name \d+)\.", example.text)
        letters, names = zip(*choices, strict=True)
        assert list(letters) == list(LETTERS)
        assert len(set(names)) == 4
        right = names[example.label]
        assert right == one.name
        assert one.summary.lower() in example.text


# --- tasks of the paper ---------------------------------------------------------------


def papers_examples(name: str) -> list[Example]:
    """List what the paper makes of the rows of a task."""
    _, pairs = ROWS[name]
    return [Example(text, label) for text, label in pairs]


def assert_trains_on(task: Task, examples: list[Example]) -> None:
    """Demand a task of the paper whose training texts are these."""
    assert task.train == examples
    is_prompt = examples[0].text in PROMPTS
    assert task.is_prompt == is_prompt
    for example in task.train:
        assert 0 <= example.label < len(task.classes)


@pytest.mark.parametrize("name", PAPER_TASKS)
def test_rows_of_a_folder_become_the_papers_prompts_and_pairs(name, tmp_path):
    expected = papers_examples(name)
    write_task(name, tmp_path)
    task = read_paper_task(name, tmp_path)
    assert_trains_on(task, expected)
    assert task.test == expected[:1]


@pytest.mark.parametrize("name", PAPER_TASKS)
def test_rows_of_the_hub_become_the_papers_prompts_and_pairs(name, monkeypatch):
    rows, _ = ROWS[name]
    asked = []

    def load_dataset(dataset, configuration, split):
        asked.append((dataset, configuration, split))
        return rows

    # The hub's own library would go to the net.
    hub = SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    task = read_paper_task(name)
    expected = papers_examples(name)
    assert_trains_on(task, expected)
    assert task.test == expected
    paper = PAPER_TASKS[name]
    assert asked == [
        (paper.dataset, paper.configuration, "train"),
        (paper.dataset, paper.configuration, "validation"),
    ]


@pytest.mark.parametrize("name", PAPER_TASKS)
def test_what_is_cut_of_a_long_prompt_is_not_where_the_answer_comes_from(name):
    paper = PAPER_TASKS[name]
    ends_with_choices = paper.is_prompt and name != "boolq"
    expected = "left" if ends_with_choices else "right"
    assert paper.truncation_side == expected


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

    def read(name="travel", seed=0):
        return read_task(
            name,
            seed,
            data=tmp_path,
            train_examples=6,
        )

    return read


def splits_of(examples: Sequence[Example]) -> set[str]:
    """Read the splits with which made-up texts begin."""
    return {example.text.split()[0] for example in examples}


def intents_of(examples: Sequence[Example]) -> set[str]:
    """Read the intents, which come next in made-up texts."""
    return {example.text.split()[1] for example in examples}


def test_intents_of_a_domain_are_balanced_and_come_from_their_own_splits(
    read_intents,
):
    task = read_intents()
    assert list(task.classes) == ["flight", "visa"]
    assert labels_of(task.train) == 3 * [0, 1]
    for example in (*task.train, *task.test):
        intent = task.classes[example.label]
        assert intent in example.text
    assert splits_of(task.train) == {"train"}
    assert splits_of(task.test) == {"test"}


def test_the_seed_decides_which_intents_are_drawn(read_intents):
    task = read_intents()
    again = read_intents()
    other = read_intents(seed=1)
    assert again == task
    assert other.train != task.train


def test_intents_of_other_domains_are_foreign(read_intents):
    shifted = read_intents().shifted
    assert intents_of(shifted["oos"]) == {"oos"}
    assert intents_of(shifted["other domains"]) == {"balance", "transfer"}
    # Of all intents none are left.
    of_all_intents = read_intents("clinc150")
    assert list(of_all_intents.shifted) == ["oos", "typos"]


def test_texts_with_typos_have_the_labels_and_letters_of_those_without(read_intents):
    task = read_intents()
    typos = task.shifted["typos"]
    for right, typed in zip(task.test, typos, strict=True):
        assert typed.label == right.label
        assert sorted(typed.text) == sorted(right.text)


def test_typos_are_within_the_longer_words():
    text = "how can i reschedule my flight"
    found = mistyped(text, random.Random(1))
    assert found != text
    words = text.split()
    typed_words = found.split()
    for word, typed in zip(words, typed_words, strict=True):
        assert sorted(typed) == sorted(word)
        assert typed[0] == word[0]
        assert typed[-1] == word[-1]
        if len(word) < 4:
            assert typed == word


def test_sentences_are_balanced_in_training_and_all_there_in_the_test(tmp_path):
    folder = tmp_path / "trec" / "coarse"
    for split, counts in {"train": (5, 7), "test": (1, 4)}.items():
        rows = [
            {"text": f"{split} {label} {number}", "label": label}
            for label, count in zip(("human", "entity"), counts, strict=True)
            for number in range(count)
        ]
        write_rows(rows, folder / f"{split}.jsonl")
    task = read_task("trec", 0, data=tmp_path, train_examples=6)
    assert list(task.classes) == ["entity", "human"]
    assert labels_of(task.train) == 3 * [0, 1]
    assert sorted(labels_of(task.test)) == [0, 0, 0, 0, 1]
    for example in (*task.train, *task.test):
        assert task.classes[example.label] in example.text
    assert splits_of(task.train) == {"train"}
    assert splits_of(task.test) == {"test"}


def test_intents_without_a_folder_say_what_to_give():
    with pytest.raises(SystemExit, match="give --data FOLDER"):
        read_task("travel")

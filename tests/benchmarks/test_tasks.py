"""The tasks: what is read from a source or a row, and how sets are drawn of it."""

import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.fine_tuning import TRAIN, prepare
from benchmarks.tasks import TASKS
from benchmarks.tasks.docstrings import Documented
from benchmarks.tasks.multiple_choice import ARC_EASY_TASKS, KEPT_CHOICES
from benchmarks.tasks.names import asked_for_choice, asked_for_match
from benchmarks.tasks.numpydoc import SECTION_OF
from benchmarks.tasks.paper import LETTERS, PAPER_TASKS, read_paper_task
from benchmarks.tasks.sentences import mistyped
from benchmarks.tasks.task import Example, Task
from laplace_lora_ext.models.logits_model import LogitsModel
from tests.benchmarks.support import (
    ROWS,
    arc_row,
    parsed,
    rows_by,
    run,
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
    def balanced(seed: int) -> Task:
        """Draw a training text of each class, and two test texts."""
        sizes = {"train_examples": n_classes, "test_examples": 2 * n_classes}
        return read_task(name, seed, files_per_library=files, **sizes)

    task = balanced(1)
    each_once = list(range(n_classes))
    assert len(task.classes) == n_classes
    assert sorted(labels_of(task.train)) == each_once
    assert sorted(labels_of(task.test)) == sorted(2 * each_once)
    # Not even a capital tells two of them apart.
    lower = {str(text).casefold() for text in texts_of(task.train, task.test)}
    assert len(lower) == 3 * n_classes
    # These are read so quickly that they can be read again.
    if files == 5:
        assert balanced(1) == task
        assert balanced(2).train != task.train


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


def test_texts_of_an_unseen_library_are_none_of_the_others_and_have_their_labels():
    sizes = {"train_examples": 12, "test_examples": 12, "shifted_examples": 12}
    sizes["files_per_library"] = 20
    task = read_task("sections", **sizes)
    unseen = task.shifted["sklearn"]
    assert 0 < len(unseen) <= 12
    assert texts_of(unseen).isdisjoint(texts_of(task.train, task.test))
    options = parsed("stages --quiet", task="sections", **sizes)
    of_library = list(SECTION_OF.find(["sklearn"], options, 0))
    for example in unseen:
        assert (task.classes[example.label], example.text) in of_library


# Names and summaries of three files by turns.
POOL = [
    Documented(f"name {number}", f"Summary {number}.", Path(f"file{number % 3}"))
    for number in range(40)
]


def test_half_of_the_names_fit_and_the_others_are_of_the_same_file():
    file_of = {one.name: one.file for one in POOL}
    examples = list(asked_for_match(POOL, random.Random(0)))
    assert sum(labels_of(examples)) == len(examples) / 2
    for one, example in zip(POOL, examples, strict=True):
        name, summary = example.text
        assert summary == one.summary
        assert (name == one.name) == bool(example.label)
        assert file_of[name] == one.file


def test_one_of_four_names_is_right():
    examples = asked_for_choice(POOL, random.Random(0))
    for one, example in zip(POOL, examples, strict=True):
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
    assert task.is_prompt == ("Answer" in examples[0].text)
    assert all(0 <= example.label < len(task.classes) for example in examples)
    # What is cut of a long prompt is not where the answer comes from.
    ends_with_choices = task.is_prompt and name != "boolq"
    assert task.truncation_side == ("left" if ends_with_choices else "right")

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


# --- published sentences --------------------------------------------------------------


def words_of(examples: Sequence[Example], place: int) -> set[str]:
    """Read made-up texts: splits come first, and then intents."""
    return {example.text.split()[place] for example in examples}


def assert_balanced(task: Task, classes: list[str]) -> None:
    """Demand as many training texts of each class, and splits of their own."""
    assert list(task.classes) == classes
    assert labels_of(task.train) == 3 * [0, 1]
    for example in (*task.train, *task.test, *task.further):
        assert task.classes[example.label] in example.text
    assert words_of(task.train, 0) == {"train"}
    assert words_of(task.test, 0) == {"test"}
    assert texts_of(task.train).isdisjoint(texts_of(task.further))


def test_intents_of_a_domain_are_balanced_and_others_are_foreign(tmp_path):
    intents = {"travel": ["visa", "flight"], "banking": ["balance"], "oos": ["oos"]}
    write_intents(intents, 4, tmp_path)
    options = {"data": tmp_path, "train_examples": 6}
    task = read_task("travel", **options)
    assert_balanced(task, ["flight", "visa"])
    assert read_task("travel", **options) == task
    assert read_task("travel", seed=1, **options).train != task.train
    assert words_of(task.shifted["oos"], 1) == {"oos"}
    assert words_of(task.shifted["other domains"], 1) == {"balance"}
    for right, typed in zip(task.test, task.shifted["typos"], strict=True):
        assert typed.label == right.label
        assert sorted(typed.text) == sorted(right.text)
    # Of all intents none are left.
    assert list(read_task("clinc150", **options).shifted) == ["oos", "typos"]


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
    assert sorted(labels_of(task.further)) == [0, 0, 0, 0, 1, 1]
    assert not task.shifted


def test_typos_are_within_the_longer_words():
    text = "how can i reschedule my flight"
    found = mistyped(text, random.Random(1))
    assert found != text
    for word, typed in zip(text.split(), found.split(), strict=True):
        assert sorted(typed) == sorted(word)
        assert (typed[0], typed[-1]) == (word[0], word[-1])
        assert len(word) >= 4 or typed == word


@pytest.mark.parametrize("name", ["travel", "obqa_texts"])
def test_what_no_hub_has_says_what_to_give(name):
    with pytest.raises(SystemExit, match="give --data FOLDER"):
        read_task(name)


# --- multiple choice ------------------------------------------------------------------

MULTIPLE_CHOICE = (*ARC_EASY_TASKS, *KEPT_CHOICES)
# One is longer than the others, by several tokens.
CHOICES = ["a pear", "a stone", "a spoon and a lamp", "a lamp"]
N_QUESTIONS = {"train": 24, "test": 8}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder of questions of each data set, of which one has three choices."""
    root = tmp_path_factory.mktemp("data")
    for task in MULTIPLE_CHOICE:
        name, configuration = task.dataset
        for split, count in N_QUESTIONS.items():
            rows = [arc_row("What grows?", CHOICES[:3], answer="A", labels="ABC")]
            for number in range(count):
                question = f"What grows {number}?"
                rows.append(arc_row(question, CHOICES, answer="ABCD"[number % 4]))
            if "openbookqa" in name:
                for row in rows:
                    row["question_stem"] = row.pop("question")
            write_rows(rows, root / name / configuration / f"{split}.jsonl")
    return root


@pytest.mark.parametrize("task", MULTIPLE_CHOICE, ids=lambda task: task.name)
def test_each_question_stays_the_same_and_has_four_choices(task, data, tiny_models):
    given = {"task": task.name, "data": data, "model": tiny_models[True]}
    options = parsed("stages --quiet", **given)
    found, again, other = (task.read(options, seed) for seed in (0, 0, 1))
    # The question with three choices is left out.
    assert len(found.train) == N_QUESTIONS["train"]
    assert len(found.test) == N_QUESTIONS["test"]
    assert again == found
    assert other.train != found.train

    pretrained = prepare(options, 0)
    batch = next(iter(pretrained.loader(pretrained.data[TRAIN])))
    model = LogitsModel(pretrained.load(), pretrained.class_token_ids)
    assert model(batch).shape == (len(batch["labels"]), 4)
    first = found.train[0]
    if not found.has_choices:
        assert " Choices: A. a pear." in first.text
        return
    choices = [f" {choice}" for choice in CHOICES]
    assert list(first.choices) == choices
    # All tokens of a choice are scored, and none of the question.
    tokens = pretrained.tokenizer(choices, add_special_tokens=False)["input_ids"]
    n_scored = batch["score_mask"][0].sum(-1)
    assert n_scored.tolist() == [len(of_choice) for of_choice in tokens]


def test_stages_measure_choices_of_their_own_and_shifted_ones(
    data, tiny_models, tmp_path
):
    finished = run(
        tmp_path / "results",
        "stages --task obqa_texts --steps 6 --members 1 --smoothing",
        data=data,
        model=tiny_models[True],
        cache=tmp_path / "cache",
    )
    rows = rows_by(finished.figures["methods"], "method", "prior")
    assert ("staged_1_student", "swapped") in rows
    # Long choices are far less probable than short ones to a model that has learnt
    # nothing.
    assert all(0 < row["nll"] < 100 for row in rows.values())
    shifted = rows["staged_1", "held_out"]["shifted"]
    assert set(shifted) == {"ARC-Easy", "ARC-Challenge"}
    assert all("nll" in of_set for of_set in shifted.values())

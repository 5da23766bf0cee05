"""The tasks: what is read from a source or a row, and how sets are drawn of it."""

import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.tasks import TASKS
from benchmarks.tasks.docstrings import Documented
from benchmarks.tasks.names import asked_for_choice, asked_for_match
from benchmarks.tasks.paper import LETTERS, PAPER_TASKS
from benchmarks.tasks.task import Example, Task
from tests.benchmarks.support import (
    Row,
    parsed,
    rows_by,
    run,
    write_intents,
    write_rows,
)


def read_task(name: str, options: str, seed: int = 0) -> Task:
    """Draw the sets of a task."""
    return TASKS[name].read(parsed(f"stages --quiet --task {name} {options}"), seed)


def texts_of(*sets: Sequence[Example]) -> set:
    """Collect the texts of some sets, each once."""
    return {example.text for examples in sets for example in examples}


def labels_of(examples: Sequence[Example]) -> list:
    return [example.label for example in examples]


# --- sets of libraries ----------------------------------------------------------------


# How many files of a library each task of balanced classes needs.
@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("submodules", 150),
        ("exceptions", 20),
        ("types", 20),
        ("belongs", 5),
        ("sections", 5),
        ("verbs", 60),
        ("comments", 5),
        ("defaults", 10),
    ],
)
def test_sets_are_balanced_and_disjoint(name, files):
    n_classes = len(TASKS[name].classes)
    # A training text of each class, and two test texts.
    sizes = f"--train-examples {n_classes} --test-examples {2 * n_classes}"
    options = f"{sizes} --files-per-library {files}"
    task = read_task(name, options, seed=1)
    each_once = list(range(n_classes))
    assert sorted(labels_of(task.train)) == each_once
    assert sorted(labels_of(task.test)) == sorted(2 * each_once)
    # Not even a capital tells two of them apart.
    lower = {str(text).casefold() for text in texts_of(task.train, task.test)}
    assert len(lower) == 3 * n_classes
    # These are read so quickly that they can be read again.
    if files == 5:
        assert read_task(name, options, seed=1) == task
        assert read_task(name, options, seed=2).train != task.train


@pytest.mark.parametrize("name", ["docstrings", "names", "choices"])
def test_shifted_texts_are_of_another_library(name):
    sizes = "--train-examples 10 --test-examples 5 --shifted-examples 5"
    task = read_task(name, f"{sizes} --files-per-library 30")
    labels = labels_of(task.shifted["matplotlib"])
    assert len(labels) == 5
    if name == "docstrings":
        # matplotlib is none of the libraries to choose from.
        assert labels == [None] * 5
    assert len(texts_of(task.train, task.test)) == 15


def test_texts_of_an_unseen_library_are_none_of_the_others_and_have_their_labels():
    sizes = "--train-examples 12 --test-examples 12 --shifted-examples 12"
    task = read_task("sections", f"{sizes} --files-per-library 20")
    unseen = task.shifted["sklearn"]
    assert 0 < len(unseen) <= 12
    assert texts_of(unseen).isdisjoint(texts_of(task.train, task.test))
    options = parsed("stages --quiet --files-per-library 20")
    of_library = list(TASKS["sections"].find(["sklearn"], options, 0))
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


def arc_row(
    question: str, choices: list[str], answer: str, labels: str = "ABCD"
) -> Row:
    """Make a row of ARC, which labels its choices by letters or digits."""
    return {
        "question": question,
        "choices": {"text": choices, "label": list(labels)},
        "answerKey": answer,
    }


SELECT = "Select one of the choices that answers the following question:"
FRUIT = ["a pear", "a stone.", "a spoon", "a lamp"]
FRUIT_PROMPT = (
    f"{SELECT} What grows? Choices: A. a pear. B. a stone. C. a spoon. D. a lamp. "
    "Answer:"
)
GAP = {"sentence": "As _ was low it fell.", "option1": "cup", "option2": "shelf"}
GAP_PROMPT = f"{SELECT} As _ was low it fell. Choices: A. cup. B shelf. Answer:"
BOOLQ_ROWS = [
    # As SuperGLUE has it.
    {"question": "is ice cold", "passage": "Ice is frozen water.", "label": 1},
    # As the original data have it.
    {"question": "is ice cold", "passage": "Ice is frozen water", "answer": False},
]
BOOLQ_PROMPT = (
    "Answer the question with only True or False: is ice cold "
    "Context: Ice is frozen water."
)
PAIR = {"sentence1": "It rains.", "sentence2": "It is wet."}


# Rows of a task of each kind, and what the paper keeps of them.
@pytest.mark.parametrize(
    ("name", "rows", "kept"),
    [
        (
            "winogrande_s",
            [GAP | {"answer": "2"}, GAP | {"answer": "1"}],
            [(GAP_PROMPT, 1), (GAP_PROMPT, 0)],
        ),
        (
            "arc_easy",
            [
                arc_row("What grows?", FRUIT, "C"),
                arc_row("What grows?", FRUIT, "2", labels="1234"),
                # Questions with three and five choices are left out.
                arc_row("Three?", FRUIT[:3], "A", labels="ABC"),
                arc_row("Five?", [*FRUIT, "ice"], "E", labels="ABCDE"),
            ],
            [(FRUIT_PROMPT, 2), (FRUIT_PROMPT, 1)],
        ),
        (
            "obqa",
            [arc_row("", FRUIT, "B") | {"question_stem": "What grows?"}],
            [(FRUIT_PROMPT, 1)],
        ),
        ("boolq", BOOLQ_ROWS, [(BOOLQ_PROMPT, 1), (BOOLQ_PROMPT, 0)]),
        (
            "boolq_pairs",
            BOOLQ_ROWS,
            [
                (("Ice is frozen water.", "is ice cold"), 1),
                (("Ice is frozen water", "is ice cold"), 0),
            ],
        ),
        ("mrpc", [PAIR | {"label": 1}], [(("It rains.", "It is wet."), 1)]),
        ("cola", [{"sentence": "Him sleeps.", "label": 0}], [("Him sleeps.", 0)]),
    ],
)
def test_rows_become_the_papers_prompts_and_pairs(name, rows, kept, tmp_path):
    training, test = PAPER_TASKS[name].sources
    write_rows(rows, training.file_in(tmp_path))
    write_rows(rows[:1], test.file_in(tmp_path))
    task = read_task(name, f"--data {tmp_path}")
    assert task.train == [Example(*pair) for pair in kept]
    assert task.test == task.train[:1]
    # What is cut of a long prompt is not where the answer comes from.
    ends_with_choices = str(task.train[0].text).endswith("Answer:")
    assert task.truncation_side == ("left" if ends_with_choices else "right")


# --- published sentences --------------------------------------------------------------


def words_of(examples: Sequence[Example], place: int) -> set[str]:
    """Read made-up texts: splits come first, and then classes."""
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
    options = f"--data {tmp_path} --train-examples 6"
    task = read_task("travel", options)
    assert_balanced(task, ["flight", "visa"])
    assert read_task("travel", options) == task
    assert read_task("travel", options, seed=1).train != task.train
    assert words_of(task.shifted["oos"], 1) == {"oos"}
    assert words_of(task.shifted["other domains"], 1) == {"balance"}
    typos = task.shifted["typos"]
    assert texts_of(typos) != texts_of(task.test)
    for right, typed in zip(task.test, typos, strict=True):
        assert typed.label == right.label
        # They are within words.
        for word, found in zip(right.text.split(), typed.text.split(), strict=True):
            assert sorted(found) == sorted(word)
            assert (found[0], found[-1]) == (word[0], word[-1])
    # Of all intents none are left.
    assert list(read_task("clinc150", options).shifted) == ["oos", "typos"]


def test_sentences_are_balanced_in_training_and_all_there_in_the_test(tmp_path):
    for split, counts in {"train": (5, 7), "test": (1, 4)}.items():
        labels = counts[0] * ["human"] + counts[1] * ["entity"]
        rows = [
            {"text": f"{split} {label} {number}", "label": label}
            for number, label in enumerate(labels)
        ]
        write_rows(rows, tmp_path / "trec" / "coarse" / f"{split}.jsonl")
    task = read_task("trec", f"--data {tmp_path} --train-examples 6")
    assert sorted(labels_of(task.test)) == [0, 0, 0, 0, 1]
    assert_balanced(task, ["entity", "human"])
    # Of twelve texts six are left, whose labels are as they come.
    assert sorted(labels_of(task.further)) == [0, 0, 0, 0, 1, 1]
    assert not task.shifted


# --- multiple choice ------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder of OpenBookQA and ARC; of each one question has three choices."""
    root = tmp_path_factory.mktemp("data")
    for name in ("openbookqa/main", "ai2_arc/ARC-Easy", "ai2_arc/ARC-Challenge"):
        for split, count in {"train": 24, "test": 8}.items():
            rows = [arc_row("What grows?", FRUIT[:3], answer="A", labels="ABC")]
            for number in range(count):
                answer = "ABCD"[number % 4]
                rows.append(arc_row(f"What grows {number}?", FRUIT, answer))
            if "openbookqa" in name:
                for row in rows:
                    row["question_stem"] = row.pop("question")
            write_rows(rows, root / "allenai" / name / f"{split}.jsonl")
    return root


@pytest.mark.parametrize("name", ["obqa_letters", "obqa_texts"])
def test_each_question_stays_the_same_and_has_four_choices(name, data):
    task, again, other = (read_task(name, f"--data {data}", seed) for seed in (0, 0, 1))
    # The question with three choices is left out.
    assert len(task.train) == 24
    assert len(task.test) == 8
    assert again == task
    assert other.train != task.train
    for example in (*task.train, *task.test, *task.shifted["ARC-Easy"]):
        (number,) = re.findall(r"\d+", example.text)
        assert example.label == int(number) % 4
        if name == "obqa_texts":
            assert list(example.choices) == [f" {choice}" for choice in FRUIT]
        else:
            assert " Choices: A. a pear. B. a stone." in example.text


def test_stages_measure_choices_of_their_own_and_shifted_ones(data, decoder, tmp_path):
    command = "stages --task obqa_texts --steps 6 --members 1 --smoothing"
    paths = f"--data {data} --model {decoder} --cache {tmp_path}/cache"
    figures = run(f"{command} {paths}", tmp_path / "results")
    rows = rows_by(figures["methods"], "method", "prior")
    assert ("staged_1_student", "swapped") in rows
    # Long choices are far less probable than short ones to a model that has learnt
    # nothing.
    assert all(0 < row["nll"] < 100 for row in rows.values())
    shifted = rows["staged_1", "held_out"]["shifted"]
    assert set(shifted) == {"ARC-Easy", "ARC-Challenge"}
    assert all("nll" in of_set for of_set in shifted.values())

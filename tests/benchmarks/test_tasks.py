"""The tasks: what is read from a source or a row, and how sets are drawn of it."""

import json
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
from tests.benchmarks.support import PROMPTS, ROWS, parsed, pool, write_task

# Of each task of balanced classes, how many it has, and how many files of a library it
# needs.
BALANCED = [
    ("submodules", 12, 150),
    ("exceptions", 4, 20),
    ("types", 8, 20),
    ("belongs", 2, 5),
    ("sections", 6, 5),
    ("verbs", 10, 60),
    ("comments", 2, 5),
    ("defaults", 2, 10),
]
FEW_FILES = 5  # are read so quickly that they can be read again


@pytest.mark.parametrize(("name", "n_classes", "files"), BALANCED)
def test_sets_are_balanced_disjoint_and_reproducible(name, n_classes, files):
    def read(seed):
        options = parsed(
            "stages --quiet",
            task=name,
            files_per_library=files,
            train_examples=n_classes,
            test_examples=2 * n_classes,
        )
        return TASKS[name].read(options, seed)

    task = read(1)
    if files == FEW_FILES:
        assert task == read(1)
        assert task.train != read(2).train
    assert len(task.classes) == n_classes
    labels = list(range(n_classes))
    assert sorted(one.label for one in task.train) == labels
    assert sorted(one.label for one in task.test) == sorted(labels * 2)
    texts = {str(one.text).casefold() for one in task.train + task.test}
    assert len(texts) == 3 * n_classes


@pytest.mark.parametrize("name", ["docstrings", "names", "choices"])
def test_shifted_texts_are_of_another_library_and(name):
    options = parsed(
        "stages --quiet",
        task=name,
        files_per_library=30,
        train_examples=10,
        test_examples=5,
        shifted_examples=5,
    )
    task = TASKS[name].read(options, 0)
    labels = [one.label for one in task.shifted["matplotlib"]]
    assert len(labels) == 5
    if name == "docstrings":  # matplotlib is none of the libraries to choose from
        assert labels == [None] * 5
    texts = {one.text for one in (*task.train, *task.test)}
    assert len(texts) == 15
    assert task.is_prompt == (name == "choices")


def test_texts_of_an_unseen_library_have_labels_and_are_none_of_the_others():
    options = parsed(
        "stages --quiet",
        task="sections",
        files_per_library=20,
        train_examples=12,
        test_examples=12,
        shifted_examples=12,
    )
    task = TASKS["sections"].read(options, 0)
    unseen = task.shifted["sklearn"]
    assert 0 < len(unseen) <= 12
    for one in unseen:
        assert 0 <= one.label < len(task.classes)
    assert not {one.text for one in unseen} & {
        one.text for one in (*task.train, *task.test)
    }
    # They come from one library, which the others leave out.
    of_unseen = set(SECTION_OF.find(["sklearn"], options, 0))
    assert {(task.classes[one.label], one.text) for one in unseen} <= of_unseen
    assert "sklearn" not in SECTION_OF.libraries


def test_half_of_the_names_fit_and_the_others_are_of_the_same_file():
    by_name = {one.name: one for one in pool()}
    examples = list(asked_for_match(pool(), random.Random(0)))
    assert sum(example.label for example in examples) == len(examples) / 2
    for one, example in zip(pool(), examples, strict=True):
        name, summary = example.text
        assert summary == one.summary
        assert (name == one.name) == bool(example.label)
        assert by_name[name].file == one.file


def test_one_of_four_names_is_right():
    examples = asked_for_choice(pool(), random.Random(0))
    for one, example in zip(pool(), examples, strict=True):
        choices = re.findall(r"([A-D])\. (name \d+)\.", example.text)
        letters = [letter for letter, _ in choices]
        names = [name for _, name in choices]
        assert letters == list(LETTERS)
        assert len(set(names)) == 4
        assert names[example.label] == one.name
        assert one.summary.lower() in example.text


@pytest.mark.parametrize("name", PAPER_TASKS)
def test_rows_of_a_folder_and_of_the_hub_become_the_papers_prompts_and_pairs(
    name, tmp_path, monkeypatch
):
    rows, pairs = ROWS[name]
    expected = [Example(text, label) for text, label in pairs]
    asked = []
    write_task(name, tmp_path)

    def load_dataset(dataset, configuration, split):
        asked.append((dataset, configuration, split))
        return rows

    monkeypatch.setitem(
        sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset)
    )
    of_folder = read_paper_task(name, tmp_path)
    of_hub = read_paper_task(name)
    assert of_folder.test == expected[:1]
    assert of_hub.test == expected
    for task in (of_folder, of_hub):
        assert task.train == expected
        assert task.is_prompt == (expected[0][0] in PROMPTS)
        assert all(0 <= one.label < len(task.classes) for one in task.train)
    paper = PAPER_TASKS[name]
    assert asked == [
        (paper.dataset, paper.configuration, "train"),
        (paper.dataset, paper.configuration, "validation"),
    ]
    # What is cut of a long prompt is not where the answer comes from.
    ends_with_choices = paper.is_prompt and name != "boolq"
    assert paper.truncation_side == ("left" if ends_with_choices else "right")


def write_intents(folder):
    """Write CLINC's two splits: two domains of two intents, and texts out of scope."""
    folder = folder / "clinc" / "clinc_oos" / "plus"
    folder.mkdir(parents=True)
    intents = {
        "travel": ["visa", "flight"],
        "banking": ["balance", "transfer"],
        "oos": ["oos"],
    }
    for split in ("train", "test"):
        rows = [
            {"text": f"{split} {intent} {number}", "intent": intent, "domain": domain}
            for domain, names in intents.items()
            for intent in names
            for number in range(4)
        ]
        lines = [json.dumps(row) for row in rows]
        (folder / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def words_at(place, examples) -> set[str]:
    return {one.text.split()[place] for one in examples}


def test_intents_come_from_their_own_splits_and_others_are_foreign(tmp_path):
    write_intents(tmp_path)

    def read(seed, name="travel"):
        options = parsed("stages --quiet", task=name, data=tmp_path, train_examples=6)
        return TASKS[name].read(options, seed)

    task = read(0)
    assert task == read(0)
    assert task.train != read(1).train
    assert list(task.classes) == ["flight", "visa"]
    assert [one.label for one in task.train] == [0, 1, 0, 1, 0, 1]
    for one in (*task.train, *task.test):
        assert task.classes[one.label] in one.text
    # A text begins with its split and its intent.
    assert words_at(0, task.train) == {"train"}
    assert words_at(0, task.test) == {"test"}
    assert words_at(1, task.shifted["oos"]) == {"oos"}
    assert words_at(1, task.shifted["other domains"]) == {"balance", "transfer"}
    assert list(read(0, "clinc150").shifted) == ["oos", "typos"]
    for right, typed in zip(task.test, task.shifted["typos"], strict=True):
        assert typed.label == right.label
        assert sorted(typed.text) == sorted(right.text)


def test_typos_are_within_the_longer_words():
    text = "how can i reschedule my flight"
    mistyped_words = mistyped(text, random.Random(1)).split()
    assert mistyped_words != text.split()
    for word, typed in zip(text.split(), mistyped_words, strict=True):
        assert sorted(typed) == sorted(word)
        assert typed[0] == word[0]
        assert typed[-1] == word[-1]
        assert len(word) >= 4 or typed == word


def test_intents_without_a_folder_say_what_to_give():
    with pytest.raises(SystemExit, match="give --data FOLDER"):
        TASKS["travel"].read(parsed("stages --quiet", task="travel"), 0)

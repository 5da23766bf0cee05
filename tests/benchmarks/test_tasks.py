"""The tasks: what is read from a source or a row, and how sets are drawn of it."""

import random
import re
import sys
from types import SimpleNamespace

import pytest

from benchmarks.tasks import TASKS
from benchmarks.tasks.names import asked_for_choice, asked_for_match
from benchmarks.tasks.paper import PAPER_TASKS, read_paper_task
from benchmarks.tasks.paper_prompts import LETTERS
from tests.benchmarks.support import PROMPTS, ROWS, parsed, pool, write_task

# Of each task of balanced classes, how many it has, and how many files of a library it needs.
BALANCED = {
    **{"submodules": (12, 150), "exceptions": (4, 20), "types": (8, 20), "belongs": (2, 5)},
    **{"sections": (6, 5), "verbs": (10, 60), "comments": (2, 5), "defaults": (2, 10)},
}


@pytest.mark.parametrize("name", BALANCED)
def test_sets_are_balanced_disjoint_and_reproducible(name):
    n_classes, files = BALANCED[name]

    def read(seed):
        sizes = {"train_examples": n_classes, "test_examples": 2 * n_classes}
        options = parsed("stages --quiet", task=name, files_per_library=files, **sizes)
        return TASKS[name].read(options, seed)

    task = read(1)
    if files == 5:
        assert task == read(1)
        assert task.train != read(2).train
    assert len(task.classes) == n_classes
    for texts, of_each in zip((task.train, task.test), (1, 2), strict=True):
        assert sorted(one.label for one in texts) == sorted([*range(n_classes)] * of_each)
    assert len({str(one.text).casefold() for one in task.train + task.test}) == 3 * n_classes


@pytest.mark.parametrize("name", ["docstrings", "names", "choices"])
def test_shifted_texts_are_of_another_library_and(name):
    sizes = {"train_examples": 10, "test_examples": 5, "shifted_examples": 5}
    options = parsed("stages --quiet", task=name, files_per_library=30, **sizes)
    task = TASKS[name].read(options, 0)
    labels = [label for _, label in task.shifted["matplotlib"]]
    assert len(labels) == 5
    assert name != "docstrings" or labels == [None] * 5
    assert len({text for part in (task.train, task.test) for text, _ in part}) == 15
    assert task.is_prompt == (name == "choices")


def test_questions_about_names_have_one_right_answer():
    of = {one.name: one for one in pool()}
    matches = list(asked_for_match(pool(), random.Random(0)))
    assert sum(label for _, label in matches) == len(matches) / 2
    asked = asked_for_choice(pool(), random.Random(0))
    for one, ((name, summary), matched), (prompt, label) in zip(
        pool(), matches, asked, strict=True
    ):
        assert summary == one.summary
        assert (name == one.name) == bool(matched)
        assert of[name].file == one.file
        offered = re.findall(r"([A-D])\. (name \d+)\.", prompt)
        assert [letter for letter, _ in offered] == list(LETTERS)
        assert len({name for _, name in offered}) == 4
        assert offered[label][1] == one.name
        assert one.summary.lower() in prompt


@pytest.mark.parametrize("name", PAPER_TASKS)
def test_rows_of_a_folder_and_of_the_hub_become_the_papers_prompts_and_pairs(
    name, tmp_path, monkeypatch
):
    (rows, expected), asked = ROWS[name], []
    write_task(name, tmp_path)

    def load_dataset(dataset, configuration, split):
        asked.append((dataset, configuration, split))
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    paper = PAPER_TASKS[name]
    for task, n_test in ((read_paper_task(name, tmp_path), 1), (read_paper_task(name), None)):
        assert task.train == expected
        assert task.test == expected[:n_test]
        assert task.is_prompt == (expected[0][0] in PROMPTS)
        assert all(0 <= label < len(task.classes) for _, label in task.train)
    names = (paper.dataset, paper.configuration)
    assert asked == [(*names, "train"), (*names, "validation")]
    # What is cut of a long prompt is not where the answer comes from.
    ends_with_choices = name not in ("boolq", "boolq_pairs") and paper.is_prompt
    assert paper.truncation_side == ("left" if ends_with_choices else "right")

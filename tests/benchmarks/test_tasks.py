"""The tasks: what is read from a source or a row, and how sets are drawn of it."""

import random
import re
import sys
from types import SimpleNamespace

import pytest

from benchmarks.models import MissingDataError
from benchmarks.tasks import TASKS
from benchmarks.tasks.balanced import Balanced
from benchmarks.tasks.names import asked_for_choice, asked_for_match
from benchmarks.tasks.numpydoc import VERDICTS, Parameter, pairs
from benchmarks.tasks.paper import PAPER_TASKS, read_paper_task
from benchmarks.tasks.paper_prompts import LETTERS
from benchmarks.tasks.task import Example, Sizes
from tests.benchmarks.support import PROMPTS, ROWS, parsed, pool, write_rows, write_task

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


def test_a_text_of_two_classes_is_left_out():
    texts = {"a": ["One.", "Both.", "one."], "b": [("Pair", "a"), "both."], "c": ["Out.", "Both."]}
    found = [(key, text) for key, of_class in texts.items() for text in of_class]
    source = Balanced("t", ("a", "b"), Sizes(0, 0), lambda *_: found, shifted="c")
    task = source.draw(None, 0, Sizes(2, 0, 1))
    assert task.train == [Example("one.", 0), Example(("Pair", "a"), 1)]
    assert task.shifted == {"c": [Example("Out.", None)]}
    for sizes, message in ((Sizes(2, 1, 1), "a has too few"), (Sizes(2, 0, 2), "c has only 1")):
        with pytest.raises(ValueError, match=f"{message} texts; ask for fewer"):
            source.draw(None, 0, sizes)


def test_wrong_pairs_are_of_one_file_and_not_true_of_another_function():
    parameters = [
        Parameter("n", "int", f"Description {description}.", f"Summary {summary}.", file)
        for description, summary, file in (
            *((0, "a", 0), (0, "b", 0), (1, "a", 0), (2, "c", 0), (3, "d", 1), (4, "d", 1)),
            *((number, number % 3, 2) for number in range(10, 40)),
        )
    ]
    true = {(one.summary, one.description) for one in parameters}
    file_of = {one.summary: one.file for one in parameters}
    file_of_description = {one.description: one.file for one in parameters}
    for seed in range(5):
        found = list(pairs(parameters, random.Random(seed)))
        wrong, right = ([pair for key, pair in found if key == verdict] for verdict in VERDICTS)
        assert ("Summary c.", "Description 0.") in wrong
        assert (len(wrong), len(right)) == (17, 16)
        assert set(right) <= true
        assert not set(wrong) & true
        assert all(file_of[one] == file_of_description[other] for one, other in wrong)


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


def test_every_missing_file_is_named_at_once_and_another_schema_is_refused(tmp_path):
    folder = tmp_path / "allenai" / "openbookqa" / "main"
    with pytest.raises(MissingDataError) as error:
        read_paper_task("obqa", tmp_path)
    assert str(error.value) == (
        f"The data in {tmp_path} are incomplete: download from https://huggingface.co/datasets, "
        "and save as JSON lines, allenai/openbookqa (main), split train, as "
        f"{folder}/train.jsonl; allenai/openbookqa (main), split validation, as "
        f"{folder}/validation.jsonl."
    )
    write_task("rte", tmp_path)
    write_rows(PAPER_TASKS["rte"].sources[1], tmp_path, [{"premise": "It rains.", "label": 0}])
    with pytest.raises(ValueError, match=r"nyu-mll/glue \(rte\), split validation.*'sentence1'"):
        read_paper_task("rte", tmp_path)

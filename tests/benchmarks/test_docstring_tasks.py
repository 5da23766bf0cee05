"""The embedded tasks: texts from installed sources, and what is asked about them."""

import ast
import random
import re

import pytest

from benchmarks.models import encoder_folder
from benchmarks.tasks import TASKS
from benchmarks.tasks.docstrings import LIBRARIES, docstring_summaries, masked
from benchmarks.tasks.names import asked_for_choice, asked_for_match, spoken
from benchmarks.tasks.paper_prompts import LETTERS
from tests.benchmarks.support import parsed, pool


def test_summaries_are_those_of_public_functions_and_classes():
    source = '''
def shown(x):
    """First line
    goes on.

    Second paragraph.
    """

def _hidden():
    """Not public."""

class Shown:
    """A class."""

    def method(self):
        """A method."""

def bare(): ...
'''
    assert dict(docstring_summaries(ast.parse(source))) == {
        "shown": "First line goes on.",
        "Shown": "A class.",
        "method": "A method.",
    }


@pytest.mark.parametrize(
    "text", ["NumPy array", "a np.ndarray", "PyTorch tensor", "nx.Graph", "SymPyError", "scipy's"]
)
def test_library_names_are_masked(text):
    for name in ("numpy", "scipy", "networkx", "sympy", "torch", "np.", "nx."):
        assert name not in masked(text).lower()


def test_docstrings_are_balanced_disjoint_and_reproducible():
    sizes = {"train_examples": 10, "test_examples": 15, "shifted_examples": 5}
    options = parsed("stages --quiet", files_per_library=30, **sizes)
    first, second = (TASKS["docstrings"].read(options, 3) for _ in range(2))
    assert first == second
    parts = (first.train, first.test)
    assert [len(part) for part in parts] == [10, 15]
    texts = [text for part in parts for text, _ in part]
    assert len({text.casefold() for text in texts}) == 25
    labels = [label for _, label in first.test]
    assert sorted(labels) == sorted(list(range(len(LIBRARIES))) * 3)
    assert [label for _, label in first.shifted["matplotlib"]] == [None] * 5


@pytest.mark.parametrize("name", ["names", "choices"])
def test_tasks_of_names_are_disjoint_and_of_the_sizes_asked_for(name):
    sizes = {"train_examples": 10, "test_examples": 6, "shifted_examples": 5}
    options = parsed("stages --quiet", task=name, files_per_library=30, **sizes)
    task = TASKS[name].read(options, 0)
    assert [len(part) for part in (task.train, task.test)] == [10, 6]
    assert len({text for part in (task.train, task.test) for text, _ in part}) == 16
    assert len(task.shifted["matplotlib"]) == 5
    assert task.is_prompt == (name == "choices")


def test_the_encoders_weights_are_checked(monkeypatch):
    monkeypatch.setattr("benchmarks.models.WEIGHTS_SHA256", "0" * 64)
    with pytest.raises(RuntimeError, match="SHA-256"):
        encoder_folder()


def test_names_are_words():
    assert spoken("minimumEdge_cut") == "minimum edge cut"
    assert spoken("numpy_scalar") == "library scalar"


def test_half_of_the_names_match_and_wrong_ones_are_of_the_same_file():
    of = {one.name: one for one in pool()}
    examples = list(asked_for_match(pool(), random.Random(0)))
    assert sum(label for _, label in examples) == len(examples) / 2
    for one, ((name, summary), label) in zip(pool(), examples, strict=True):
        assert summary == one.summary
        assert (name == one.name) == bool(label)
        assert of[name].file == one.file


def test_four_different_names_are_offered_and_the_right_one_is_the_label():
    asked = asked_for_choice(pool(), random.Random(0))
    for one, (prompt, label) in zip(pool(), asked, strict=True):
        offered = re.findall(r"([A-D])\. (name \d+)\.", prompt)
        assert [letter for letter, _ in offered] == list(LETTERS)
        assert len({name for _, name in offered}) == 4
        assert offered[label][1] == one.name
        assert one.summary.lower() in prompt

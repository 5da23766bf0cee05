"""The tasks of balanced classes: what is read from a source, and how sets are drawn of it."""

import ast
import random

import pytest

from benchmarks.tasks import TASKS
from benchmarks.tasks.balanced import Balanced
from benchmarks.tasks.code import commented, raised
from benchmarks.tasks.numpydoc import VERDICTS, Parameter, described, flags, pairs, paragraphs
from benchmarks.tasks.task import Example, Sizes
from tests.benchmarks.support import parsed

CLASSES = {"submodules": 12, "exceptions": 4, "types": 8, "belongs": 2}
CLASSES |= {"sections": 6, "verbs": 10, "comments": 2, "defaults": 2}
FILES = {"submodules": 300, "verbs": 300, "belongs": 20, "comments": 5}  # of each library; or 40
DOCUMENTED = '''
def scale(a, b):
    """Scale all entries of an array.

    Parameters
    ----------
    a : (N,) array_like, optional
        The entries that are scaled by NumPy.

        A second paragraph.
    b : float
        The factor.

    Returns
    -------
    c : ndarray
        The entries after they are scaled.
    """

def _hidden(a):
    """Scale all entries of an array.

    Parameters
    ----------
    a : int
        A number that is not public at all.
    """
'''


SECTIONED = '''
def arrange(matrix, key=None, *, copy=False, size=3):
    """Arrange columns.

    Parameters
    ----------
    matrix : ndarray
        The matrix that all of the columns are taken from.
    key : callable

    copy : bool, default=False
        Whether all columns are to be copied. The default is to copy none.

    Notes
    -----
    NumPy sorts them in place, so that nothing else is held.

    >>> arrange(matrix) is the same as sorting the columns of a matrix
    """
'''


@pytest.mark.parametrize("name", CLASSES)
def test_sets_are_balanced_disjoint_and_reproducible(name):
    def read(seed):
        each = {"train_examples": len(classes), "test_examples": 2 * len(classes)}
        options = parsed("stages --quiet", task=name, files_per_library=FILES.get(name, 40), **each)
        return TASKS[name].read(options, seed)

    classes = CLASSES[name] * "x"
    task = read(1)
    assert task == read(1)
    assert len(task.classes) == len(classes)
    assert not task.shifted
    sets = (task.train, task.test)
    for texts, of_each in zip(sets, (1, 2), strict=True):
        assert sorted(one.label for one in texts) == sorted([*range(len(classes))] * of_each)
    assert len({one.text for texts in sets for one in texts}) == 3 * len(classes)


def test_the_sets_of_another_seed_are_others():
    sizes = {"train_examples": 2, "test_examples": 2}
    options = parsed("stages --quiet", task="belongs", files_per_library=20, **sizes)
    read = TASKS["belongs"].read
    assert read(options, 0).train != read(options, 1).train


def test_a_text_of_two_classes_is_left_out():
    texts = {"a": ["One.", "Both.", "one."], "b": [("Pair", "a"), "both."], "c": ["Out.", "Both."]}
    found = [(key, text) for key, of_class in texts.items() for text in of_class]
    source = Balanced("t", ("a", "b"), Sizes(0, 0), lambda *_: found, shifted="c")
    task = source.draw(None, 0, Sizes(2, 0, 1))
    assert task.train == [Example("one.", 0), Example(("Pair", "a"), 1)]
    assert task.shifted == {"c": [Example("Out.", None)]}
    with pytest.raises(ValueError, match="a has too few texts; ask for fewer"):
        source.draw(None, 0, Sizes(2, 1, 1))
    with pytest.raises(ValueError, match="c has only 1 texts; ask for fewer"):
        source.draw(None, 0, Sizes(2, 0, 2))


def test_messages_are_those_that_are_raised_and_do_not_name_their_exception():
    source = """
raise ValueError("the numpy array must be square")
raise TypeError(f"expected a list, got {type(x)} instead")
raise RuntimeError("too short")
raise TypeError("this is why a TypeError is raised")
raise ValueError(message)
raise errors.ValueError("this is another module's own")
raise
"""
    assert list(raised(ast.parse(source))) == [
        ("ValueError", "the library array must be square"),
        ("TypeError", "expected a list, got ... instead"),
    ]


def test_parameters_are_those_that_public_docstrings_describe():
    (found,) = described(ast.parse(DOCUMENTED), 3)
    summary = "Scale all entries of an array."
    assert found == Parameter("a", "(N", "The entries that are scaled by library.", summary, 3)


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
        assert len(wrong) == 17
        assert len(right) == 16
        assert set(right) <= true
        assert not set(wrong) & true
        assert all(file_of[one] == file_of_description[other] for one, other in wrong)


def test_a_description_of_two_types_is_left_out(monkeypatch):
    kinds = ("array", "bool", "int", "float", "str", "callable", "dict", "list")
    found = [
        Parameter("x", kind, description, "", 0)
        for kind in kinds
        for description in ("Of every type.", f"Of {kind}.")
    ]
    monkeypatch.setattr("benchmarks.tasks.numpydoc.read_parameters", lambda *_: found)
    options = parsed("stages --quiet", train_examples=8, test_examples=8)
    with pytest.raises(ValueError, match="array has too few texts"):
        TASKS["types"].read(options, 0)
    found += [Parameter("x", kind, f"Also of {kind}.", "", 0) for kind in kinds]
    texts = [text for text, _ in TASKS["types"].read(options, 0).train]
    assert "Of every type." not in texts


def test_paragraphs_are_of_their_section_without_the_names_of_entries():
    assert list(paragraphs(ast.parse(SECTIONED))) == [
        ("Parameters", "The matrix that all of the columns are taken from."),
        ("Parameters", "Whether all columns are to be copied. The default is to copy none."),
        ("Notes", "library sorts them in place, so that nothing else is held."),
    ]


def test_a_flags_description_does_not_tell_its_default():
    assert list(flags(ast.parse(SECTIONED))) == [("False", "Whether all columns are to be copied.")]


def test_comments_are_paired_with_the_line_below_them():
    source = """
# A heading that stands alone.

    # Sort the columns by their norms.
    columns = sorted(columns, key=norm)
    # Too short.
    columns = columns[::-1] + []
    # The block below is indented further.
        rows = list(columns)
"""
    found = ("Sort the columns by their norms.", "columns = sorted(columns, key=norm)")
    assert list(commented(source)) == [found]

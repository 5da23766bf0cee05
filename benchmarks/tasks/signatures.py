"""A task of labels of tokens: which type each parameter of a function has, by names."""

import ast
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.tasks.balanced import ENCODER
from benchmarks.tasks.docstrings import first_paragraph
from benchmarks.tasks.drawn import Drawn
from benchmarks.tasks.names import spoken
from benchmarks.tasks.numpydoc import (
    LIBRARIES,
    MINIMUM_WORDS,
    TYPES,
    WRITTEN_TYPES,
    entries,
    first_word_of,
)
from benchmarks.tasks.sources import UNSEEN_LIBRARY, in_each
from benchmarks.tasks.task import UNLABELLED, Example, Sizes

CLASSES = tuple(WRITTEN_TYPES)
N_PARAMETERS = range(2, 9)  # more would leave no room for the summary
MINIMUM_KNOWN = 2  # parameters whose type is one of the classes
# Parameters come first, so that none is cut off.
SIGNATURES = replace(ENCODER, maximum_length=48)


def signatures(tree: ast.AST) -> Iterator[Example]:
    """Yield names, parameters and summaries of functions, with a class of each word."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        docstring = ast.get_docstring(node) or ""
        summary = first_paragraph(docstring)
        if node.name.startswith("_") or len(summary.split()) < MINIMUM_WORDS:
            continue
        parameters = entries(docstring)
        types = [TYPES.get(first_word_of(entry.type)) for entry in parameters]
        n_known = len(types) - types.count(None)
        if len(types) not in N_PARAMETERS or n_known < MINIMUM_KNOWN:
            continue
        words: list[str] = []
        classes: list[int] = []
        for entry, kind in zip(parameters, types, strict=True):
            label = UNLABELLED if kind is None else CLASSES.index(kind)
            words += [entry.name, ","]
            classes += [label, UNLABELLED]
        # The name and the summary tell what the parameters are of.
        others = f"{spoken(node.name)} : {summary}".split()
        words += others
        classes += [UNLABELLED] * len(others)
        yield Example(" ".join(words), None, word_labels=tuple(classes))


PARAMETER_TYPES = Drawn(
    name="signatures",
    classes=CLASSES,
    sizes=Sizes(train=200, test=200, shifted=150),
    libraries=LIBRARIES,
    unseen=UNSEEN_LIBRARY,
    find=in_each(signatures),
    hyperparameters=SIGNATURES,
)

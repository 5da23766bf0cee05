"""Tasks of code: messages of exceptions, and comments of lines."""

import ast
import random
import re
from collections.abc import Iterator, Sequence

from benchmarks.options import Reading
from benchmarks.tasks.balanced import PAIRS, Balanced, Labelled
from benchmarks.tasks.docstrings import (
    LIBRARIES,
    SHIFTED_LIBRARY,
    UNSEEN_LIBRARY,
    drawn_files,
    in_each,
    masked,
)
from benchmarks.tasks.task import Sizes

MINIMUM_WORDS = 4
MINIMUM_LETTERS = 10  # of a line of code; a shorter one says too little
KINDS = ("ValueError", "TypeError", "RuntimeError", "NotImplementedError")
BLANK = "..."  # in place of a value in an f-string
VERDICTS = ("another line", "this line")
# A comment with a line to itself, and the code below it that is indented alike.
COMMENTED = re.compile(
    r"^(?P<indent>[ ]*)# (?P<comment>[A-Z].*)\n(?P=indent)(?P<line>[^#\s].*)",
    re.MULTILINE,
)


def raised(tree: ast.AST) -> Iterator[Labelled]:
    """Yield the name and message of each exception raised with a literal message."""
    for node in ast.walk(tree):
        match node:
            case ast.Raise(exc=ast.Call(func=ast.Name(id=name), args=[message, *_])):
                text = masked(literal(message))
                n_words = len(text.split())
                # A message that names its exception would give the answer away.
                if n_words >= MINIMUM_WORDS and name not in text:
                    yield name, text


def literal(node: ast.AST) -> str:
    """Return a string's text, with blanks for values; "" for other expressions."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(literal(value) or BLANK for value in values)
    return ""


def find_commented(
    libraries: Sequence[str], options: Reading, seed: int
) -> Iterator[Labelled]:
    """Yield pairs of a comment and a line, every second with another line."""
    generator = random.Random(seed)
    for path in drawn_files(libraries, options, seed):
        source = path.read_text(encoding="utf-8")
        pairs = list(commented(source))
        # Of the same file: a line of another would be too easy to tell.
        lines = {line for _, line in pairs}
        for place, (comment, line) in enumerate(pairs):
            # Sorted, so that the same seed draws the same line in every process.
            others = sorted(lines - {line})
            if not others:
                continue
            is_right = place % 2
            shown = line if is_right else generator.choice(others)
            yield VERDICTS[is_right], (comment, shown)


def commented(source: str) -> Iterator[tuple[str, str]]:
    """Yield each comment that has a line to itself, and the line of code below it."""
    for match in COMMENTED.finditer(source):
        comment = match["comment"].strip()
        line = match["line"].strip()
        n_words = len(comment.split())
        if n_words >= MINIMUM_WORDS and len(line) >= MINIMUM_LETTERS:
            yield comment, line


EXCEPTIONS = Balanced(
    name="exceptions",
    classes=KINDS,
    sizes=Sizes(train=100, test=500, shifted=300),
    libraries=(*LIBRARIES, SHIFTED_LIBRARY),
    find=in_each(raised),
    unseen=UNSEEN_LIBRARY,
)
COMMENTS = Balanced(
    name="comments",
    classes=VERDICTS,
    sizes=Sizes(train=600, test=500, shifted=300),
    libraries=LIBRARIES,
    find=find_commented,
    unseen=UNSEEN_LIBRARY,
    hyperparameters=PAIRS,
)

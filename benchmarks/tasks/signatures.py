"""A task of labels of tokens: which type each parameter of a function has, by names."""

import ast
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.models import encoder_folder
from benchmarks.options import Reading, TextRun
from benchmarks.tasks.balanced import ENCODER
from benchmarks.tasks.docstrings import first_paragraph
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
from benchmarks.tasks.task import UNLABELLED, Example, Sizes, Task
from benchmarks.training import Hyperparameters

CLASSES = tuple(WRITTEN_TYPES)
N_PARAMETERS = range(2, 9)
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
            words += [entry.name, ","]
            classes += [UNLABELLED if kind is None else CLASSES.index(kind), UNLABELLED]
        # The name and the summary tell what the parameters are of.
        others = [*spoken(node.name).split(), ":", *summary.split()]
        text = " ".join([*words, *others])
        yield Example(text, None, word_labels=(*classes, *[UNLABELLED] * len(others)))


@dataclass(frozen=True)
class OfWords:
    """A task for the encoder, of texts whose words have classes."""

    name: str
    classes: Sequence[str]
    sizes: Sizes
    libraries: Sequence[str]
    unseen: str  # library of whose texts none is trained on
    find: Callable[[Sequence[str], Reading, int], Iterator[Example]]
    hyperparameters: Hyperparameters

    def model(self, _: TextRun) -> Path:
        """Find the encoder, the same for all options."""
        return encoder_folder()

    def read(self, options: TextRun, seed: int) -> Task:
        """Draw disjoint sets, of which no two texts have the same labelled words."""
        sizes = self.sizes.asked(options)
        known: set[tuple[str, ...]] = set()
        of_libraries = self._drawn(self.libraries, options, seed, known)
        of_unseen = self._drawn([self.unseen], options, seed, known)
        n_known = sizes.train + sizes.test
        if len(of_libraries) < n_known:
            raise ValueError(
                f"There are {len(of_libraries)} texts for {self.name}; ask for fewer."
            )
        return Task(
            name=self.name,
            classes=self.classes,
            is_prompt=False,
            train=of_libraries[: sizes.train],
            test=of_libraries[sizes.train : n_known],
            shifted={self.unseen: of_unseen[: sizes.shifted]},
        )

    def _drawn(
        self,
        libraries: Sequence[str],
        options: TextRun,
        seed: int,
        known: set[tuple[str, ...]],
    ) -> list[Example]:
        """Collect texts whose labelled words are not known yet, in a random order."""
        examples = []
        for example in self.find(libraries, options, seed):
            labelled = example.labelled_words
            if labelled not in known:
                known.add(labelled)
                examples.append(example)
        random.Random(seed).shuffle(examples)
        return examples


PARAMETER_TYPES = OfWords(
    name="signatures",
    classes=CLASSES,
    sizes=Sizes(train=200, test=200, shifted=150),
    libraries=LIBRARIES,
    unseen=UNSEEN_LIBRARY,
    find=in_each(signatures),
    hyperparameters=SIGNATURES,
)

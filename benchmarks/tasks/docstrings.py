"""The task docstrings: which library a docstring's summary documents."""

import random
from collections import Counter
from collections.abc import Sequence

from benchmarks.models import encoder_folder
from benchmarks.options import TextRun
from benchmarks.tasks.sources import LIBRARIES, SHIFTED_LIBRARY, read_library
from benchmarks.tasks.task import Example, Sizes, Task, TaskSource
from benchmarks.training import Hyperparameters

ENCODER = Hyperparameters(
    model="all-MiniLM-L6-v2",
    target_modules=("query", "value"),
    batch_size=16,
    maximum_length=32,
    learning_rate=2e-3,
    steps=375,
    checkpoints=5,
    warmup_steps=20,
)


def read(options: TextRun, seed: int, validation: int) -> Task:
    """Draw the texts that the options ask for."""
    sizes = Sizes(300, validation, 500, 200).asked(options)
    return read_docstrings(sizes, seed, options.files_per_library, not options.quiet)


def read_docstrings(
    sizes: Sizes, seed: int, files_per_library: int | None, show_progress: bool
) -> Task:
    """Draw balanced, disjoint sets of texts; a label is the library's place in `LIBRARIES`."""
    libraries = (*LIBRARIES, SHIFTED_LIBRARY)
    found = [read_library(library, seed, files_per_library, show_progress) for library in libraries]
    texts = without_shared([[one.summary for one in of_library] for of_library in found])
    generator = random.Random(seed)
    for library_texts in texts:
        generator.shuffle(library_texts)

    def draw(count: int) -> list[Example]:
        examples = []
        for place in range(count):
            label = place % len(LIBRARIES)
            if not texts[label]:
                raise ValueError(
                    f"The installed {LIBRARIES[label]} has too few docstrings for these sizes; "
                    "ask for fewer examples or more files."
                )
            examples.append(Example(texts[label].pop(), label))
        return examples

    shifted = texts[-1]
    if len(shifted) < sizes.shifted:
        raise ValueError(
            f"The installed {SHIFTED_LIBRARY} has only {len(shifted)} texts; "
            "ask for fewer of them or more files."
        )
    train, validation, test = (draw(count) for count in (sizes.train, sizes.validation, sizes.test))
    return Task(
        "docstrings",
        LIBRARIES,
        False,
        train,
        test,
        {SHIFTED_LIBRARY: [Example(text, None) for text in shifted[: sizes.shifted]]},
        validation,
    )


def without_shared(texts: Sequence[Sequence[str]]) -> list[list[str]]:
    """Drop every text that occurs in more than one library: it has no one right answer."""
    owners = Counter(text.casefold() for library_texts in texts for text in library_texts)
    return [
        [text for text in library_texts if owners[text.casefold()] == 1] for library_texts in texts
    ]


TASK = TaskSource("docstrings", read, lambda options: encoder_folder(), ENCODER)

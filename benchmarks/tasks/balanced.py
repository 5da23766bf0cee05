"""Tasks with as many texts of each class in each of their disjoint sets."""

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks import models
from benchmarks.options import TextRun
from benchmarks.tasks.task import Example, Sizes, Task
from benchmarks.training import Hyperparameters

ENCODER = Hyperparameters(
    model=models.ENCODER,
    target_modules=("query", "value"),
    batch_size=16,
    maximum_length=32,
    learning_rate=2e-3,
    steps=375,
    checkpoints=5,
    warmup_steps=20,
)
# Two texts are longer than one.
PAIRS = replace(ENCODER, maximum_length=48, steps=400)

Text = str | tuple[str, str]
Labelled = tuple[str, Text]  # a class, and a text of it
TextsByClass = dict[str, list[Text]]
# Yields each text of libraries with its class, in the order of the sources: the same
# texts in every run.
Find = Callable[[Sequence[str], TextRun, int], Iterable[Labelled]]


@dataclass(frozen=True)
class Balanced:
    """A task for the encoder, of texts that `find(libraries, options, seed)` yields."""

    name: str
    classes: Sequence[str]
    sizes: Sizes
    libraries: Sequence[str]
    find: Find
    hyperparameters: Hyperparameters = ENCODER
    # Class of texts from another distribution, which has no label.
    shifted: str | None = None
    unseen: str | None = None  # library apart, whose texts have labels

    def read(self, options: TextRun, seed: int) -> Task:
        """Draw disjoint sets, with equal numbers of texts from each class."""
        sizes = self.sizes.asked(options)
        texts = self._texts_by_class(self.libraries, options, seed)
        generator = random.Random(seed)
        for of_class in texts.values():
            generator.shuffle(of_class)
        shifted = {}
        if self.shifted is not None:
            shifted[self.shifted] = _without_label(self.shifted, texts, sizes.shifted)
        if self.unseen is not None:
            known = {_folded(text) for of_class in texts.values() for text in of_class}
            of_unseen = self._texts_by_class([self.unseen], options, seed)
            # A generator of its own: what is drawn here changes none of the other sets.
            examples = self._foreign(
                of_unseen, known, sizes.shifted, random.Random(seed)
            )
            if examples:  # a few files may have none
                shifted[self.unseen] = examples
        return Task(
            name=self.name,
            classes=self.classes,
            is_prompt=False,
            train=self._take(texts, sizes.train),
            test=self._take(texts, sizes.test),
            shifted=shifted,
        )

    def _texts_by_class(
        self, libraries: Sequence[str], options: TextRun, seed: int
    ) -> TextsByClass:
        """Collect each class's texts, without those of several classes."""
        classes = list(self.classes)
        if self.shifted is not None:
            classes.append(self.shifted)
        by_class: dict[str, dict[str, Text]] = {}
        for name in classes:
            by_class[name] = {}
        for name, text in self.find(libraries, options, seed):
            if name in by_class:
                by_class[name][_folded(text)] = text
        # A text that two classes have is no fair question.
        n_classes = Counter(folded for texts in by_class.values() for folded in texts)
        return {
            name: [text for folded, text in texts.items() if n_classes[folded] == 1]
            for name, texts in by_class.items()
        }

    def _foreign(
        self,
        texts: TextsByClass,
        known: Collection[str],
        count: int,
        generator: random.Random,
    ) -> list[Example]:
        """Draw examples that other sets can't have, from classes in turn."""
        left = {
            name: [text for text in of_class if _folded(text) not in known]
            for name, of_class in texts.items()
        }
        for of_class in left.values():
            generator.shuffle(of_class)
        examples = []
        for place in range(count):
            label = place % len(self.classes)
            of_class = left[self.classes[label]]
            if of_class:
                examples.append(Example(of_class.pop(), label))
        return examples

    def _take(self, texts: TextsByClass, count: int) -> list[Example]:
        """Take examples out of the texts that are left, the classes by turns."""
        labels = [place % len(self.classes) for place in range(count)]
        n_asked = Counter(labels)
        for label, name in enumerate(self.classes):
            if n_asked[label] > len(texts[name]):
                raise ValueError(f"{name} has too few texts; ask for fewer.")
        examples = []
        for label in labels:
            # Taken out, so that no set has a text of another.
            text = texts[self.classes[label]].pop()
            examples.append(Example(text, label))
        return examples


def _folded(text: Text) -> str:
    """Spell a text without regard to case."""
    return str(text).casefold()


def _without_label(name: str, texts: TextsByClass, count: int) -> list[Example]:
    """Return the first texts of a class that the model doesn't know."""
    known = texts[name]
    if count > len(known):
        raise ValueError(f"{name} has only {len(known)} texts; ask for fewer.")
    return [Example(text, None) for text in known[:count]]

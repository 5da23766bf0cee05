"""Tasks of texts with several labels each, or with labels of their words."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.models import encoder_folder
from benchmarks.options import Reading, TextRun
from benchmarks.tasks.balanced import ENCODER
from benchmarks.tasks.task import Example, Sizes, Task
from benchmarks.training import Hyperparameters


@dataclass(frozen=True)
class Drawn:
    """A task for the encoder, of texts with several labels each, drawn as they come."""

    name: str
    classes: Sequence[str]
    sizes: Sizes
    libraries: Sequence[str]
    unseen: str  # library of whose texts none is trained on
    find: Callable[[Sequence[str], Reading, int], Iterator[Example]]
    hyperparameters: Hyperparameters = ENCODER

    def model(self, _: TextRun) -> Path:
        """Find the encoder, the same for all options."""
        return encoder_folder()

    def read(self, options: TextRun, seed: int) -> Task:
        """Draw disjoint sets, of which no two texts are the same."""
        sizes = self.sizes.asked(options)
        # Shared: the unseen library may repeat a text of the others.
        known: set[object] = set()
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
        known: set[object],
    ) -> list[Example]:
        """Collect texts that are not known yet, in a random order."""
        examples = []
        for example in self.find(libraries, options, seed):
            if example.identity not in known:
                known.add(example.identity)
                examples.append(example)
        random.Random(seed).shuffle(examples)
        return examples

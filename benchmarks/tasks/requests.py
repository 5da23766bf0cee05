"""A task of several labels: which domains of CLINC150 a text asks about."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.models import encoder_folder
from benchmarks.options import TextRun
from benchmarks.tasks.intents import (
    CLINC,
    MANY_INTENTS,
    OUT_OF_SCOPE,
    TYPOS,
    with_typos,
)
from benchmarks.tasks.paper import read_from_folder
from benchmarks.tasks.paper_prompts import Row
from benchmarks.tasks.task import Example, Sizes, Task
from benchmarks.training import Hyperparameters

MOST_REQUESTS = 3  # that one text joins


@dataclass(frozen=True)
class Requests:
    """Texts that join one to three requests of users, each of any domain."""

    name: str
    sizes: Sizes
    hyperparameters: Hyperparameters

    def model(self, _: TextRun) -> Path:
        """Find the encoder, the same for all options."""
        return encoder_folder()

    def read(self, options: TextRun, seed: int) -> Task:
        """Draw training and test texts, each request of which is in one text alone."""
        train, test = read_from_folder(
            CLINC,
            options.data,
            f"{self.name} reads JSON lines with a text and the name of its domain",
        )
        known = [row for row in train if row["domain"] != OUT_OF_SCOPE]
        domains = sorted({row["domain"] for row in known})
        sizes = self.sizes.asked(options)
        generator = random.Random(seed)
        drawn = _joined(known, domains, sizes.train, generator)
        of_domains = [row for row in test if row["domain"] in domains]
        tested = _joined(of_domains, domains, sizes.test, generator)
        mistyped = with_typos(tested[: sizes.shifted], generator)
        return Task(
            name=self.name,
            classes=domains,
            is_prompt=False,
            train=drawn,
            test=tested,
            shifted={TYPOS: mistyped},
        )


def _joined(
    rows: Sequence[Row],
    domains: Sequence[str],
    count: int,
    generator: random.Random,
) -> list[Example]:
    """Join requests, drawn without replacement, to texts; label their domains."""
    lengths = [generator.randint(1, MOST_REQUESTS) for _ in range(count)]
    n_requests = sum(lengths)
    if n_requests > len(rows):
        raise ValueError(
            f"{count} texts take {n_requests} requests, and there are {len(rows)}; "
            "ask for fewer."
        )
    drawn = iter(generator.sample(rows, n_requests))
    examples = []
    for length in lengths:
        requests = [next(drawn) for _ in range(length)]
        asked = {request["domain"] for request in requests}
        labels = tuple(int(domain in asked) for domain in domains)
        text = " and ".join(request["text"] for request in requests)
        examples.append(Example(text, None, labels=labels))
    return examples


# Three requests are longer than one text of other tasks. Ten labels, each of them rare,
# take as many steps as many intents do: after 375 little is learnt.
REQUESTS = Requests(
    name="requests",
    sizes=Sizes(train=300, test=400, shifted=300),
    hyperparameters=replace(MANY_INTENTS, maximum_length=64),
)

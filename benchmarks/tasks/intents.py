"""Tasks of real intents: what a customer or a user of an assistant asks for.

CLINC150 (Larson et al., EMNLP 2019) has 150 intents of ten domains, and texts out of
their scope; banking77 (Casanueva et al., 2020) has 77 of one bank.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.models import encoder_folder
from benchmarks.options import TextRun
from benchmarks.tasks.balanced import ENCODER
from benchmarks.tasks.paper import read_from_folder
from benchmarks.tasks.paper_prompts import Row
from benchmarks.tasks.task import Example, Sizes, Task
from benchmarks.training import Hyperparameters

CLINC = ("clinc/clinc_oos", "plus")
BANKING = ("PolyAI/banking77", "default")
OUT_OF_SCOPE = "oos"  # CLINC's name of the intent and of the domain
OTHER_DOMAINS = "other domains"
TYPOS = "typos"
MISTYPED_WORDS = 0.5  # of those of four letters or more
TEXTS_AN_INTENT = 10
TEST_TEXTS_AN_INTENT = 30  # as many as CLINC150 has
SHIFTED = 300
# Many intents take more steps to be learnt by heart than the few classes of other
# tasks.
MANY_INTENTS = replace(ENCODER, steps=1200)


@dataclass(frozen=True)
class Intents:
    """Intents of a data set, or of a domain of CLINC, as many texts of each."""

    name: str
    dataset: tuple[str, str]
    domain: str | None = None
    test_an_intent: int = TEST_TEXTS_AN_INTENT
    hyperparameters: Hyperparameters = ENCODER

    def model(self, _: TextRun) -> Path:
        """Find the encoder, the same for all options."""
        return encoder_folder()

    def read(self, options: TextRun, seed: int) -> Task:
        """Draw training and test texts, in an order that the seed says."""
        train, test = read_from_folder(
            self.dataset,
            options.data,
            f"{self.name} reads JSON lines with a text, and the names of its intent "
            "and its domain",
        )
        classes = sorted({_intent(row) for row in train if self._is_known(row)})
        if not classes:
            raise SystemExit(f"CLINC150 has no domain {self.domain!r}.")
        sizes = Sizes(
            train=TEXTS_AN_INTENT * len(classes),
            test=self.test_an_intent * len(classes),
            shifted=SHIFTED,
        ).asked(options)
        generator = random.Random(seed)
        drawn = draw_by_class(train, classes, sizes.train, generator)
        tested = draw_by_class(test, classes, sizes.test, generator)
        shifted = self._shifted(test, sizes.shifted, generator)
        shifted[TYPOS] = with_typos(tested[: sizes.shifted], generator)
        return Task(
            name=self.name,
            classes=classes,
            is_prompt=False,
            train=drawn,
            test=tested,
            shifted=shifted,
            further=draw_further(train, classes, drawn, random.Random(seed)),
        )

    def _is_known(self, row: Row) -> bool:
        """Tell whether a row has one of the task's intents."""
        if _intent(row) == OUT_OF_SCOPE:
            return False
        return self.domain in (None, row.get("domain"))

    def _shifted(
        self, rows: Sequence[Row], count: int, generator: random.Random
    ) -> dict[str, list[Example]]:
        """Draw texts without a right answer, out of scope or of other domains."""
        out_of_scope: list[Row] = []
        of_other_domains: list[Row] = []
        for row in rows:
            if _intent(row) == OUT_OF_SCOPE:
                out_of_scope.append(row)
            elif not self._is_known(row):
                of_other_domains.append(row)
        unknown = {OUT_OF_SCOPE: out_of_scope, OTHER_DOMAINS: of_other_domains}
        shifted = {}
        for name, of_name in unknown.items():
            if of_name:  # banking77 has neither
                n_chosen = min(count, len(of_name))
                chosen = generator.sample(of_name, n_chosen)
                shifted[name] = [Example(row["text"], None) for row in chosen]
        return shifted


def with_typos(examples: Sequence[Example], generator: random.Random) -> list[Example]:
    """Mistype texts: labels are the same, and only the spelling differs."""
    changed = []
    for example in examples:
        text = mistyped(str(example.text), generator)
        changed.append(example._replace(text=text))
    return changed


def mistyped(text: str, generator: random.Random) -> str:
    """Let two neighbours within some of the longer words change places."""
    words = text.split()
    for place, word in enumerate(words):
        if len(word) >= 4 and generator.random() < MISTYPED_WORDS:
            # The first and the last letter stay, as in most slips of the hand.
            first = generator.randrange(1, len(word) - 2)
            swapped = word[first + 1] + word[first]
            words[place] = word[:first] + swapped + word[first + 2 :]
    return " ".join(words)


def _intent(row: Row) -> str:
    """Name the intent of a row: CLINC and banking77 have it in different fields."""
    return row["intent"] if "intent" in row else row["label"]


def draw_by_class(
    rows: Sequence[Row], classes: Sequence[str], count: int, generator: random.Random
) -> list[Example]:
    """Draw examples, the classes by turns; fewer where a class has no more texts."""
    texts: dict[str, list[str]] = {name: [] for name in classes}
    for row in rows:
        intent = _intent(row)
        if intent in texts:
            texts[intent].append(row["text"])
    for of_class in texts.values():
        generator.shuffle(of_class)
    examples = []
    for place in range(count):
        label = place % len(classes)
        of_class = texts[classes[label]]
        if of_class:
            examples.append(Example(of_class.pop(), label))
    return examples


def draw_further(
    rows: Sequence[Row],
    classes: Sequence[str],
    drawn: Sequence[Example],
    generator: random.Random,
) -> list[Example]:
    """Shuffle the labelled texts that are not drawn yet, of classes as they come."""
    known = {example.text for example in drawn}
    left = []
    for row in rows:
        if _intent(row) in classes and row["text"] not in known:
            left.append(Example(row["text"], classes.index(_intent(row))))
    generator.shuffle(left)
    return left


DOMAIN_NAMES = (
    "auto_and_commute",
    "banking",
    "credit_cards",
    "home",
    "kitchen_and_dining",
    "meta",
    "small_talk",
    "travel",
    "utility",
    "work",
)
DOMAINS = tuple(Intents(name, CLINC, domain=name) for name in DOMAIN_NAMES)
MANY = (
    Intents("clinc150", CLINC, test_an_intent=10, hyperparameters=MANY_INTENTS),
    Intents("banking77", BANKING, test_an_intent=20, hyperparameters=MANY_INTENTS),
)

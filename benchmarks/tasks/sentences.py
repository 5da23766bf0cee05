"""Tasks of published sentences: intents, questions, tweets, reviews, requests.

CLINC150 (Larson et al., EMNLP 2019) has 150 intents of ten domains, and texts out of
their scope; banking77 (Casanueva et al., 2020) has 77 of one bank. The others are TREC
(Li and Roth 2002), customer reviews (Hu and Liu 2004), subjectivity (Pang and Lee
2004), TweetEval (Barbieri et al. 2020) and HWU64 (Liu et al. 2019).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.options import TextRun
from benchmarks.tasks.balanced import ENCODER
from benchmarks.tasks.paper import Row, read_from_folder
from benchmarks.tasks.task import Example, Sizes, Task
from benchmarks.training import Hyperparameters

CLINC = ("clinc/clinc_oos", "plus")
BANKING = ("PolyAI/banking77", "default")
OUT_OF_SCOPE = "oos"  # CLINC's name of the intent and of the domain
OTHER_DOMAINS = "other domains"
TYPOS = "typos"
MISTYPED_WORDS = 0.5  # of those of four letters or more
SHIFTED = 300
SENTENCES = replace(ENCODER, maximum_length=64)  # tweets are longer than intents
# Many intents take more steps to be learnt by heart than the few classes of other
# tasks.
MANY_INTENTS = replace(ENCODER, steps=1200)


@dataclass(frozen=True)
class Sentences:
    """Sentences of a data set, or of a domain of CLINC, as many to train on of each."""

    name: str
    dataset: tuple[str, str]
    domain: str | None = None
    train_a_class: int = 20
    test_a_class: int | None = None  # all published test texts
    hyperparameters: Hyperparameters = SENTENCES

    def read(self, options: TextRun, seed: int) -> Task:
        """Draw training and test texts, in an order that the seed says."""
        train, test = read_from_folder(
            self.dataset,
            options.data,
            f"{self.name} reads JSON lines with a text and the name of its label, or "
            "of its intent and domain",
        )
        classes = sorted({_class_of(row) for row in train if self._is_known(row)})
        if not classes:
            raise SystemExit(f"CLINC150 has no domain {self.domain!r}.")
        n_test = len(test)
        if self.test_a_class is not None:
            n_test = self.test_a_class * len(classes)
        sizes = Sizes(self.train_a_class * len(classes), n_test, SHIFTED)
        sizes = sizes.asked(options)
        generator = random.Random(seed)
        drawn = draw_by_class(train, classes, sizes.train, generator)
        shifted = {}
        if self.test_a_class is None:
            tested = _examples(test, classes)
            generator.shuffle(tested)
            tested = tested[: sizes.test]
        else:
            tested = draw_by_class(test, classes, sizes.test, generator)
            shifted = self._shifted(test, sizes.shifted, generator)
            shifted[TYPOS] = with_typos(tested[: sizes.shifted], generator)
        texts = {example.text for example in drawn}
        further = [each for each in _examples(train, classes) if each.text not in texts]
        random.Random(seed).shuffle(further)
        return Task(
            name=self.name,
            classes=classes,
            is_prompt=False,
            train=drawn,
            test=tested,
            shifted=shifted,
            further=further,
        )

    def _is_known(self, row: Row) -> bool:
        """Tell whether a row has one of the task's intents."""
        if _class_of(row) == OUT_OF_SCOPE:
            return False
        return self.domain in (None, row.get("domain"))

    def _shifted(
        self, rows: Sequence[Row], count: int, generator: random.Random
    ) -> dict[str, list[Example]]:
        """Draw texts without a right answer, out of scope or of other domains."""
        out_of_scope: list[Row] = []
        of_other_domains: list[Row] = []
        for row in rows:
            if _class_of(row) == OUT_OF_SCOPE:
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


def _class_of(row: Row) -> str:
    """Name the class of a row, which CLINC calls its intent."""
    return row["intent"] if "intent" in row else row["label"]


def draw_by_class(
    rows: Sequence[Row], classes: Sequence[str], count: int, generator: random.Random
) -> list[Example]:
    """Draw examples, the classes by turns; fewer where a class has no more texts."""
    texts: dict[str, list[str]] = {name: [] for name in classes}
    for row in rows:
        intent = _class_of(row)
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


def _examples(rows: Sequence[Row], classes: Sequence[str]) -> list[Example]:
    """Make examples of all rows that have one of the classes."""
    return [
        Example(row["text"], classes.index(_class_of(row)))
        for row in rows
        if _class_of(row) in classes
    ]


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
DOMAINS = tuple(
    # As many test texts as CLINC150 has.
    Sentences(name, CLINC, name, 10, test_a_class=30, hyperparameters=ENCODER)
    for name in DOMAIN_NAMES
)
MANY = (
    Sentences("clinc150", CLINC, None, 10, 10, MANY_INTENTS),
    Sentences("banking77", BANKING, None, 10, 20, MANY_INTENTS),
)
# Settings may be chosen on these: they were looked at.
CHOOSING_SENTENCES = (
    Sentences("trec", ("trec", "coarse")),
    Sentences("emotion", ("cardiffnlp/tweet_eval", "emotion")),
)
# No setting is chosen on these.
KEPT_SENTENCES = (
    Sentences("reviews", ("customer_reviews", "default")),
    Sentences("subjectivity", ("subj", "default")),
    Sentences("offence", ("cardiffnlp/tweet_eval", "offensive")),
    Sentences("stance", ("cardiffnlp/tweet_eval", "stance")),
    Sentences("scenarios", ("hwu64", "scenarios")),
)

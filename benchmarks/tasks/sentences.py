"""Tasks of sentences that everybody uses: questions, tweets, reviews, requests.

TREC (Li and Roth 2002), customer reviews (Hu and Liu 2004), subjectivity (Pang and Lee
2004), TweetEval (Barbieri et al. 2020) and HWU64 (Liu et al. 2019).
"""

import random
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.models import encoder_folder
from benchmarks.options import TextRun
from benchmarks.tasks.balanced import ENCODER
from benchmarks.tasks.intents import draw_by_class, draw_further
from benchmarks.tasks.paper import read_from_folder
from benchmarks.tasks.task import Example, Sizes, Task
from benchmarks.training import Hyperparameters

TEXTS_A_CLASS = 20
SENTENCES = replace(ENCODER, maximum_length=64)  # tweets are longer than intents


@dataclass(frozen=True)
class Sentences:
    """A data set of sentences: as many of each class to train on, all test texts."""

    name: str
    dataset: tuple[str, str]
    hyperparameters: Hyperparameters = SENTENCES

    def model(self, _: TextRun) -> Path:
        """Find the encoder, the same for all options."""
        return encoder_folder()

    def read(self, options: TextRun, seed: int) -> Task:
        """Draw training texts by a seed; test texts are the published ones."""
        train, test = read_from_folder(
            self.dataset,
            options.data,
            f"{self.name} reads JSON lines with a text and the name of its label",
        )
        classes = sorted({row["label"] for row in train})
        sizes = Sizes(
            train=TEXTS_A_CLASS * len(classes), test=len(test), shifted=0
        ).asked(options)
        generator = random.Random(seed)
        drawn = draw_by_class(train, classes, sizes.train, generator)
        tested = [Example(row["text"], classes.index(row["label"])) for row in test]
        generator.shuffle(tested)
        return Task(
            name=self.name,
            classes=classes,
            is_prompt=False,
            train=drawn,
            test=tested[: sizes.test],
            further=draw_further(train, classes, drawn, random.Random(seed)),
        )


# Settings may be chosen on these: they were looked at.
CHOOSING_SENTENCES = (
    Sentences("trec", ("trec", "coarse")),
    Sentences("emotion", ("cardiffnlp/tweet_eval", "emotion")),
)
# Nobody looks at these until everything is frozen.
KEPT_SENTENCES = (
    Sentences("reviews", ("customer_reviews", "default")),
    Sentences("subjectivity", ("subj", "default")),
    Sentences("offence", ("cardiffnlp/tweet_eval", "offensive")),
    Sentences("stance", ("cardiffnlp/tweet_eval", "stance")),
    Sentences("scenarios", ("hwu64", "scenarios")),
)

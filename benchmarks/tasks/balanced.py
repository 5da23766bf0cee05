"""Balanced, disjoint sets of texts, drawn from what has been found of each class."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.tasks.task import Example, Sizes

Text = str | tuple[str, str]


def draw_balanced(
    found: Sequence[Sequence[Text]],
    classes: Sequence[str],
    sizes: Sizes,
    seed: int,
    shifted: str | None = None,
) -> dict[str, Any]:
    """Draw the sets of a `Task`, as many texts of each class as can be.

    `found` has the texts of each class, in an order that is the same in every run, and behind
    them those of another distribution where `shifted` names one. Texts that occur in more than one
    place have no right answer and are left out.
    """
    owners = Counter(text for texts in found for text in {_folded(text) for text in texts})
    left = [
        list({_folded(text): text for text in texts if owners[_folded(text)] == 1}.values())
        for texts in found
    ]
    generator = random.Random(seed)
    for texts in left:
        generator.shuffle(texts)

    def draw(count: int) -> list[Example]:
        examples = []
        for place in range(count):
            label = place % len(classes)
            if not left[label]:
                raise ValueError(f"{classes[label]} has too few texts; ask for fewer.")
            examples.append(Example(left[label].pop(), label))
        return examples

    sets: dict[str, Any] = {}
    if shifted is not None:
        if len(left[-1]) < sizes.shifted:
            raise ValueError(f"{shifted} has only {len(left[-1])} texts; ask for fewer.")
        sets["shifted"] = {shifted: [Example(text, None) for text in left[-1][: sizes.shifted]]}
    return sets | {name: draw(getattr(sizes, name)) for name in ("train", "validation", "test")}


def _folded(text: Text) -> Text:
    return text.casefold() if isinstance(text, str) else (text[0].casefold(), text[1].casefold())

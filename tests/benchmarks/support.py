"""What tests of the lab share: runs, small models, and rows of tasks."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.__main__ import main, parse
from benchmarks.fine_tuning import TRAIN, Pretrained, fine_tune
from benchmarks.methods.method import Members
from benchmarks.models import AdaptedModel
from benchmarks.training import MAXIMUM_LIKELIHOOD, Recipe
from tests.support.models import built
from tests.support.saved_adapters import tokenizer

Row = dict[str, Any]

# Those that the tests' own texts differ in, and some that are in any text.
WORDS = "Answer : A B C D True False rain rains the of to a and is 1 2 3"


def parsed(command: str) -> Any:
    """Read the options of an experiment."""
    return parse(command.split())


def run(command: str, folder: Path) -> dict[str, Any]:
    """Run an experiment into a folder; return its figures."""
    # One thread is the quickest for models of this size.
    main([*shlex.split(command), "--output", str(folder), "--threads", "1"])
    (figures,) = folder.glob("*.json")
    return json.loads(figures.read_text(encoding="utf-8"))


def rows_with(rows: list[Row], **fields: object) -> list[Row]:
    """Find the rows whose fields have these values."""
    return [row for row in rows if fields.items() <= row.items()]


def rows_by(rows: list[Row], *fields: str) -> dict[tuple, Row]:
    """Index rows by their values of some fields, of which no two have the same."""
    found = {}
    for row in rows:
        key = tuple(row[name] for name in fields)
        found[key] = row
    assert len(found) == len(rows)
    return found


def training_texts(pretrained: Pretrained) -> DataLoader:
    """Load all training texts in one batch."""
    return pretrained.loader(pretrained.data[TRAIN])


def trained(
    pretrained: Pretrained, seed: int = 0, recipe: Recipe = MAXIMUM_LIKELIHOOD
) -> AdaptedModel:
    """Fine-tune a tiny model on all training texts."""
    return fine_tune(pretrained, pretrained.data[TRAIN], seed, recipe)


def predicted(members: Members, texts: Iterable[Any]) -> Tensor:
    """Predict the mean probabilities `(texts, classes)` of some members."""
    return members.predict({TRAIN: texts})[TRAIN]


def save_tiny(name: str, padding_side: str, folder: Path) -> Path:
    """Save a small model of two layers, and its tokenizer."""
    tokens = ["[PAD]", "[UNK]", *WORDS.split()]
    model = built(
        name,
        vocab_size=len(tokens),
        num_hidden_layers=2,
        num_labels=2,
        max_position_embeddings=310,
        initializer_range=0.3,  # at which texts differ
    )
    model.save_pretrained(folder)
    words = tokenizer(tokens, padding_side=padding_side, eos_token="[PAD]")
    words.save_pretrained(folder)
    return folder


def write_rows(rows: list[Row], file: Path) -> None:
    """Write JSON lines into a folder that is made."""
    lines = [json.dumps(row) for row in rows]
    file.parent.mkdir(parents=True, exist_ok=True)
    # An empty line at the end, as some editors leave it, is no row.
    file.write_text("\n".join([*lines, "", ""]), encoding="utf-8")


def write_intents(
    intents: Mapping[str, Sequence[str]], n_texts: int, data: Path
) -> None:
    """Write CLINC's two splits: of each domain its intents, and of each some texts.

    A text is its split, its intent and a number.
    """
    for split in ("train", "test"):
        rows = []
        for domain, names in intents.items():
            for intent, number in product(names, range(n_texts)):
                text = f"{split} {intent} {number}"
                rows.append({"text": text, "intent": intent, "domain": domain})
        write_rows(rows, data / "clinc" / "clinc_oos" / "plus" / f"{split}.jsonl")

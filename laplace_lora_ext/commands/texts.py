"""Texts and labels from files or the hub, and batches of them."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]

_HINT = (
    "a CSV file with a header, a file of JSON lines, or the name of a data set of "
    "the hub"
)


class UsageError(Exception):
    """Something that the user of a command can mend; its message says how."""


def read_rows(source: str) -> list[Row]:
    """Read rows from a CSV file, a file of JSON lines, or a data set of the hub.

    A hub name may end with the split: "name:test"; "train" by default.
    """
    path = Path(source)
    if path.suffix in (".csv", ".jsonl", ".json") and not path.is_file():
        raise UsageError(f"{source} does not exist. Pass {_HINT}.")
    if not path.is_file():
        return _read_hub(source)
    if path.suffix == ".csv":
        # Line ends within quotes are the text's own.
        with path.open(encoding="utf-8", newline="") as file:
            rows: list[Row] = list(csv.DictReader(file))
    else:
        rows = _read_json_lines(path)
    if not rows:
        raise UsageError(f"{source} has no rows.")
    return rows


def _read_json_lines(path: Path) -> list[Row]:
    rows = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"Line {number} of {path} is no JSON: {error}.") from error
        if not isinstance(row, dict):
            raise UsageError(f"Line {number} of {path} must be an object with columns.")
        rows.append(row)
    return rows


def _read_hub(source: str) -> list[Row]:
    # Whoever has files needs not install it.
    try:
        import datasets
    except ImportError as error:
        raise UsageError(
            f"{source} is no file, and data sets of the hub need the package datasets. "
            f"Pass {_HINT}."
        ) from error
    name, _, split = source.partition(":")
    try:
        data_set = datasets.load_dataset(name, split=split or "train")
        # With a split it is one data set, rather than a dictionary of several.
        return [dict(row) for row in cast(datasets.Dataset, data_set)]
    # The package raises errors of many kinds, for names, splits and connections.
    except Exception as error:
        raise UsageError(f"{source} can't be read ({error}). Pass {_HINT}.") from error


def column_of(
    rows: Sequence[Row],
    column: str,
    source: str,
) -> list[Any]:
    """Take a column, in which each row must have something."""
    for number, row in enumerate(rows, start=1):
        if column not in row:
            there_are = ", ".join(sorted(map(str, row)))
            raise UsageError(
                f"Row {number} of {source} has no column {column!r}, only {there_are}: "
                "pass --text_column and --label_column."
            )
        # Of a short row of CSV, too.
        if row[column] is None:
            raise UsageError(
                f"Row {number} of {source} has nothing in its column {column!r}."
            )
    return [row[column] for row in rows]


@dataclass(frozen=True)
class Classes:
    """The classes of a model, by their number."""

    names: list[str]

    def number_of(self, label: Any, source: str) -> int:
        """Find a class by its name or its number."""
        text = str(label).strip()
        if text in self.names:
            return self.names.index(text)
        if text.isdigit() and int(text) < len(self.names):
            return int(text)
        raise UsageError(
            f"{source} has the label {text!r}, and the model knows "
            f"{', '.join(self.names)}: pass --class_names in the order of the model's "
            "outputs, or other data."
        )


@dataclass(frozen=True)
class Batches:
    """Makes batches of texts."""

    tokenizer: PreTrainedTokenizerBase
    size: int
    max_length: int | None

    def __call__(
        self,
        texts: Sequence[str],
        labels: Sequence[int] | None = None,
    ) -> DataLoader:
        """Make a loader that reads the texts in order."""

        def collate(places: Sequence[int]) -> Any:
            encoded = self.tokenizer(
                [texts[place] for place in places],
                padding=True,
                truncation=self.max_length is not None,
                max_length=self.max_length,
                return_tensors="pt",
            )
            if labels is not None:
                encoded["labels"] = torch.tensor([labels[place] for place in places])
            return encoded

        # Any sequence will do, whatever the loader's annotation says.
        places = cast(Dataset[int], range(len(texts)))
        return DataLoader(places, batch_size=self.size, collate_fn=collate)

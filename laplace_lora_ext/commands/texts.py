"""Texts and labels from files or the hub, and batches of them."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
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
_TABLES = (".csv", ".tsv")
_DELIMITERS = ",;\t|"
_AT_ONCE = 1000  # texts that are tokenized to be counted
_LONGEST_FIELD = 2**31 - 1  # all that C's long holds everywhere


class UsageError(Exception):
    """Something that the user of a command can mend; its message says how."""


def read_rows(source: str) -> list[Row]:
    """Read rows from a CSV file, a file of JSON, or a data set of the hub.

    A hub name may end with the split: "name:test"; "train" by default.
    """
    path = Path(source)
    kind = path.suffix.lower()
    if kind in (*_TABLES, ".jsonl", ".json") and not path.is_file():
        raise UsageError(f"{source} does not exist. Pass {_HINT}.")
    if not path.is_file():
        return _read_hub(source)
    text = _decoded(path)
    rows = _read_table(text, source) if kind in _TABLES else _read_json(text, source)
    if not rows:
        raise UsageError(f"{source} has no rows.")
    return rows


def _decoded(path: Path) -> str:
    """Read a text file as it is, without the mark that some programs begin it with."""
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{path} is not in UTF-8, as line {line} shows: save it as UTF-8 (in Excel "
            '"CSV UTF-8"), or convert it, as by iconv -f cp1252 -t utf-8.'
        ) from error


def _read_table(text: str, source: str) -> list[Row]:
    """Read a CSV file, whose header tells what its columns are divided by."""
    header, *_ = re.split(r"[\r\n]", text, maxsplit=1)
    delimiter = max(_DELIMITERS, key=lambda mark: len(_fields(header, mark)))
    # Line ends within quotes are the text's own.
    lines = io.StringIO(text, newline="")
    reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
    limit = csv.field_size_limit(_LONGEST_FIELD)
    try:
        rows: list[Row] = list(reader)
    except csv.Error as error:
        raise UsageError(
            f"Line {reader.reader.line_num} of {source} can't be read ({error}): put "
            "texts with quotes or line ends into quotes, and double those within."
        ) from error
    finally:
        csv.field_size_limit(limit)
    for number, row in enumerate(rows, start=1):
        # Where the header has no columns for them.
        others: list[str] = row.pop(cast(str, None), [])
        if any(others):
            raise UsageError(
                f"Row {number} of {source} has more columns than the header: put "
                f"texts that hold a {delimiter!r} into quotes."
            )
    return rows


def _fields(line: str, delimiter: str) -> list[str]:
    """Divide a line into its fields."""
    return next(csv.reader([line], delimiter=delimiter), [])


def _read_json(text: str, source: str) -> list[Row]:
    """Read objects one after the other, on a line each or not, or lists of them."""
    decoder = json.JSONDecoder()
    rows: list[Any] = []
    place = _behind_space(text, 0)
    try:
        while place < len(text):
            value, end = decoder.raw_decode(text, place)
            values = value if isinstance(value, list) else [value]
            if not all(isinstance(row, dict) for row in values):
                raise ValueError("it holds no columns")
            rows += values
            place = _behind_space(text, end)
    except ValueError as error:
        line = text.count("\n", 0, place) + 1
        raise UsageError(
            f"Line {line} of {source} begins no JSON object ({error}). Pass {_HINT}."
        ) from error
    return rows


def _behind_space(text: str, place: int) -> int:
    """Return the first place from one on that is no space."""
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def _read_hub(source: str) -> list[Row]:
    # Whoever has files needs not install it.
    try:
        import datasets
    except ImportError as error:
        raise UsageError(
            f"{source} is no file, and data sets of the hub need the package datasets "
            "(pip install laplace-lora-ext[hub]). "
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


def column_of(rows: Sequence[Row], column: str, source: str) -> list[str]:
    """Take a column as text; each row must have something there."""
    values: list[str] = []
    for number, row in enumerate(rows, start=1):
        if column not in row:
            there_are = ", ".join(sorted(map(str, row)))
            raise UsageError(
                f"Row {number} of {source} has no column {column!r}, only {there_are}: "
                "pass --text_column and --label_column."
            )
        value = row[column]
        if isinstance(value, dict | list):
            raise UsageError(
                f"Row {number} of {source} has a {type(value).__name__} in its column "
                f"{column!r}, and not a text: write each row as an object of its own."
            )
        # Short rows of CSV have None, empty fields of some programs NaN.
        is_missing = value is None or value != value
        if is_missing or not str(value).strip():
            raise UsageError(
                f"Row {number} of {source} has nothing in its column {column!r}: leave "
                "it out."
            )
        values.append(str(value))
    return values


def numbers_of(labels: Sequence[str], names: Sequence[str], source: str) -> list[int]:
    """Read a column of labels as numbers of classes.

    Labels are names of classes or, where no name is a number, also numbers from 0.
    """
    known = {name: number for number, name in enumerate(names)}
    if not any(name.isdecimal() for name in names):
        for number in range(len(names)):
            # The second as programs write a column in which some numbers are missing.
            known |= {str(number): number, f"{number}.0": number}
    for row, label in enumerate(labels, start=1):
        if label.strip() not in known:
            raise UsageError(
                f"Row {row} of {source} has the label {label.strip()!r}, and the model "
                f"knows {', '.join(names)}: pass --class_names in the order of the "
                "model's outputs, or other data."
            )
    return [known[label.strip()] for label in labels]


@dataclass(frozen=True)
class Batches:
    """Makes batches of texts."""

    tokenizer: PreTrainedTokenizerBase
    size: int
    max_length: int | None

    def lengths(self, texts: Sequence[str]) -> Iterator[int]:
        """Count the tokens of each text."""
        for start in range(0, len(texts), _AT_ONCE):
            encoded = self.encoded(texts[start : start + _AT_ONCE])
            yield from map(len, encoded["input_ids"])

    def encoded(self, texts: Sequence[str], **options: Any) -> Any:
        """Tokenize texts, cut at `max_length`."""
        return self.tokenizer(
            list(texts),
            truncation=self.max_length is not None,
            max_length=self.max_length,
            **options,
        )

    def __call__(
        self, texts: Sequence[str], labels: Sequence[int] | None = None
    ) -> DataLoader:
        """Make a loader that reads the texts in order."""

        def collate(places: Sequence[int]) -> Any:
            of_batch = [texts[place] for place in places]
            encoded = self.encoded(of_batch, padding=True, return_tensors="pt")
            if labels is not None:
                encoded["labels"] = torch.tensor([labels[place] for place in places])
            return encoded

        # Any sequence will do, whatever the loader's annotation says.
        places = cast(Dataset[int], range(len(texts)))
        return DataLoader(places, batch_size=self.size, collate_fn=collate)

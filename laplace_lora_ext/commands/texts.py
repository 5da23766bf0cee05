"""Texts and labels from files or the hub."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from laplace_lora_ext.saving import write_whole

Row = dict[str, Any]

_HINT = (
    "a CSV file with a header, a file of JSON lines, or the name of a data set of "
    "the hub"
)
_TABLES = (".csv", ".tsv")
_DELIMITERS = ",;\t|"


def read_rows(source: str) -> list[Row]:
    """Read rows from a CSV file, a file of JSON, or a data set of the hub.

    A hub name may end with the split: "name:test"; "train" by default.
    """
    path = Path(source)
    kind = path.suffix.lower()
    if kind in (*_TABLES, ".jsonl", ".json") and not path.is_file():
        raise ValueError(f"{source} does not exist. Pass {_HINT}.")
    if not path.is_file():
        return _read_hub(source)
    try:
        text = path.read_text("utf-8-sig")  # some programs begin it with a mark
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not in UTF-8 ({error}): save it as UTF-8 (in Excel "
            '"CSV UTF-8"), or convert it, as by iconv -f cp1252 -t utf-8.'
        ) from error
    rows = _read_table(text, source) if kind in _TABLES else _read_json(text, source)
    if not rows:
        raise ValueError(f"{source} has no rows.")
    return rows


def _read_table(text: str, source: str) -> list[Row]:
    """Read a CSV file, whose header tells what its columns are divided by."""
    header, *_ = text.split("\n", 1)
    delimiter = max(_DELIMITERS, key=header.count)
    # Line ends within quotes are the text's own.
    lines = io.StringIO(text, newline="")
    reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
    try:
        rows: list[Row] = list(reader)
    except csv.Error as error:
        raise ValueError(
            f"Line {reader.reader.line_num} of {source} can't be read ({error}): put "
            "texts with quotes or line ends into quotes, and double those within."
        ) from error
    for number, row in enumerate(rows, start=1):
        # Where the header has no columns for them.
        others: list[str] = row.pop(cast(str, None), [])
        if any(others):
            raise ValueError(
                f"Row {number} of {source} has more columns than the header: put "
                f"texts that hold a {delimiter!r} into quotes."
            )
    return rows


def _read_json(text: str, source: str) -> list[Row]:
    """Read an object a line, or a list of objects."""
    is_list = text.lstrip().startswith("[")
    # Not by `splitlines`, which divides at marks that a text may have in it.
    parts = [text] if is_list else text.split("\n")
    rows: list[Any] = []
    for number, part in enumerate(parts, start=1):
        if not part.strip():
            continue
        try:
            value = json.loads(part)
        except ValueError as error:
            raise ValueError(
                f"Line {number} of {source} is no JSON ({error}). Pass {_HINT}."
            ) from error
        rows += value if is_list else [value]
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"Row {number} of {source} is no object. Pass {_HINT}.")
    return rows


def _read_hub(source: str) -> list[Row]:
    # Whoever has files needs not install it.
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{source} is no file, and data sets of the hub need the package datasets "
            "(pip install laplace-lora-ext[hub]). "
            f"Pass {_HINT}."
        ) from error
    name, _, split = source.partition(":")
    data_set = datasets.load_dataset(name, split=split or "train")
    # With a split it is one data set, rather than a dictionary of several.
    return [dict(row) for row in cast(datasets.Dataset, data_set)]


def write_table(rows: Sequence[Row], path: Path) -> None:
    """Write rows as a CSV file; the first one's keys are the header."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, file.getvalue().encode())


def column_of(rows: Sequence[Row], column: str, source: str) -> list[str]:
    """Take a column as text; each row must have something there."""
    values: list[str] = []
    for number, row in enumerate(rows, start=1):
        if column not in row:
            there_are = ", ".join(sorted(map(str, row)))
            raise ValueError(
                f"Row {number} of {source} has no column {column!r}, only {there_are}: "
                "pass --text_column and --label_column."
            )
        value = row[column]
        # Short rows of CSV have None, empty fields of some programs NaN.
        is_missing = value is None or value != value
        if is_missing or not str(value).strip():
            raise ValueError(
                f"Row {number} of {source} has nothing in its column {column!r}: leave "
                "it out."
            )
        values.append(str(value))
    return values


def fingerprints(texts: Sequence[str]) -> Tensor:
    """Number texts `(N,)` by what they say, so that a file can know them."""
    digests = [blake2b(text.encode(), digest_size=7).digest() for text in texts]
    return torch.tensor([int.from_bytes(digest, "big") for digest in digests])


def numbers_of(labels: Sequence[str], names: Sequence[str], source: str) -> list[int]:
    """Read a column of labels as numbers of classes.

    Labels are names of classes or, where no name is a number, also numbers from 0.
    """
    known = {name: number for number, name in enumerate(names)}
    if not any(name.removesuffix(".0").isdecimal() for name in names):
        for number in range(len(names)):
            # The second as programs write a column in which some numbers are missing.
            known |= {str(number): number, f"{number}.0": number}
    for row, label in enumerate(labels, start=1):
        if label.strip() not in known:
            raise ValueError(
                f"Row {row} of {source} has the label {label.strip()!r}, and the model "
                f"knows {', '.join(names)}: pass --class_names in the order of the "
                "model's outputs, or other data."
            )
    return [known[label.strip()] for label in labels]

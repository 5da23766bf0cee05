"""Rows of public data sets, from a local folder of JSON lines or from the Hugging Face hub."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.models import MissingDataError

Row = dict[str, Any]


class Source(NamedTuple):
    """One split of one configuration of a data set, by its names on the hub."""

    dataset: str
    configuration: str
    split: str

    def file_in(self, data: Path) -> Path:
        """The split's file in a local folder: a JSON object a line, with the hub's fields."""
        return data / self.dataset / self.configuration / f"{self.split}.jsonl"


def missing_data(sources: Sequence[Source], data: Path | None) -> MissingDataError:
    """Say in one line what to download and where to put it."""
    beginning, folder, end = f"The data in {data} are incomplete", data, ""
    if data is None:
        beginning, end = "The hub is out of reach", ", and give --data FOLDER"
    downloads = "; ".join(
        f"{source.dataset} ({source.configuration}), split {source.split}, as "
        f"{source.file_in(folder or Path('FOLDER'))}"
        for source in sources
    )
    return MissingDataError(
        f"{beginning}: download from https://huggingface.co/datasets, and save as JSON lines, "
        f"{downloads}{end}."
    )


def read_sources(sources: Sequence[Source], data: Path | None) -> list[list[Row]]:
    """Read the rows of several splits from a folder, or from the hub where none is given."""
    if data is None:
        return read_from_hub(sources)
    missing = [source for source in sources if not source.file_in(data).is_file()]
    if missing:
        raise missing_data(missing, data)
    texts = [source.file_in(data).read_text(encoding="utf-8") for source in sources]
    return [[json.loads(line) for line in text.split("\n") if line.strip()] for text in texts]


def read_from_hub(sources: Sequence[Source]) -> list[list[Row]]:
    """Read the rows of several splits from the hub, or from what `datasets` has stored of it."""
    from datasets import load_dataset

    rows = []
    for place, (dataset, configuration, split) in enumerate(sources):
        try:
            loaded = load_dataset(dataset, configuration, split=split)
        # Without access datasets raises the first, or the second where it has stored another
        # configuration of the same data set.
        except (OSError, ValueError) as error:
            # The others are not tried: each would wait for the hub as long as this one did.
            raise missing_data(sources[place:], None) from error
        rows.append([dict(row) for row in loaded])
    return rows

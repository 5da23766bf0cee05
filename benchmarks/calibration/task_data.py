"""Rows of public data sets, from a local folder of JSON lines or from the Hugging Face hub."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]


class MissingDataError(FileNotFoundError):
    """Rows are neither in the local folder nor within reach on the hub; the message says where."""


class Source(NamedTuple):
    """One split of one configuration of a data set, by its names on the hub."""

    dataset: str
    configuration: str
    split: str

    def file_in(self, data: Path) -> Path:
        """Place the split in a local folder.

        Parameters
        ----------
        data : Path
            Folder of local data sets.

        Returns
        -------
        file : Path
            ``<data>/<dataset>/<configuration>/<split>.jsonl``, one JSON object a line with the
            fields that the row has on the hub.
        """
        return data / self.dataset / self.configuration / f"{self.split}.jsonl"


def missing_data(sources: Sequence[Source], data: Path | None) -> MissingDataError:
    """Say in one line what to download and where to put it.

    Parameters
    ----------
    sources : sequence of Source
        The splits that cannot be read.
    data : Path, optional
        Folder in which they were looked for; None where the hub was asked.

    Returns
    -------
    error : MissingDataError
        The error to raise.
    """
    folder = Path("FOLDER") if data is None else data
    beginning = "The hub is out of reach" if data is None else f"The data in {data} are incomplete"
    end = ", and give --data FOLDER" if data is None else ""
    downloads = "; ".join(
        f"{source.dataset} ({source.configuration}), split {source.split}, as "
        f"{source.file_in(folder)}"
        for source in sources
    )
    return MissingDataError(
        f"{beginning}: download from https://huggingface.co/datasets, and save as JSON lines, "
        f"{downloads}{end}."
    )


def read_sources(sources: Sequence[Source], data: Path | None) -> list[list[Row]]:
    """Read the rows of several splits.

    Parameters
    ----------
    sources : sequence of Source
        The splits.
    data : Path, optional
        Folder with a file for each split, where `Source.file_in` places it; None reads from the
        hub, or from what the package datasets has stored of it.

    Returns
    -------
    rows : list of list of dict
        The rows of each split in their order.

    Raises
    ------
    MissingDataError
        Where a split is not there; its message names every split that is still to be downloaded.
    """
    if data is None:
        return read_from_hub(sources)
    missing = [source for source in sources if not source.file_in(data).is_file()]
    if missing:
        raise missing_data(missing, data)
    return [read_lines(source.file_in(data)) for source in sources]


def read_lines(file: Path) -> list[Row]:
    """Read a file of JSON lines.

    Parameters
    ----------
    file : Path
        File with one JSON object a line; empty lines are passed over.

    Returns
    -------
    rows : list of dict
        The objects.
    """
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def read_from_hub(sources: Sequence[Source]) -> list[list[Row]]:
    """Read the rows of several splits from the hub.

    Parameters
    ----------
    sources : sequence of Source
        The splits.

    Returns
    -------
    rows : list of list of dict
        The rows of each split in their order.
    """
    from datasets import load_dataset

    rows = []
    for place, source in enumerate(sources):
        try:
            split = load_dataset(source.dataset, source.configuration, split=source.split)
        # Without access datasets raises the first, or the second where it has stored another
        # configuration of the same data set.
        except (OSError, ValueError) as error:
            # The others are not tried: each would wait for the hub as long as this one did.
            raise missing_data(sources[place:], None) from error
        rows.append([dict(row) for row in split])
    return rows

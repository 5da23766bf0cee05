"""Where numbers of many examples are kept: in memory, or in a temporary file."""

from __future__ import annotations

import tempfile
from typing import Protocol

import torch

_LARGEST_IN_MEMORY = 2**26  # bytes; passes over a file cost little beside the products


class Stored(Protocol):
    """A tensor `(N, ...)`, or what gives slices of its first dimension."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __getitem__(self, part: slice, /) -> torch.Tensor: ...


class Collected:
    """Numbers of a data set's examples, batch by batch."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self._nbytes = 0
        self._file: RowFile | None = None

    def append(self, part: torch.Tensor) -> None:
        """Add those of some examples, `(b, ...)`."""
        if self._file is not None:
            self._file.append(part)
            return
        self._parts.append(part)
        self._nbytes += part.nbytes
        if self._nbytes > _LARGEST_IN_MEMORY:
            self._file = RowFile(part.shape[1:], part.dtype)
            while self._parts:
                self._file.append(self._parts.pop(0))

    def result(self) -> Stored:
        """Those of all examples, `(N, ...)`; nothing is left here."""
        if self._file is not None:
            return self._file
        shape = sum(map(len, self._parts)), *self._parts[0].shape[1:]
        # Unlike `torch.cat`, this never holds them twice.
        result, start = self._parts[0].new_empty(shape), 0
        while self._parts:
            part = self._parts.pop(0)
            result[start : start + len(part)] = part
            start += len(part)
        return result


class RowFile:
    """A tensor `(N, ...)` in a temporary file, which goes when nobody needs it any more.

    Its slices are read from there, so that no more than one of them is in memory. The folder is
    that of Python's `tempfile`, which the variable TMPDIR changes.

    Parameters
    ----------
    row_shape : torch.Size
    dtype : torch.dtype
        that NumPy knows
    """

    def __init__(self, row_shape: torch.Size, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._row_shape = row_shape
        self._row_bytes = row_shape.numel() * dtype.itemsize
        self._length = 0
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this

    @property
    def shape(self) -> torch.Size:
        return torch.Size([self._length, *self._row_shape])

    def append(self, rows: torch.Tensor) -> None:
        """Add `(b, ...)` rows.

        Raises
        ------
        OSError
            If the disk is full.
        """
        self._file.seek(self._length * self._row_bytes)
        try:
            self._file.write(rows.contiguous().numpy().data)
            self._file.flush()
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self._length + len(rows)} examples take {self._row_bytes:,} bytes each in the "
                f"folder {tempfile.gettempdir()}: set TMPDIR to one that has more room, or pass a "
                "smaller n_features.",
            ) from error
        self._length += len(rows)

    def __getitem__(self, part: slice) -> torch.Tensor:
        start, stop, step = part.indices(self._length)
        if step != 1:
            raise IndexError("A RowFile is read without steps.")
        rows = torch.empty(max(0, stop - start), *self._row_shape, dtype=self.dtype)
        self._file.seek(start * self._row_bytes)
        self._file.readinto(rows.numpy())  # pyright: ignore
        return rows

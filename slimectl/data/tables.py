"""Tables of prompt rows from files and generators, read in order or by number without loading all."""

from __future__ import annotations

import pickle
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

from slimectl.data.io import byte_lines
from slimectl.data.jsonl import parse_line
from slimectl.errors import SettingsError
from slimectl.types import Prompt

Row = tuple[str, "dict[str, Any] | Prompt"]
"""Source location (`FILE:LINE`), and the row."""


class Table(Protocol):
    """Rows in a fixed order. `scan` streams them. Length and access by number may need a full pass."""

    def scan(self, start: int = 0) -> Iterator[Row]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, i: int) -> Row: ...


class JsonLines:
    """A plain JSONL file. Access by number builds an index of 16 bytes per row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets: array[int] | None = None
        self._lines: array[int] = array("Q")
        self._file: IO[bytes] | None = None

    def scan(self, start: int = 0) -> Iterator[Row]:
        filled = ((n, line) for n, line in byte_lines(self.path) if not line.isspace())
        return (self._row(n, line) for n, line in islice(filled, start, None))

    def _row(self, number: int, line: bytes) -> Row:
        location = f"{self.path}:{number}"
        return location, parse_line(line, location=location)

    def _index(self) -> array[int]:
        if self._offsets is None:
            offsets, at = array("Q"), 0
            with self.path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if not line.isspace():
                        offsets.append(at)
                        self._lines.append(number)
                    at += len(line)
            self._offsets = offsets
        return self._offsets

    def __len__(self) -> int:
        return len(self._index())

    def __getitem__(self, i: int) -> Row:
        offset = self._index()[i]
        self._file = self._file or self.path.open("rb")
        self._file.seek(offset)
        return self._row(self._lines[i], self._file.readline().removeprefix(b"\xef\xbb\xbf"))


class Spooled:
    """Rows that can only be read in order. For access by number they are first written to a temporary file.

    With `once` the source cannot be read twice (stdin), so it is spooled before anything is read.
    """

    def __init__(self, rows: Callable[[], Iterable[Row]], *, once: bool = False) -> None:
        self._rows = rows
        self._once = once
        self._offsets: array[int] | None = None
        self._file: Any = None

    def scan(self, start: int = 0) -> Iterator[Row]:
        if self._once or self._offsets is not None:
            return (self[i] for i in range(start, len(self)))
        return islice(self._rows(), start, None)

    def _index(self) -> array[int]:
        if self._offsets is None:
            self._file = tempfile.TemporaryFile(prefix="slimectl-")  # noqa: SIM115
            offsets = array("Q")
            for row in self._rows():
                offsets.append(self._file.tell())
                pickle.dump(row, self._file, protocol=pickle.HIGHEST_PROTOCOL)
            self._offsets = offsets
        return self._offsets

    def __len__(self) -> int:
        return len(self._index())

    def __getitem__(self, i: int) -> Row:
        self._file.seek(self._index()[i])
        row: Row = pickle.load(self._file)
        return row


class Listed:
    """Rows of a sequence in memory."""

    def __init__(self, name: str, rows: Sequence[Any], convert: Callable[[Any], Any] = lambda row: row) -> None:
        self._name = name
        self._rows = rows
        self._convert = convert

    def scan(self, start: int = 0) -> Iterator[Row]:
        return (self[i] for i in range(start, len(self)))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> Row:
        return f"{self._name}[{i}]", self._convert(self._rows[i])


class Sliced:
    """Rows a to b of another table, as Python slices them."""

    def __init__(self, name: str, table: Table, a: int | None, b: int | None) -> None:
        self._name = name
        self._table = table
        self._a, self._b = a or 0, b

    def scan(self, start: int = 0) -> Iterator[Row]:
        if self._a < 0 or (
            self._b is not None and self._b < 0
        ):  # negative bounds count from the end, which needs the length
            rows = range(len(self._table))[self._a : self._b]
            return islice(self._table.scan(rows.start + start), max(0, len(rows) - start))
        length = None if self._b is None else max(0, self._b - self._a - start)
        return islice(self._table.scan(self._a + start), length)

    def __len__(self) -> int:
        return len(range(len(self._table))[self._a : self._b])

    def __getitem__(self, i: int) -> Row:
        return self._table[range(len(self._table))[self._a : self._b][i]]


class Chained:
    """Concatenation of tables. Raises SettingsError for a table without rows."""

    def __init__(self, named: Sequence[tuple[str, Table]]) -> None:
        self._named = named

    def scan(self, start: int = 0) -> Iterator[Row]:
        for name, table in self._named:
            skipped = min(start, len(table)) if start else 0
            start -= skipped
            empty = not skipped
            for row in table.scan(skipped):
                empty = False
                yield row
            if empty:
                raise _no_rows(name)

    def __len__(self) -> int:
        for name, table in self._named:
            if not len(table):
                raise _no_rows(name)
        return sum(len(table) for _, table in self._named)

    def __getitem__(self, i: int) -> Row:
        for _, table in self._named:
            if i < len(table):
                return table[i]
            i -= len(table)
        raise IndexError(i)


class Selected:
    """Rows of another table by their numbers."""

    def __init__(self, table: Table, numbers: Sequence[int]) -> None:
        self._table, self._numbers = table, numbers

    def scan(self, start: int = 0) -> Iterator[Row]:
        return (self[i] for i in range(start, len(self)))

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, i: int) -> Row:
        return self._table[self._numbers[i]]


def _no_rows(name: str) -> SettingsError:
    return SettingsError(f"{name}: no rows. Give a file or a slice that has some.")

"""Parses prompt source names and opens their tables."""

from __future__ import annotations

import csv
import glob
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from slimectl.data.arrow_files import arrow_rows, check_columns, parquet_rows
from slimectl.data.generators import generated
from slimectl.data.hugging_face import ARROW, DELIMITERS, PARQUET, hub_files, saved_files
from slimectl.data.io import byte_lines, is_compressed, split_slice, spool
from slimectl.data.json_codec import decode_json
from slimectl.data.jsonl import parse_line
from slimectl.data.tables import Chained, JsonLines, Listed, Row, Sliced, Spooled, Table
from slimectl.errors import RecordError, SettingsError

CALL = re.compile(r"(?P<module>[\w./-]+|.+\.py):(?P<name>[A-Za-z_]\w*)(\?(?P<query>.*))?")
FORMS = "a file, a glob, path@[a:b], -, a data set of the hub (org/name), reasoning_gym:TASK or module:function"


class NamedTables(Protocol):
    """Tables of sources that the settings refer to by name."""

    def open(self, source: str, *, unbounded: bool) -> Table | None:
        """Return the table of a source, `unbounded` if a slice of it is taken, or None for another source."""
        ...


def open_table(sources: Sequence[str], *, replay: bool, named: NamedTables | None = None) -> Table:
    """Open all sources as one table, one after another. With `replay` they can be read more than once.

    A source of `named` takes precedence over a file of the same name. Raises SettingsError for a missing source.
    """
    if not sources:
        raise SettingsError(f"rollout.data: no prompt source. Give {FORMS}.")
    return Chained([(source, _table(source, replay, named)) for source in sources])


def first_row(source: str) -> int:
    """Return the row at which a source starts in its file: a for `path@[a:b]`, 0 for other sources."""
    path, part = split_slice(source)
    if part is None or (part.start or 0) >= 0:
        return part.start or 0 if part is not None else 0
    return range(len(open_table([path], replay=True)))[part].start


def source_folders(source: str) -> list[Path]:
    """Return the folder of the files of a prompt source, or none for other kinds of source.

    >>> source_folders("/dev/null@[0:3]")
    [PosixPath('/dev')]
    """
    path = Path(split_slice(source)[0])
    if path.exists():
        folder = path if path.is_dir() else path.parent
    elif glob.has_magic(str(path)):
        folder = next(parent for parent in path.parents if not glob.has_magic(str(parent)))
    else:
        return []
    return [folder] if folder.is_dir() and folder.resolve() != Path("/") else []


def _table(source: str, replay: bool, named: NamedTables | None, *, unbounded: bool = False) -> Table:
    if named is not None and (table := named.open(source, unbounded=unbounded)) is not None:
        return table
    if source == "-":
        return Spooled(partial(_json_rows, "-"), once=replay)
    path, rows = split_slice(source)
    if rows is not None:
        return Sliced(source, _table(path, replay, named, unbounded=True), rows.start, rows.stop)
    if "://" in source and not Path(source).exists():
        raise SettingsError(f"{source}: a URL, but data is read only from files. Download it and give the file.")
    if (table := generated_rows(source)) is not None:
        return table
    tables = [(str(path), _file(path, replay)) for path in _paths(source)]
    return tables[0][1] if len(tables) == 1 else Chained(tables)


def generated_rows(source: str) -> Table | None:
    """Return the table of a function or a generator without a slice, or None for files. Raises SettingsError."""
    call = CALL.fullmatch(source)
    if call is None or Path(source).exists():
        return None
    return generated(source, call["module"], call["name"], call["query"] or "")


def _paths(source: str) -> list[Path]:
    """Return the files and saved folders of a source without a slice. Raises SettingsError."""
    path = Path(source)
    if not path.exists() and (files := hub_files(source)):
        return files
    if path.exists() or not glob.has_magic(source):
        return [path]
    paths = [Path(path) for path in sorted(glob.glob(source, recursive=True)) if Path(path).is_file()]
    if not paths:
        hint = ". A slice is written path@[a:b]." if "@[" in source else ""
        raise SettingsError(f"{source}: no file matches{hint}")
    return paths


def source_files(source: str) -> list[Path]:
    """Return the files that a source of files without a slice reads. Raises SettingsError."""
    return [file for path in _paths(source) for file in (saved_files(path) if path.is_dir() else [path])]


def _file(path: Path, replay: bool) -> Table:
    if path.is_dir():
        if files := saved_files(path):
            return Chained([(str(file), Spooled(partial(arrow_rows, file))) for file in files])
        raise SettingsError(f"{path}: a directory. Give its files, such as '{path}/*.jsonl'")
    if not path.exists():
        raise SettingsError(f"{path}: no such prompt file. Give {FORMS}.")
    suffixes = [suffix.lower() for suffix in path.suffixes]
    kind = next((suffix for suffix in reversed(suffixes) if suffix not in (".gz", ".zst")), "")
    if kind in (*PARQUET, *ARROW, ".json"):  # read more than once, or from the end
        spool(path)
    if kind in PARQUET:
        return Spooled(partial(parquet_rows, path))
    if kind in ARROW:
        return Spooled(partial(arrow_rows, path))
    if kind in DELIMITERS:
        return Spooled(partial(_csv_rows, path, DELIMITERS[kind]))
    if kind == ".json" and _starts_with_bracket(path):
        return Listed(str(path), _json_array(path))
    if not path.is_file() or is_compressed(path):
        return Spooled(partial(_json_rows, path), once=replay and not path.is_file())
    return JsonLines(path)


def _json_rows(path: str | Path) -> Iterator[Row]:
    for number, line in byte_lines(path):
        if not line.isspace():
            location = f"{'<stdin>' if path == '-' else path}:{number}"
            yield location, parse_line(line, location=location)


def _starts_with_bracket(path: Path) -> bool:
    return next((line.lstrip()[:1] for _, line in byte_lines(path) if not line.isspace()), b"") == b"["


def _json_array(path: Path) -> list[Any]:
    try:
        rows = decode_json(b"".join(line for _, line in byte_lines(path)).decode())
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path}: not JSON that can be read: {error}") from None
    if type(rows) is not list:
        raise RecordError(f"{path}: there is more after the first JSON array. Give one array, or one object per line.")
    return rows


def _csv_rows(path: Path, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(1 << 30)
    reader = csv.DictReader(_text_lines(path), delimiter=delimiter, strict=True)
    try:
        columns = reader.fieldnames or ()
        check_columns(f"{path}:1", columns)
        for row in reader:
            location = f"{path}:{reader.line_num}"
            if None in row or None in row.values():
                raise RecordError(f"{location}: the number of columns differs from the {len(columns)} of the header")
            yield location, row
    except csv.Error as error:
        raise RecordError(f"{path}:{reader.reader.line_num}: not CSV: {error}") from None


def _text_lines(path: Path) -> Iterator[str]:
    for number, line in byte_lines(path):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise RecordError(
                f"{path}:{number}: not UTF-8 at byte {error.start + 1}. Save the file as UTF-8."
            ) from None

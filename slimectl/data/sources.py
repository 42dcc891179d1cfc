"""What a prompt source is called, and the table behind it."""

from __future__ import annotations

import csv
import glob
import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from slimectl.data.bytestreams import byte_lines
from slimectl.data.generators import generated
from slimectl.data.jsonl import parse_line
from slimectl.data.tables import Chained, JsonLines, Listed, Row, Sliced, Spooled, Table
from slimectl.errors import MissingExtraError, RecordError, SettingsError

SLICE = re.compile(r"(?P<path>.+)@\[(?P<a>-?\d*):(?P<b>-?\d*)\]")
CALL = re.compile(r"(?P<module>[\w./-]+):(?P<name>[A-Za-z_]\w*)(\?(?P<query>.*))?")
FORMS = "a file, a glob, path@[a:b], -, reasoning_gym:TASK or module:function"


def open_table(sources: Sequence[str], *, replay: bool) -> Table:
    """The rows of all sources, one after another; `replay` says that they will be read more than once.

    Raises SettingsError for a source that is not there.
    """
    if not sources:
        raise SettingsError(f"rollout.data: no prompt source; give {FORMS}")
    return Chained([(source, _table(source, replay)) for source in sources])


def _table(source: str, replay: bool) -> Table:
    if source == "-":
        return Spooled(partial(_json_rows, "-"), once=replay)
    sliced = SLICE.fullmatch(source)
    if sliced and not Path(source).exists():
        a, b = (int(text) if text not in ("", "-") else None for text in sliced.group("a", "b"))
        return Sliced(source, _table(sliced["path"], replay), a, b)
    call = CALL.fullmatch(source)
    if call and not Path(source).exists():
        return generated(source, call["module"], call["name"], call["query"] or "")
    paths = [Path(source)]
    if not paths[0].exists() and glob.has_magic(source):
        paths = [Path(path) for path in sorted(glob.glob(source, recursive=True)) if Path(path).is_file()]
        if not paths:
            raise SettingsError(f"{source}: no file matches")
    tables = [(str(path), _file(path, replay)) for path in paths]
    return tables[0][1] if len(tables) == 1 else Chained(tables)


def _file(path: Path, replay: bool) -> Table:
    if path.is_dir():
        raise SettingsError(f"{path}: a directory; give its files, such as '{path}/*.jsonl'")
    if not path.exists():
        raise SettingsError(f"{path}: no such prompt file; give {FORMS}")
    kind = [suffix for suffix in path.suffixes if suffix not in (".gz", ".zst")][-1:]
    packed = path.suffix in (".gz", ".zst")
    if kind == [".parquet"]:
        return Spooled(partial(_parquet_rows, path))
    if kind == [".csv"]:
        return Spooled(partial(_csv_rows, path))
    if kind == [".json"] and _starts_with_bracket(path):
        return Listed(str(path), _json_array(path))
    if packed or not path.is_file():
        return Spooled(partial(_json_rows, path), once=replay and not path.is_file())
    return JsonLines(path)


def _json_rows(path: str | Path) -> Iterator[Row]:
    for number, line in byte_lines(path):
        if not line.isspace():
            where = f"{'<stdin>' if path == '-' else path}:{number}"
            yield where, parse_line(line, where=where)


def _starts_with_bracket(path: Path) -> bool:
    return next((line.lstrip()[:1] for _, line in byte_lines(path) if not line.isspace()), b"") == b"["


def _json_array(path: Path) -> list[Any]:
    try:
        rows = json.loads(b"".join(line for _, line in byte_lines(path)))
    except ValueError as error:
        raise RecordError(f"{path}: not JSON: {error}") from None
    if type(rows) is not list:
        raise RecordError(f"{path}: more follows its first JSON array; give one array, or one object a line")
    return rows


def _csv_rows(path: Path) -> Iterator[Row]:
    csv.field_size_limit(1 << 30)
    try:
        reader = csv.DictReader((line.decode() for _, line in byte_lines(path)), strict=True)
        for row in reader:
            where = f"{path}:{reader.line_num}"
            if None in row or None in row.values():
                raise RecordError(f"{where}: not as many columns as the {len(reader.fieldnames or ())} of the header")
            yield where, row
    except (csv.Error, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: not CSV in UTF-8: {error}") from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise MissingExtraError("pyarrow", extra="parquet", wanted_by=str(path)) from None
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=256):
            for row in batch.to_pylist():
                yield f"{path}[{number}]", row
                number += 1
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: cannot be read as Parquet after {number} rows: {error}") from error

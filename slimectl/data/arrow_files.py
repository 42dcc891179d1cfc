"""Reads the rows of Parquet and Arrow files as JSON values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from slimectl.chats.messages import NULL_KEYWORDS
from slimectl.data.io import readable
from slimectl.data.json_values import cell_value, shortest_decimals
from slimectl.data.tables import Row
from slimectl.errors import MissingExtraError, RecordError
from slimectl.system.stdio import logger

ROWS_PER_BATCH = 256
Conversion = Callable[[Any], Any]


def parquet_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a Parquet file. Raises RecordError."""

    def batches() -> Iterator[Any]:
        import pyarrow.parquet

        file = pyarrow.parquet.ParquetFile(readable(path))
        check_columns(str(path), file.schema_arrow.names)
        yield from file.iter_batches(batch_size=ROWS_PER_BATCH)

    return _rows(path, "Parquet", batches())


def arrow_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of an Arrow stream or file, including Feather. Raises RecordError."""

    def batches() -> Iterator[Any]:
        import pyarrow

        with open(readable(path), "rb") as file:
            has_footer = file.read(6) == b"ARROW1"
            file.seek(0)
            reader = pyarrow.ipc.open_file(file) if has_footer else pyarrow.ipc.open_stream(file)
            check_columns(str(path), reader.schema.names)
            if has_footer:
                yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                yield from reader

    return _rows(path, "Arrow", batches())


def check_columns(location: str, columns: Sequence[str]) -> None:
    """Raise RecordError if two columns have the same name."""
    twice = [name for name, count in Counter(columns).items() if count > 1]
    if twice:
        raise RecordError(f"{location}: two columns are named {twice[0]!r}. Rename one of them.")


def _rows(path: Path, name: str, batches: Iterable[Any]) -> Iterator[Row]:
    number, has_nulls, is_named = 0, False, False

    def on_null() -> None:
        nonlocal has_nulls
        has_nulls = True

    try:
        for batch in batches:
            conversions = _of_fields(batch.schema, on_null)
            for row in batch.to_pylist():
                for column, convert in conversions.items():
                    row[column] = convert(row[column])
                if has_nulls and not is_named:
                    is_named = True
                    logger.info(
                        f"{path}: null fields of structs are dropped, because a table cannot distinguish them from "
                        f"missing ones."
                    )
                yield f"{path}[{number}]", cell_value(row)
                number += 1
    except ImportError:
        raise MissingExtraError("pyarrow", extra="parquet", wanted_by=str(path)) from None
    except (OSError, ValueError, OverflowError) as error:  # pyarrow.ArrowInvalid is a ValueError
        message = " ".join(str(error).split())
        raise RecordError(f"{path}: cannot be read as {name} after {number} rows: {message}") from error


def _of_fields(fields: Iterable[Any], on_null: Callable[[], None]) -> dict[str, Conversion]:
    return {field.name: convert for field in fields if (convert := _conversion(field.type, on_null)) is not None}


def _conversion(kind: Any, on_null: Callable[[], None]) -> Conversion | None:
    """Return the conversion for values whose Python type hides their Arrow type, or None if there is none.

    pyarrow returns a float32 as the double of the same value (0.10000000149011612) and a map as a list of pairs. It
    returns a struct with every field that any row has. Null fields are dropped, and `on_null` is called.
    """
    from pyarrow import BaseExtensionType, types

    if isinstance(kind, BaseExtensionType):
        return _conversion(kind.storage_type, on_null)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _conversion(kind.value_type, on_null)
    if types.is_float16(kind) or types.is_float32(kind):
        return _unless_null(lambda value: shortest_decimals(value, "float16" if types.is_float16(kind) else "float32"))
    if types.is_map(kind):
        of_item = _conversion(kind.item_type, on_null)
        return _unless_null(lambda pairs: {key: of_item(item) if of_item else item for key, item in pairs})
    if types.is_struct(kind):
        fields = _of_fields(kind, on_null)

        def struct(value: dict[str, Any]) -> dict[str, Any]:
            filled = {name: item for name, item in value.items() if item is not None or name in NULL_KEYWORDS}
            if len(filled) < len(value):
                on_null()
            return {name: fields[name](item) if name in fields else item for name, item in filled.items()}

        return _unless_null(struct)
    if types.is_nested(kind) and hasattr(kind, "value_type"):  # every kind of list
        of_value = _conversion(kind.value_type, on_null)
        return None if of_value is None else _unless_null(lambda values: [of_value(value) for value in values])
    return None


def _unless_null(convert: Conversion) -> Conversion:
    return lambda value: None if value is None else convert(value)

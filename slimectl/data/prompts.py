"""Opens prompt sources: reads rows as prompts, mixes sources and domains by weight, repeats and shuffles epochs."""

from __future__ import annotations

import json
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import accumulate, count, repeat
from operator import getitem
from pathlib import Path
from typing import Any, TypeVar

from slimectl.chats.messages import from_json
from slimectl.data.checks import Check, a_chat, a_label, a_mapping, shown
from slimectl.data.columns import Columns, PromptOptions, image_column, read_columns, warn_of_media
from slimectl.data.difficulty_pools import DifficultyPools
from slimectl.data.json_values import jsonable
from slimectl.data.prompt_images import folder_of, has_places, place_images, refuse_other_media
from slimectl.data.records import RECORD_VERSION
from slimectl.data.sources import open_table
from slimectl.data.tables import Row, Selected, Table
from slimectl.errors import RecordError, SettingsError
from slimectl.system.stdio import logger
from slimectl.types import ImageSource, Label, Prompt, Sample, column, domain_of

Item = TypeVar("Item")
Source = Callable[[int], Iterator[Item]]
"""Opens a source at a row number. The iterator never ends."""
BadRow = Callable[[RecordError], None]
"""Receives the error of a row that is left out."""


def mixed(
    sources: Sequence[Source[Item]], weights: Sequence[float], *, seed: int, start: int = 0, total: int | None = None
) -> Iterator[Item]:
    """Yield rows `start` to `total` (None: endlessly) of the mix. Each is the next row of a source drawn by its weight.

    The order of the sources depends only on the seed, so any position is reached without reading earlier rows. Only the
    draws are repeated, at about a million per second.
    """
    rng = random.Random(f"{seed}:mix")
    bounds = list(accumulate(weights))
    numbers = range(len(weights))

    def draw() -> int:
        return rng.choices(numbers, cum_weights=bounds)[0]

    drawn = Counter(draw() for _ in range(start))
    reading = [source(drawn[i]) for i, source in enumerate(sources)]
    for _ in count() if total is None else range(start, total):
        yield next(reading[draw()])


def check_weights(weights: Sequence[float], sources: Sequence[str]) -> None:
    """Raise SettingsError unless there is one weight per source."""
    if len(weights) != len(sources):
        raise SettingsError(
            f"rollout.data_weights: {len(weights)} weights for {len(sources)} sources of rollout.data. Give one "
            f"weight per source."
        )


def shuffled_order(size: int, seed: int | str, epoch: int) -> array[int]:
    """Return the numbers below `size` in the order of one epoch. This must not change: runs resume across versions."""
    order = array("Q", range(size))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def domain_tables(table: Table, options: PromptOptions) -> list[Table]:
    """Return the rows of each domain in `options.domain_weights`, as a table. Reads every row once.

    Raises SettingsError for a domain without rows, RecordError for a row that cannot be read.
    """
    numbers = {domain: array("Q") for domain in options.domain_weights}
    unweighted: Counter[str] = Counter()
    for number, (location, value) in enumerate(table.scan()):
        if isinstance(value, Prompt):
            row, metadata = value.extra, value.metadata
        else:
            row = value if isinstance(value, dict) else {}
            metadata = _checked(location, options.metadata_key, column(row, options.metadata_key), _metadata)
        domain = str(domain_of(row, metadata, options.domain_key))
        if domain in numbers:
            numbers[domain].append(number)
        else:
            unweighted[domain] += 1
    for domain, rows in numbers.items():
        if not rows:
            found = ", ".join(sorted({*unweighted, *(name for name, found_rows in numbers.items() if found_rows)})[:8])
            raise SettingsError(
                f"rollout.domain_weights: no row has the domain {domain} in {options.domain_key!r}, only: {found}. Set "
                f"rollout.domain_key to the column of the domain, or drop the weight."
            )
    if unweighted:
        names = ", ".join(sorted(unweighted)[:8])
        logger.warning(f"rollout.domain_weights: {unweighted.total()} rows of other domains are left out ({names})")
    return [Selected(table, rows) for rows in numbers.values()]


SAMPLE_FIELDS = frozenset([*(field.name for field in fields(Sample)), RECORD_VERSION])
"""Keys of a sample's record, which are not passed on from a prompt."""


def open_prompts(
    sources: Sequence[str], options: PromptOptions = PromptOptions(), *, on_bad_row: BadRow | None = None
) -> Iterator[Prompt]:
    """Yield the prompts of all sources, numbered consecutively from `options.start`.

    A source is a file (JSONL, JSON array, CSV or Parquet, also as .gz or .zst), a glob, `path@[a:b]`, `-`,
    `reasoning_gym:TASK?key=value`, or `module:function?key=value` that yields rows or Prompts. Files are streamed.

    Raises SettingsError for a missing source, RecordError for a row that is not a prompt. With `on_bad_row`, the errors
    of such rows are passed to it and the rows are left out. The numbers of the other rows stay the same.
    """
    return numbered(sources, options, prompt_of, on_bad_row)


def numbered(
    sources: Sequence[str],
    options: PromptOptions,
    convert: Callable[[Row, int, PromptOptions], Item],
    on_bad_row: BadRow | None,
) -> Iterator[Item]:
    """Yield the converted rows of all sources. `convert` gets a row and its number. It raises RecordError."""
    ordered = ordered_rows(sources, options, keep_errors=on_bad_row is not None)
    return without_bad(map(convert, ordered, count(options.start), repeat(options)), on_bad_row)


def without_bad(items: Iterator[Item], on_bad_row: BadRow | None) -> Iterator[Item]:
    """Yield the items. Pass each RecordError to `on_bad_row` if it is given. `items` must continue after an error."""
    while True:
        try:
            yield next(items)
        except StopIteration:
            return
        except RecordError as error:
            if on_bad_row is None:
                raise
            on_bad_row(error)


def ordered_rows(
    sources: Sequence[str], options: PromptOptions = PromptOptions(), *, keep_errors: bool = False
) -> Iterator[Row]:
    """Yield the unvalidated rows of all sources, each with its source location.

    With `keep_errors`, the value of a row that cannot be read is its RecordError.
    """
    epochs, seed = options.epochs, options.shuffle_seed
    weights: Sequence[float] = list(options.domain_weights.values()) or options.weights or ()
    if not weights:
        table = open_table(sources, replay=epochs != 1 or seed is not None or keep_errors, named=options.named)
        return _rows(table, epochs, seed, options.start, keep_errors)
    tables: list[Table]
    if options.domain_weights:
        tables = domain_tables(open_table(sources, replay=True, named=options.named), options)
    else:
        check_weights(weights, sources)
        tables = [open_table([source], replay=True, named=options.named) for source in sources]
    seeds = [None if seed is None else f"{seed}:{i}" for i in range(len(tables))]
    readers = [
        partial(_rows, table, None, seed, keep_errors=keep_errors) for table, seed in zip(tables, seeds, strict=True)
    ]
    total = None if epochs is None else epochs * sum(map(_size, tables))
    return mixed(readers, weights, seed=options.mix_seed, start=options.start, total=total)


def pooled_prompts(sources: Sequence[str], options: PromptOptions, pools: DifficultyPools) -> Iterator[Prompt]:
    """Yield the prompts that `pools` draws from the rows of all sources, numbered from `options.start`."""
    table = open_table(sources, replay=True, named=options.named)
    size = _size(table)
    order = range(size) if options.shuffle_seed is None else shuffled_order(size, options.shuffle_seed, 0)
    for number in count(options.start) if options.epochs is None else range(options.start, options.epochs * size):
        row = pools.draw(number, order)
        if row is None:
            logger.warning("rollout.retire_after: every prompt is solved, so no more rounds are sampled")
            return
        yield prompt_of(table[row], number, options)


def _rows(
    table: Table, epochs: int | None, seed: int | str | None, start: int, keep_errors: bool = False
) -> Iterator[Row]:
    if seed is None and not keep_errors:
        return _in_order(table, epochs, start)
    return _by_position(table, epochs, start, seed, _row_or_error if keep_errors else getitem)


def _row_or_error(table: Table, position: int) -> Any:
    try:
        return table[position]
    except RecordError as error:
        return "", error


def _in_order(table: Table, epochs: int | None, start: int) -> Iterator[Row]:
    if epochs == 1:
        yield from table.scan(start)
        return
    # At position 0 nothing has to be counted, so the first prompt is available immediately.
    epoch, skipped = divmod(start, _size(table)) if start else (0, 0)
    for _ in count() if epochs is None else range(epoch, epochs):
        yield from table.scan(skipped)
        skipped = 0


def _by_position(
    table: Table, epochs: int | None, start: int, seed: int | str | None, read: Callable[[Table, int], Row]
) -> Iterator[Row]:
    size = _size(table)
    first, skipped = divmod(start, size)
    for epoch in count(first) if epochs is None else range(first, epochs):
        order = range(size) if seed is None else shuffled_order(size, seed, epoch)
        for i in order[skipped:]:
            yield read(table, i)
        skipped = 0


def _size(table: Table) -> int:
    size = len(table)
    if not size:
        raise SettingsError("rollout.data: the sources have no rows")
    return size


def prompt_of(row: Row, index: int, options: PromptOptions) -> Prompt:
    """Convert a row to a prompt. Raises RecordError with the source location."""
    location, value = row
    if isinstance(value, RecordError):
        raise value
    if isinstance(value, Prompt):
        if options.reads_images and not value.images:
            place = partial(place_images, column=None, folder=Path(), reads_images=True)
            text, images = _checked(location, options.image_key, value.text, place)
            value = replace(value, text=text, images=images)
        return replace(value, index=index, source_location=location)
    if not isinstance(value, dict):
        raise RecordError(f"{location}: expected an object, got {shown(value)}")
    columns = read_columns(value, options, location)
    is_text = columns.text == "" and options.demonstrations and columns.label  # trained on from its first token
    check = a_chat if is_text else nonempty_chat
    return with_parts((location, value), index, options, columns, check)


def with_parts(
    row: tuple[str, dict[str, Any]], index: int, options: PromptOptions, columns: Columns, check: Check = a_chat
) -> Prompt:
    """Return the prompt of a row whose text and label have been read. Raises RecordError with the source location."""
    location, value = row
    text = _checked(location, options.input_key, columns.text, check)
    _checked(location, options.input_key, text, refuse_other_media)
    images: list[ImageSource] = []
    has_images = options.reads_images or has_places(text)
    image_key = image_column(value, options.image_key, location) if has_images else options.image_key
    if not has_images:
        warn_of_media(value, options.image_key, location)
    if has_images or column(value, image_key):
        place = partial(place_images, text, folder=folder_of(location), reads_images=options.reads_images)
        text, images = _checked(location, image_key, column(value, image_key), place)
    return Prompt(
        text=text,
        label=_checked(location, options.label_key, columns.label, _label),
        index=index,
        metadata=_checked(location, options.metadata_key, column(value, options.metadata_key), _metadata),
        tools=_checked(
            location, options.tool_key, column(value, options.tool_key) or _functions(value, options.tool_key), _tools
        ),
        source_location=location,
        extra=_extra_columns(
            value, {*columns.names, options.metadata_key, options.tool_key, options.image_key, image_key}
        ),
        images=images,
    )


def _extra_columns(row: dict[str, Any], used: set[str]) -> dict[str, Any]:
    """Return the columns that the prompt does not use and whose names are not sample fields."""
    return {str(key): jsonable(value) for key, value in row.items() if key not in used and key not in SAMPLE_FIELDS}


def _checked(location: str, key: str, value: Any, check: Callable[[Any], Any]) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise RecordError(f"{location}: {key}: {error}") from None


def nonempty_chat(value: Any) -> Any:
    if not a_chat(value):
        raise ValueError("empty. A prompt needs at least one word.")
    return value


def _label(value: Any) -> Label:
    label = None if value is None else a_label(value)
    return jsonable(label) if isinstance(label, list | dict) else label


def _metadata(value: Any) -> dict[str, Any]:
    parsed = _parse_json(value)
    # Tables and user functions may hold dates, numpy numbers and tuples, which JSON cannot represent.
    return {} if parsed in (None, "") else jsonable(a_mapping(parsed))


def _tools(value: Any) -> list[dict[str, Any]] | None:
    tools = _parse_json(value)
    if not tools:
        return None
    if type(tools) is not list or not all(type(tool) is dict for tool in tools):
        raise ValueError(f"expected a list of tool schemas, got {shown(value)}")
    return tools


def _functions(row: dict[str, Any], key: str) -> Any:
    """Return the tools of the column `functions`, OpenAI's older name, unless the settings choose another column."""
    functions = from_json(row.get("functions")) if key == "tools" else None
    named = isinstance(functions, list) and all(
        isinstance(f, dict) and {"name", "parameters"} <= {*f} for f in functions
    )
    return functions if named else None


def _parse_json(value: Any) -> Any:
    """Parse an object from JSON text, as CSV and some Parquet files store it."""
    if type(value) is not str or not value:
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError(f"expected an object or its JSON, got {shown(value)}") from None

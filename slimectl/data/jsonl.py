"""Streaming JSON Lines input and output: files, .gz, .zst, stdin and stdout."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from slimectl.data.group_numbers import GroupNumbers
from slimectl.data.io import AtomicWriter, byte_lines, missing_file, split_slice, spool
from slimectl.data.json_codec import decode_object, encode_json, encode_with_texts, float32_text
from slimectl.data.prompt_images import resolve_sample
from slimectl.data.records import FLOAT32_LISTS, RECORD_VERSION, VERSION, refused_path, sample_from_json, sample_to_json
from slimectl.errors import RecordError, SettingsError
from slimectl.system.stdio import logger
from slimectl.types import Sample

Report = Callable[[RecordError], None]


def parse_line(line: bytes, *, location: str) -> dict[str, Any]:
    """Parse the JSON object of a line. Raises RecordError, also for NaN, Infinity and numbers too large for a float."""
    try:
        obj = decode_object(line)
    except UnicodeDecodeError as error:
        raise RecordError(f"{location}: not UTF-8 at byte {error.start + 1}. Save the file as UTF-8.") from None
    except json.JSONDecodeError as error:
        raise RecordError(f"{location}: not JSON: {error.msg.removesuffix(' at')} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{location}: not JSON that can be read: {error}") from None
    if type(obj) is not dict:
        raise RecordError(f"{location}: expected one JSON object per line, got {type(obj).__name__}")
    return obj


def read_samples(
    paths: str | Path | Sequence[str],
    *,
    on_error: Literal["stop", "skip"] = "stop",
    report: Report | None = None,
    on_line: Callable[[str], None] = lambda location: None,
    allow_reward_paths: bool = True,
    answered: bool = False,
    vocabulary: int | None = None,
) -> Iterator[Sample]:
    """Yield the samples of one or more JSON Lines files in sequence. `path@[a:b]` selects a range of lines.

    If several rollouts are joined, their groups are numbered consecutively (`GroupNumbers`).

    `on_error` "stop" raises RecordError at the first bad line. "skip" passes each bad line to `report` and continues.
    By default `report` logs warnings with a total at the end. `on_line` gets FILE:LINE of every sample before it is
    yielded. A sample that sets its own reward function is a bad line without `allow_reward_paths`. With `answered`, so
    is a prompt without a response. With `vocabulary`, so is a sample with a token id beyond that number of tokens.
    """
    names = [str(paths)] if isinstance(paths, str | Path) else paths
    for name in names:  # before the first of them is graded
        if name != "-" and not Path(split_slice(name)[0]).exists():
            raise missing_file(name)
    numbers, num_skipped, count = GroupNumbers(_say_once), 0, 0

    def skip(error: RecordError) -> None:
        nonlocal num_skipped
        if on_error == "stop":
            raise error
        num_skipped += 1
        if report is None:
            logger.warning(f"skipped: {error}")
        else:
            report(error)

    for name in names:
        for position, location, line in _sample_lines(name, skip):
            count += 1
            try:
                sample = read_sample(line, location=location, position=position, answered=answered)
                if sample.custom_rm_path and not allow_reward_paths:
                    reason = refused_path("custom_rm_path", sample.custom_rm_path)
                    raise RecordError(f"{location}: Sample.{reason}")
                if vocabulary is not None and max(sample.tokens, default=0) >= vocabulary:
                    reason = f"token {max(sample.tokens)} is not in the model's vocabulary of {vocabulary} tokens"
                    raise RecordError(f"{location}: tokens: {reason}. Use samples of this model's tokenizer.")
                numbers.renumber(sample, location)
            except RecordError as error:
                skip(error)
            else:
                on_line(location)
                yield sample
    if num_skipped and report is None:
        logger.warning(f"{joined_name(names)}: {num_skipped} of {count} lines skipped")


@cache
def _say_once(message: str) -> None:
    """Log a message only the first time. Training reads its files once per epoch, and once more to count them."""
    logger.info(message)


def _sample_lines(source: str, skip: Report) -> Iterator[tuple[int, str, bytes]]:
    """Yield (position, FILE:LINE, line) of the samples of a source. Damaged input is passed to `skip` and ends it."""
    if source.endswith(".pt"):
        raise RecordError(
            f"{source}: this is a torch pickle. To read a rollout dump: "
            f"slimectl convert {shlex.quote(source)} samples.jsonl --unpickle"
        )
    path, part = split_slice(source)
    if part is not None and min(part.start or 0, part.stop or 0) < 0:
        spool(path)  # the bounds count from the end, so it is read twice
        part = slice(*part.indices(sum(not line.isspace() for _, line in byte_lines(path))))
    start, stop = (0, None) if part is None else (part.start, part.stop)
    filled = ((number, line) for number, line in byte_lines(path) if not line.isspace())
    lines = islice(enumerate(filled), start, stop)
    is_empty = part is not None
    while True:
        try:
            position, (number, line) = next(lines)
        except StopIteration:
            if is_empty:
                raise SettingsError(f"{source}: the file has no lines there. Give another slice.") from None
            return
        except RecordError as error:  # truncated input: nothing more to read
            skip(error)
            return
        is_empty = False
        yield position, f"{name_of(path)}:{number}", line


def read_sample(line: bytes, *, location: str, position: int, answered: bool = False) -> Sample:
    obj = parse_line(line, location=location)
    if answered and not {"response", "tokens"} & obj.keys():
        raise RecordError(
            f"{location}: no response and no tokens, so there is nothing to grade. Sample it with `slimectl rollout`."
        )
    try:
        sample = sample_from_json(obj, position=position)
    except RecordError as error:
        raise RecordError(f"{location}: {error}") from None
    if sample.multimodal_inputs is not None:
        try:
            resolve_sample(sample, location)
        except ValueError as error:
            raise RecordError(f"{location}: Sample.multimodal_inputs: {error}") from None
    return sample


def name_of(path: str | Path) -> str:
    return "<stdin>" if str(path) == "-" else str(path)


def joined_name(paths: Sequence[str]) -> str:
    """Return one name for several inputs: `a.jsonl and 4 more files`."""
    extra = len(paths) - 1
    return name_of(paths[0]) + (f" and {extra} more file{'s' * (extra > 1)}" if extra else "")


class JsonlWriter:
    """Writes records, one JSON object per line. `count` is their number.

    >>> with JsonlWriter("samples.jsonl.gz") as out:  # doctest: +SKIP
    ...     out.write(sample)

    A file gets its name only once it is complete. Until then, or if anything raises, it does not exist, and an older
    file of that name stays. `-` is stdout. On pipes every record is flushed. Raises StorageError for OS errors and
    RecordError for a record that JSON cannot represent. BrokenPipeError passes through.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.count = 0
        self._sink = AtomicWriter(self.path)

    def __enter__(self) -> JsonlWriter:
        self._sink.open()
        return self

    def write(self, record: Sample | Mapping[str, Any]) -> None:
        location = f"{self.path}: record {self.count + 1}"
        if isinstance(record, Sample):
            line = encode_sample(record, location=location)
        else:
            line = encode_line(record, location=location)
        self._sink.write(line)
        self.count += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._sink.commit()
        else:
            self._sink.discard()


def encode_sample(sample: Sample, *, location: str) -> bytes:
    """Encode a sample as a line, in record version 2 if all its log-probabilities are float32.

    Raises RecordError as `encode_line` does.
    """
    obj = sample_to_json(sample)
    texts = {name: float32_text(values) for name in FLOAT32_LISTS if (values := obj.get(name))}
    short = {name: text for name, text in texts.items() if text is not None}
    if short and len(short) == len(texts):
        with suppress(TypeError, ValueError):  # `encode_line` encodes it, or reports the bad value
            return encode_with_texts({RECORD_VERSION: VERSION, **obj}, short) + b"\n"
    return encode_line(obj, location=location)


def encode_line(obj: Mapping[str, Any], *, location: str) -> bytes:
    """Encode an object as a line of UTF-8. Raises RecordError for NaN, infinity and values that are not JSON."""
    try:
        return encode_json(obj) + b"\n"
    except (ValueError, TypeError, RecursionError) as error:
        culprit = next((key for key, value in obj.items() if not _is_json(value)), "record")
        raise RecordError(f"{location}: {culprit} cannot be written as JSON: {error}") from None


def _is_json(value: Any) -> bool:
    try:
        encode_json(value)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def write_samples(path: str | Path, samples: Iterable[Sample | Mapping[str, Any]]) -> int:
    """Write samples, or their JSON objects, as they arrive. Return their number."""
    with JsonlWriter(path) as out:
        for sample in samples:
            out.write(sample)
    return out.count

"""Streaming JSON Lines input and output: files, .gz, .zst, stdin and stdout."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from slimectl.data.io import AtomicWriter, byte_lines
from slimectl.data.json_codec import decode_object, encode_json, encode_with_texts, float32_text
from slimectl.data.prompt_images import resolve_sample
from slimectl.data.records import FLOAT32_LISTS, RECORD_VERSION, VERSION, refused_path, sample_from_json, sample_to_json
from slimectl.errors import RecordError
from slimectl.stdio import logger
from slimectl.types import Sample

Report = Callable[[RecordError], None]
OTHER_FORMATS = {b"PAR1": ".parquet", b"ARROW1": ".arrow", b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}
"""Suffixes of binary files, by their first bytes."""


def read_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every non-blank line. Raises RecordError, `FILE:LINE: reason`."""
    for number, line in byte_lines(path):
        if not line.isspace():
            yield number, parse_line(line, location=f"{name_of(path)}:{number}")


def parse_line(line: bytes, *, location: str) -> dict[str, Any]:
    """Parse the JSON object of a line. Raises RecordError, also for NaN, Infinity and numbers too large for a float."""
    try:
        obj = decode_object(line)
    except UnicodeDecodeError as error:
        suffix = next((suffix for magic, suffix in OTHER_FORMATS.items() if line.startswith(magic)), None)
        remedy = f"This is a {suffix} file. Rename it with that suffix. Samples must be JSON Lines." if suffix else ""
        raise RecordError(
            f"{location}: not UTF-8 at byte {error.start + 1}. {remedy or 'Save the file as UTF-8.'}"
        ) from None
    except json.JSONDecodeError as error:
        raise RecordError(f"{location}: not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{location}: not JSON that can be read: {error}") from None
    if type(obj) is not dict:
        raise RecordError(f"{location}: expected one JSON object a line, got {type(obj).__name__}")
    return obj


def read_samples(
    path: str | Path,
    *,
    on_error: Literal["stop", "skip"] = "stop",
    report: Report | None = None,
    on_line: Callable[[str], None] = lambda location: None,
    allow_reward_paths: bool = True,
    answered: bool = False,
) -> Iterator[Sample]:
    """The samples of a JSONL file, one at a time.

    `on_error` "stop" raises RecordError at the first bad line. "skip" passes each to `report`, by default a
    warning with a total at the end, and continues. `on_line` gets FILE:LINE of every sample before it is yielded.
    Without `allow_reward_paths` a sample that names its own reward function is a bad line; with `answered` a prompt
    that was never sampled is one.
    """
    if str(path).endswith(".pt"):
        raise RecordError(
            f"{path}: a pickle of torch's; `slimectl convert {path} samples.jsonl --unpickle` reads rollout dumps"
        )
    skipped = 0

    def skip(error: RecordError) -> None:
        nonlocal skipped
        if on_error == "stop":
            raise error
        skipped += 1
        if report is None:
            logger.warning(f"skipped: {error}")
        else:
            report(error)

    lines = byte_lines(path)
    position = 0
    while True:
        try:
            number, line = next(lines)
        except StopIteration:
            break
        except RecordError as error:  # truncated input: nothing follows
            skip(error)
            break
        if line.isspace():
            continue
        position += 1
        try:
            location = f"{name_of(path)}:{number}"
            sample = read_sample(line, location=location, position=position - 1, answered=answered)
            if sample.custom_rm_path and not allow_reward_paths:
                reason = refused_path("custom_rm_path", sample.custom_rm_path)
                raise RecordError(f"{location}: Sample.{reason}")
        except RecordError as error:
            skip(error)
        else:
            on_line(location)
            yield sample
    if skipped and report is None:
        logger.warning(f"{name_of(path)}: {skipped} of {position} lines skipped")


def read_sample(line: bytes, *, location: str, position: int, answered: bool = False) -> Sample:
    obj = parse_line(line, location=location)
    if answered and not {"response", "tokens"} & obj.keys():
        raise RecordError(
            f"{location}: no response and no tokens, so nothing to grade; sample it by `slimectl rollout`"
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


class JsonlWriter:
    """Writes records, one JSON object per line; `count` is their number.

    >>> with JsonlWriter("samples.jsonl.gz") as out:  # doctest: +SKIP
    ...     out.write(sample)

    A file gets its name only once it is complete: until then, and if anything raises, it does not exist (an older file
    of that name stays). `-` is stdout; on pipes every record is flushed. Raises StorageError for errors of the system,
    RecordError for a record that JSON cannot represent; BrokenPipeError passes through.
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
    """Encode a sample as a line, in record version 2 where all its log-probabilities are float32.

    Raises RecordError as `encode_line` does.
    """
    obj = sample_to_json(sample)
    texts = {name: float32_text(values) for name in FLOAT32_LISTS if (values := obj.get(name))}
    short = {name: text for name, text in texts.items() if text is not None}
    if short and len(short) == len(texts):
        with suppress(TypeError, ValueError):  # `encode_line` encodes it, or names the culprit
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
    """Write samples, or their JSON objects, as they arrive; return their number."""
    with JsonlWriter(path) as out:
        for sample in samples:
            out.write(sample)
    return out.count

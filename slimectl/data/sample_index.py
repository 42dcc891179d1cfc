"""Index of a samples file: the offset of every line, and the columns by which samples are sorted and counted.

A file of a million samples does not fit in memory, but its index does (about 100 bytes per sample). It grows with the
file, and is stored next to large files, so that they are read only once.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from slimectl.data.io import byte_lines
from slimectl.data.jsonl import parse_line
from slimectl.data.records import with_float32
from slimectl.errors import RecordError, SettingsError
from slimectl.rewards import TOTAL
from slimectl.types import Status

COLUMNS = {
    "offset": "q", "length": "q", "group": "q", "index": "q", "trajectory": "q", "prompt": "Q",
    "reward": "d", "response_length": "q", "status": "b", "version": "d", "mismatch": "d", "advantage": "d",
}  # fmt: skip
"""Columns of an index with their array type. Numbers that a sample lacks are NaN.

`mismatch` is the mean |old - rollout log-probability| of the trained tokens: trainer minus engine.
"""

TRAINING_COLUMNS = ("mismatch", "advantage")
STATUSES = tuple(Status)
STORED_BYTES = 64 << 20
"""Smallest file whose index is stored next to it."""
CACHED_BYTES = 64 << 10
"""Smallest file whose index is stored in the user's cache. A run of many rounds has many such files."""
MAX_CACHED = 10_000
"""Maximum number of indexes in the cache."""
FORMAT = 3
"""Version of the stored index."""
FINGERPRINT_BYTES = 4096
SEARCHED_BYTES = 16 << 20
"""Bytes that a search reads at a time."""
BATCH_LINES = 512
"""Lines that are indexed under one lock."""


class SampleIndex:
    """Index of one samples file, plain, .gz or .zst.

    `extend` reads new lines. It may run in a thread while other threads query. Invalid lines are counted in
    `bad_lines`, with the first messages in `errors`.
    """

    def __init__(self, path: Path, *, reward_key: str | None = None) -> None:
        self.path = path
        self.reward_key = reward_key
        self.errors: list[str] = []
        self.bad_lines = 0
        self.bytes_read = 0
        """Bytes of the file that are indexed."""
        self._columns = {name: array(kind) for name, kind in COLUMNS.items()}
        self._snapshot: dict[str, np.ndarray] = {}
        self._lock = threading.Lock()
        self._extending = threading.Lock()
        self._compressed = path.suffix.lower() in (".gz", ".zst")
        self._identity = _identity(path)
        self._file = _decompressed(path) if self._compressed else path.open("rb")
        self._load()

    def __len__(self) -> int:
        return len(self._columns["offset"])

    @property
    def file_bytes(self) -> int:
        """Return the current size of the uncompressed file."""
        return os.fstat(self._file.fileno()).st_size

    @property
    def replaced(self) -> bool:
        """Return whether the path now leads to another file, or the file was truncated."""
        present = _identity(self.path)
        cut = not self._compressed and self.file_bytes < self.bytes_read
        return cut or (present is not None and present != self._identity)

    @property
    def complete(self) -> bool:
        """Return whether every complete line of the file is indexed."""
        return self.bytes_read >= self.file_bytes or not self._has_line()

    def extend(self, seconds: float = math.inf) -> bool:
        """Index new lines for at most `seconds`. Return whether the end of the file is reached."""
        deadline = time.monotonic() + seconds
        with self._extending:
            before = self.bytes_read
            while lines := self._next_lines():
                rows: list[tuple[Any, ...]] = []
                for offset, line in lines:
                    if (row := self._row(offset, line, position=len(self) + len(rows))) is not None:
                        rows.append(row)
                with self._lock:
                    for row in rows:
                        for column, value in zip(self._columns.values(), row, strict=True):
                            column.append(value)
                    offset, line = lines[-1]
                    self.bytes_read = offset + len(line)
                if time.monotonic() > deadline:
                    return False
            if self.bytes_read > before and self.bytes_read >= CACHED_BYTES and not self._compressed:
                self._store()
        return True

    def columns(self) -> dict[str, np.ndarray]:
        """Return all columns as arrays of equal length, which do not change later."""
        with self._lock:
            count = len(self)
            if not self._snapshot or len(self._snapshot["offset"]) != count:
                self._snapshot = {name: np.array(column) for name, column in self._columns.items()}
            return self._snapshot

    def line(self, row: int) -> bytes:
        """Return the line of a sample. Raises SettingsError for a row that the file does not have."""
        if not 0 <= row < len(self):
            raise SettingsError(f"{self.path}: no sample {row}. The file has {len(self)} samples.")
        return os.pread(self._file.fileno(), self._columns["length"][row], self._columns["offset"][row])

    def record(self, row: int) -> dict[str, Any]:
        """Return the JSON object of a sample. Raises RecordError if the file has changed since."""
        return with_float32(parse_line(self.line(row), location=f"{self.path}: sample {row}"))

    def records(self, rows: Sequence[int]) -> Iterator[dict[str, Any]]:
        return map(self.record, rows)

    def search(self, text: str) -> list[int]:
        """Return the rows whose line contains a text, ignoring the case of ASCII letters."""
        offsets, lengths = self.columns()["offset"], self.columns()["length"]
        needles = json_forms(text)
        rows: list[int] = []
        start = 0
        while start < len(offsets):
            end = max(start + 1, int(np.searchsorted(offsets, offsets[start] + SEARCHED_BYTES)))
            size = int(offsets[end - 1] + lengths[end - 1] - offsets[start])
            chunk = os.pread(self._file.fileno(), size, int(offsets[start])).lower()
            for needle in needles:
                rows += _rows_with(needle, chunk, offsets[start:end] - offsets[start], start)
            start = end
        return sorted(set(rows))

    def training_record(self, row: int) -> dict[str, Any]:
        """Return the training values of each token of a sample, or the sample's record in a plain samples file."""
        return self.record(row)

    def rows_without_training(self) -> list[int] | None:
        """Return the rows that no step trained on, or None if unknown."""
        return None

    def close(self) -> None:
        self._file.close()

    def _has_line(self) -> bool:
        rest = self.file_bytes - self.bytes_read
        return b"\n" in os.pread(self._file.fileno(), min(rest, 1 << 26), self.bytes_read)

    def _next_lines(self) -> list[tuple[int, bytes]]:
        """Return the next complete lines with their offsets."""
        lines, offset = [], self.bytes_read
        self._file.seek(offset)
        for line in self._file:
            if not line.endswith(b"\n") and not self._ends_here(line):
                break  # still being written
            lines.append((offset, line))
            offset += len(line)
            if len(lines) == BATCH_LINES:
                break
        return lines

    def _ends_here(self, line: bytes) -> bool:
        """Return whether a last line without a newline is a complete record."""
        with suppress(RecordError):
            parse_line(line, location="")
            return True
        return False

    def _row(self, offset: int, line: bytes, *, position: int) -> tuple[Any, ...] | None:
        """Return the values of all columns for a line, or None for a blank or bad line. Bad lines are counted."""
        if line.isspace():
            return None
        try:
            record = parse_line(line, location=f"{self.path}: byte {offset}")
            return (offset, len(line), *self._values(record, position))
        except (RecordError, TypeError, ValueError, OverflowError) as error:
            self.bad_lines += 1
            if len(self.errors) < 5:
                self.errors.append(str(error) or type(error).__name__)
            return None

    def _values(self, record: dict[str, Any], position: int) -> tuple[Any, ...]:
        index = _int64(record.get("index", position))
        tokens = record.get("tokens") or ()
        versions = record.get("weight_versions") or ()
        rollout_id = record.get("rollout_id")
        status = record.get("status", "completed" if "response" in record else "pending")
        return (
            _int64(record.get("group_index", 0)),
            index,
            index if rollout_id is None else _int64(rollout_id),
            prompt_hash(record.get("prompt", "")),
            reward_number(record.get("reward"), self.reward_key),
            _int64(record.get("response_length", len(tokens))),
            STATUSES.index(status),
            float(versions[0]) if versions and str(versions[0]).isdigit() else math.nan,
            _mean_difference(record.get("old_log_probs"), record.get("rollout_log_probs"), record.get("loss_mask")),
            _mean(record.get("advantages"), record.get("loss_mask")),
        )

    # --- stored index ------------------------------------------------------------------------------------------------

    @property
    def stored_path(self) -> Path:
        """Return the path of the stored index: next to a large file, or in the user's cache."""
        if self.file_bytes >= STORED_BYTES:
            return self.path.with_name(f".{self.path.name}.index.npz")
        return cache_folder() / f"{hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:32]}.npz"

    def _fingerprint(self, size: int) -> str:
        """Return a digest of both ends of the first `size` bytes, by which a stored index recognizes its file."""
        ends = (
            os.pread(self._file.fileno(), FINGERPRINT_BYTES, start) for start in (0, max(0, size - FINGERPRINT_BYTES))
        )
        return hashlib.sha256(b"".join(ends) + str((size, self.reward_key)).encode()).hexdigest()

    def _store(self) -> None:
        header = {"format": FORMAT, "bytes": self.bytes_read, "bad_lines": self.bad_lines, "errors": self.errors,
                  "fingerprint": self._fingerprint(self.bytes_read), "state": _state(self.path)}  # fmt: skip
        columns = SampleIndex.columns(self)
        rows = np.empty(len(self), dtype=[(name, column.dtype) for name, column in columns.items()])
        for name, column in columns.items():
            rows[name] = column
        path = self.stored_path
        staged = path.with_name(f"{path.name}.{os.getpid()}")
        try:  # if it cannot be written, the file is indexed again the next time
            if path.parent != self.path.parent:
                _make_room(path.parent)
            with staged.open("wb") as file:
                np.savez(file, header=np.array(json.dumps(header)), rows=rows)
            os.replace(staged, path)
        except OSError:
            staged.unlink(missing_ok=True)

    def _load(self) -> None:
        """Load a stored index if it belongs to this file, which may have grown since."""
        path = self.stored_path
        if not path.is_file() or path.is_symlink():
            return
        with suppress(OSError, ValueError, KeyError, TypeError), np.load(path, allow_pickle=False) as stored:
            header, rows = json.loads(str(stored["header"])), stored["rows"]
            size = int(header["bytes"])
            if header["format"] != FORMAT or size > self.file_bytes or header["fingerprint"] != self._fingerprint(size):
                return
            if size == self.file_bytes and header["state"] != _state(self.path):
                return
            self._columns = {name: array(kind, rows[name].tobytes()) for name, kind in COLUMNS.items()}
            self.bytes_read, self.bad_lines = size, int(header["bad_lines"])
            self.errors = [str(error) for error in header["errors"]]


def cache_folder() -> Path:
    """Return the folder of the user's cache for indexes of small files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slimectl" / "samples"


def _make_room(folder: Path) -> None:
    """Create the cache folder. If it holds too many indexes, remove the older half."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if len(os.listdir(folder)) >= MAX_CACHED:
        for file in sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime)[: MAX_CACHED // 2]:
            file.unlink(missing_ok=True)


def _state(path: Path) -> list[int]:
    """Return numbers that change when a file is written to or replaced."""
    status = path.stat()
    return [status.st_dev, status.st_ino, status.st_mtime_ns]


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the numbers that identify a file to the system, or None if it is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def prompt_hash(prompt: Any) -> int:
    """Return a 53-bit number that identifies a prompt's text or chat. JavaScript represents it exactly."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 11


def reward_number(reward: Any, key: str | None = None) -> float:
    """Return a reward as a number. NaN if it has none.

    For an object, use the value under `key`. Without a key, use "score", or else the first number.
    """
    if isinstance(reward, dict):
        key = key or (TOTAL if TOTAL in reward else None)
        reward = reward.get(key) if key else next((v for v in reward.values() if isinstance(v, int | float)), None)
    return float(reward) if isinstance(reward, int | float) else math.nan


def json_forms(text: str) -> set[bytes]:
    """Return the forms of a text in a JSON string, with and without escapes beyond ASCII, in lower case."""
    forms = {json.dumps(text, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True)}
    return {form.encode("utf-8", "surrogatepass").lower() for form in forms}


def _rows_with(needle: bytes, chunk: bytes, offsets: np.ndarray, first_row: int) -> Iterator[int]:
    """Yield the rows of a chunk that contain a text. `offsets` are the offsets of its lines."""
    position = chunk.find(needle)
    while position >= 0:
        row = int(np.searchsorted(offsets, position, side="right")) - 1
        yield first_row + row
        position = chunk.find(needle, int(offsets[row + 1])) if row + 1 < len(offsets) else -1


def _int64(value: Any) -> int:
    """Return a 64-bit integer. Raises ValueError, TypeError."""
    number = int(value)
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"{str(value)[:40]} has more than 64 bits")
    return number


def _mean(values: Any, mask: Any) -> float:
    """Return the mean of the values where the mask is 1, or NaN without values."""
    if not values:
        return math.nan
    taught = [value for value, bit in zip(values, mask or [1] * len(values), strict=True) if bit]
    return sum(taught) / len(taught) if taught else math.nan


def _mean_difference(left: Any, right: Any, mask: Any) -> float:
    if not left or not right:
        return math.nan
    return _mean([abs(a - b) for a, b in zip(left, right, strict=True)], mask)


def _decompressed(path: Path) -> IO[bytes]:
    """Return a temporary file with the decompressed content of a file."""
    copy: IO[bytes] = tempfile.TemporaryFile(prefix="slimectl-")  # noqa: SIM115  for the life of the index
    for _, line in byte_lines(path):
        copy.write(line)
    copy.flush()
    return copy


class TrainedSampleIndex(SampleIndex):
    """Index of a round's samples together with the record of its training rows (`train_data.jsonl`).

    The training columns (advantage, mismatch) have values for the rows that were trained on, and NaN for all others.
    """

    def __init__(self, path: Path, training: Path, *, reward_key: str | None = None) -> None:
        super().__init__(path, reward_key=reward_key)
        self.training = SampleIndex(training)

    def extend(self, seconds: float = math.inf) -> bool:
        return self.training.extend(seconds) and super().extend(seconds)

    @property
    def complete(self) -> bool:
        return super().complete and self.training.complete

    def rows_without_training(self) -> list[int] | None:
        trained = np.isin(_sample_keys(self.columns()), _sample_keys(self.training.columns()))
        return np.flatnonzero(~trained).tolist()

    def columns(self) -> dict[str, np.ndarray]:
        columns, trained = super().columns(), self.training.columns()
        keys, trained_keys = _sample_keys(columns), _sample_keys(trained)
        order = np.argsort(trained_keys, kind="stable")
        if not len(order):
            return columns
        trained_keys = trained_keys[order]
        places = np.minimum(np.searchsorted(trained_keys, keys), len(trained_keys) - 1)
        known = trained_keys[places] == keys
        joined = {name: np.where(known, trained[name][order[places]], math.nan) for name in TRAINING_COLUMNS}
        return columns | joined

    def training_record(self, row: int) -> dict[str, Any]:
        """Return the training record with the sample's group, index and tokens, or the sample's own record."""
        record = self.record(row)
        key = _sample_keys(self.columns())[row]
        rows = np.flatnonzero(_sample_keys(self.training.columns()) == key).tolist()
        records = (self.training.record(other) for other in rows)
        return next((trained for trained in records if trained.get("tokens") == record.get("tokens")), record)


def _sample_keys(columns: dict[str, np.ndarray]) -> np.ndarray:
    """Return the group and index of each sample, which identify it. The index may start at 0 in every group."""
    keys = np.empty(len(columns["index"]), dtype=[("group", "i8"), ("index", "i8")])
    keys["group"], keys["index"] = columns["group"], columns["index"]
    return keys

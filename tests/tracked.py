"""Reading back what wandb, SwanLab and Trackio wrote; the first two keep protobuf records in LevelDB's log format."""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

Seen = dict[str, list[tuple[int, float]]]
"""Of every metric, its points (step, value)."""

BLOCK, HEADER, FULL_OR_LAST = 32768, 7, (1, 4)


def raw_records(file: Path) -> Iterator[bytes]:
    """The records of a log: seven bytes of the library's own, then blocks of chunks (crc32, length, kind), padded."""
    data, at, record = file.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + HEADER + length > len(data):
            return  # its process was killed
        record += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in FULL_OR_LAST:
            yield record
            record = b""


def wandb_records(folder: Path, timeout_s: float = 10.0, killed: int = 0) -> list[Any]:
    """Every record of every wandb run in `folder`, oldest first; as many as were `killed` may be unfinished.

    wandb 0.31 returns from finish() a moment before its service has written an offline run down.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    deadline = time.monotonic() + timeout_s
    while True:
        runs = [
            [Record.FromString(raw) for raw in raw_records(file)]
            for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"))
        ]
        if sum(not any(record.HasField("exit") for record in records) for records in runs) <= killed:
            return [record for records in runs for record in records]
        assert time.monotonic() < deadline, f"{folder}: a run was not finished"
        time.sleep(0.02)


def wandb_rows(folder: Path, killed: int = 0) -> list[dict[str, float]]:
    """Every line that was logged."""
    histories = [record.history for record in wandb_records(folder, killed=killed) if record.HasField("history")]
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in history.item}
        for history in histories
    ]


def swanlab_records(folder: Path) -> list[Any]:
    """Every record of every SwanLab run in `folder`, oldest first."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    return [Record.FromString(raw) for file in sorted(folder.glob("run-*/*.swanlab")) for raw in raw_records(file)]


def swanlab_seen(folder: Path) -> Seen:
    """Every scalar by its name."""
    found: Seen = {}
    for record in swanlab_records(folder):
        if record.HasField("scalar"):
            found.setdefault(record.scalar.key, []).append((record.scalar.step, record.scalar.value.number))
    return found


def trackio_seen(folder: Path) -> Seen:
    """Every scalar of the only run in the only database of a folder, by Trackio's tables."""
    (database,) = folder.glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT step, metrics, run_id FROM metrics ORDER BY id").fetchall()
    assert len({run for _, _, run in rows}) == 1
    found: Seen = {}
    for step, metrics, _ in rows:
        for name, value in json.loads(metrics).items():
            found.setdefault(name, []).append((step, value))
    return found


def move_trackio(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Give Trackio another folder than the user's; it reads TRACKIO_DIR once, when it is imported."""
    monkeypatch.setenv("TRACKIO_DIR", str(folder))
    import trackio

    assert trackio.TRACKIO_DIR
    for module in [module for name, module in sys.modules.items() if name.startswith("trackio")]:
        for name in ("TRACKIO_DIR", "MEDIA_DIR"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, folder if name == "TRACKIO_DIR" else folder / "media")

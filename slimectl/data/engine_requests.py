"""Requests to a running run to add or remove engines, and its replies: files in its folder.

engines.json   the engines of the run, and its replies to the latest requests
engines/ID.json   a request, until the run takes it
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from slimectl.data.atomic_replace import storage_errors, write_text

STATE = "engines.json"
REQUESTS = "engines"

Action = Literal["list", "add", "remove"]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What a run is asked for."""

    action: Action
    count: int = 0
    engines: Sequence[str] = ()
    """Engines to remove, by number or address. With none, the `count` newest ones."""
    urls: Sequence[str] = ()
    """Addresses of running servers to add."""
    drain_s: float = 0.0
    """Seconds that the requests of a removed engine get to finish there."""


@dataclass(frozen=True, slots=True)
class EngineRow:
    """An engine of a run."""

    engine: int
    url: str
    machine: str
    state: str
    """starting, loading weights, ready, restarting or leaving."""
    weight_version: str | None
    requests: int
    """Requests in flight there, when the state was written."""


@dataclass(frozen=True, slots=True)
class EngineReply:
    """What became of a request. It is `open` until everything is done."""

    open: bool = False
    done: Sequence[str] = ()
    failed: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class EngineState:
    """The engines of a run, and its replies by the request's id."""

    engines: Sequence[EngineRow] = ()
    replies: Mapping[str, EngineReply] = field(default_factory=dict)


def ask(run: Path, request: EngineRequest) -> str:
    """Write a request into a run's folder and return its id. Raises StorageError."""
    name = f"{time.time_ns()}-{secrets.token_hex(4)}"
    with storage_errors(run):
        (run / REQUESTS).mkdir(exist_ok=True)
    write_text(run / REQUESTS / f"{name}.json", json.dumps(asdict(request)) + "\n")
    return name


def withdraw(run: Path, name: str) -> None:
    """Remove a request that the run has not taken."""
    (run / REQUESTS / f"{name}.json").unlink(missing_ok=True)


def take_requests(run: Path) -> Iterator[tuple[str, EngineRequest]]:
    """Yield the id and content of every request, oldest first, and remove it. An unreadable one is only removed."""
    for path in sorted((run / REQUESTS).glob("[0-9]*.json")):
        with suppress(OSError, ValueError, TypeError):
            text = path.read_text(encoding="utf-8")
            path.unlink()
            yield path.stem, EngineRequest(**json.loads(text))


def write_state(run: Path, state: EngineState) -> None:
    """Replace the state. Raises StorageError."""
    write_text(run / STATE, json.dumps(asdict(state), indent=1) + "\n")


def read_state(run: Path) -> EngineState:
    """Return the last state that a run wrote, or an empty one."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        state = json.loads((run / STATE).read_text(encoding="utf-8"))
        engines = [_known(EngineRow, row) for row in state["engines"]]
        return EngineState(engines, {name: _known(EngineReply, reply) for name, reply in state["replies"].items()})
    return EngineState()


def _known(kind: Any, record: Mapping[str, Any]) -> Any:
    """Build a record from its known keys."""
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in record.items() if name in names})

"""Adds and removes servers of a pool on request: `slimectl engines` writes requests into the run's folder."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from slimectl.data.engine_requests import (
    EngineReply,
    EngineRequest,
    EngineRow,
    EngineState,
    read_state,
    take_requests,
    write_state,
)
from slimectl.engines.supervisor.health import Member
from slimectl.engines.supervisor.server_pool import ServerPool
from slimectl.errors import BackendError, SettingsError, SlimectlError
from slimectl.system.redaction import redact_text
from slimectl.system.stdio import logger, quantity

LOOK_S = 1.0
"""Seconds between looks for requests."""
KEPT_REPLIES = 50
LOCAL = ("127.0.0.1", "localhost", "::1")


class EngineControl:
    """Carries out requests in the folder `run` until `close`, and keeps its engines.json up to date.

    `check(url)` raises SettingsError or BackendError if no engine can be added, a new one (None) or the one at a URL.
    """

    def __init__(self, run: Path, pool: ServerPool, *, check: Callable[[str | None], None]) -> None:
        self._run, self._pool, self._check = run, pool, check
        self._replies: dict[str, EngineReply] = {}
        self._written: object = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="slimectl-engines", daemon=True)

    def start(self) -> None:
        """Start to look for requests. Logs if the run had another number of engines before it was interrupted."""
        before, now = len(read_state(self._run).engines), len(self._pool.members)
        if before not in (0, now):
            logger.info(
                f"the run had {quantity(before, 'engine')} before, and starts with the {now} of its settings. "
                f"Change them with: slimectl engines"
            )
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _loop(self) -> None:
        while not self._closing.is_set():
            try:
                for name, request in take_requests(self._run):
                    self._take(name, request)
                self._write()
            except SlimectlError as error:
                logger.warning(f"engines: {error}")
            self._closing.wait(LOOK_S)

    def _write(self) -> None:
        """Write the state, with the current numbers of requests, if engines or replies have changed."""
        with self._lock:
            replies = dict(self._replies)
        members = self._pool.members
        shown = [(m.number, m.url, m.state, m.weight_version) for m in members], replies
        if shown != self._written:
            running = self._pool.running()
            rows = [_row(member, running.get(member.url, 0)) for member in members]
            write_state(self._run, EngineState(rows, replies))
            self._written = shown

    def _take(self, name: str, request: EngineRequest) -> None:
        """Carry out a request, each engine in a thread of its own."""
        calls: Sequence[Callable[[], str]] = ()
        refusal = ""
        try:
            if request.action == "add":
                calls = self._additions(request)
            elif request.action == "remove":
                calls = self._removals(request)
        except (SettingsError, BackendError) as error:
            refusal = str(error)
        with self._lock:
            self._replies[name] = EngineReply(bool(calls), (), (refusal,) if refusal else ())
            for old in [*self._replies][:-KEPT_REPLIES]:
                del self._replies[old]
        for call in calls:
            threading.Thread(target=self._carry_out, args=(name, call, len(calls)), daemon=True).start()

    def _carry_out(self, name: str, call: Callable[[], str], count: int) -> None:
        done, failed = [], []
        try:
            done.append(call())
        except SlimectlError as error:
            failed.append(str(error))
        except Exception as error:
            failed.append(f"{type(error).__name__}: {error}")
        with self._lock:
            before = self._replies.get(name, EngineReply())
            reply = EngineReply(True, (*before.done, *done), (*before.failed, *failed))
            is_open = len(reply.done) + len(reply.failed) < count
            self._replies[name] = EngineReply(is_open, reply.done, reply.failed)

    def _additions(self, request: EngineRequest) -> list[Callable[[], str]]:
        running = [url.rstrip("/") for url in request.urls]
        urls: list[str | None] = [*running] if running else [None] * request.count
        for url in dict.fromkeys(urls):
            if member := next((member for member in self._pool.members if member.url == url), None):
                raise BackendError(f"{url} is already engine {member.number}")
            self._check(url)
        return [partial(self._add, url) for url in urls]

    def _add(self, url: str | None) -> str:
        member = self._pool.add(url)
        return f"engine {member.number} joined at {redact_text(member.url)} with weights {member.weight_version}"

    def _removals(self, request: EngineRequest) -> list[Callable[[], str]]:
        staying = [member for member in self._pool.members if not member.leaves]
        removed = [self._named(staying, name) for name in request.engines] or staying[-request.count :]
        if not any(member.up for member in staying if member not in removed):
            raise BackendError("at least one ready engine must stay, or no request could be answered. Add one first.")
        return [partial(self._remove, member, request.drain_s) for member in dict.fromkeys(removed)]

    def _named(self, members: Sequence[Member], name: str) -> Member:
        for member in members:
            if name in (str(member.number), member.url) or name.rstrip("/") == member.url:
                return member
        numbers = ", ".join(str(member.number) for member in members)
        raise BackendError(f"engine {name}: the run has no such engine, only {numbers}")

    def _remove(self, member: Member, drain_s: float) -> str:
        moved = self._pool.remove(member.number, drain_s=drain_s)
        return f"engine {member.number} left" + (
            f", {quantity(moved, 'request')} moved to other engines" if moved else ""
        )


def _row(member: Member, requests: int) -> EngineRow:
    host = urlsplit(member.url).hostname or ""
    machine = socket.gethostname() if host in ("", *LOCAL) else host
    return EngineRow(member.number, redact_text(member.url), machine, member.state, member.weight_version, requests)

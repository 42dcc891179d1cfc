"""Episodes of an environment, in processes that its host forks. Calls have a deadline, and every process ends."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import selectors
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import slimectl
from slimectl import errors
from slimectl.agents.environments.host import LINE, one_line
from slimectl.agents.environments.port import Action, Observation, Task
from slimectl.errors import BackendError
from slimectl.system.loopback import bypass_proxies, scratch_folder
from slimectl.system.redaction import redact_text
from slimectl.system.stdio import logger

START = (
    "import sys, types; package = types.ModuleType('slimectl'); package.__path__ = [sys.argv[1]]; "
    "sys.modules['slimectl'] = package; from slimectl.agents.environments.host import main; main(sys.argv[2])"
)
"""Starts the host from its own files, without the imports of slimectl's packages."""
LOADING_S = 600.0
"""Seconds to load an environment, which may download its data set."""
TAIL_BYTES = 4000
"""Bytes of a host's output that are kept for an error message."""


class EpisodeError(Exception):
    """An episode failed, and not because of the policy: its environment raised, died or exceeded its deadline."""


class EpisodeTimeoutError(EpisodeError):
    """An environment exceeded its deadline."""


@dataclass(frozen=True)
class Specification:
    """An environment's name, its arguments as JSON, and the Python that has its packages."""

    kind: str
    target: str
    arguments: str = "{}"
    python: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.target}"


class EnvironmentHost:
    """The process that has loaded an environment. It starts with the first use, and again if it died."""

    def __init__(self, specification: Specification) -> None:
        self.specification = specification
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._description: dict[str, Any] = {}
        self._output: OutputTail | None = None

    def description(self) -> dict[str, Any]:
        """Start the host if it is not running, and return its description: tasks, counts and whether it gives rewards.

        Raises SlimectlError if the environment cannot be loaded.
        """
        with self._starting:
            if self._process is None or self._process.poll() is not None:
                self._start()
            if "error" in self._description:  # also while a host that failed to load it is exiting
                raise getattr(errors, self._description["class"], BackendError)(self._description["error"])
            return self._description

    def _start(self) -> None:
        specification = self.specification
        self._folder = scratch_folder("slimectl-env-")
        bypass_proxies()
        python = specification.python or sys.executable
        command = [python, "-c", START, str(Path(slimectl.__file__).parent), str(self._folder / "socket")]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=os.environ | {"TMPDIR": str(self._folder)},  # files of a killed episode are removed with the host's
                start_new_session=True,
            )
        except OSError as error:
            shutil.rmtree(self._folder)
            raise BackendError(f"rollout.env_python: cannot start {python}: {error.strerror}") from None
        self._process = process
        weakref.finalize(self, _stop, process, self._folder, os.getpid())
        assert process.stdin is not None
        assert process.stderr is not None
        self._output = OutputTail(process.stderr)
        values = {"kind": specification.kind, "target": specification.target}
        values["arguments"] = json.loads(specification.arguments)
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(values).encode() + b"\n")
            process.stdin.flush()
        self._description = self._first_line(process)
        for warning in self._description.get("warnings", ()):
            logger.warning(f"{specification.name}: {warning}")

    def _first_line(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            ready = selector.select(LOADING_S)
        line = process.stdout.readline() if ready else b""
        if line:
            description: dict[str, Any] = json.loads(line)
            return description
        process.kill()
        status = f"ended with {process.wait()}" if ready else f"was not loaded within {LOADING_S:g} s"
        raise BackendError(f"rollout.env: {self.specification.name} {status}{self.last_words()}")

    def last_words(self) -> str:
        """Return the last line that the environment printed, after a colon."""
        lines = self._output.text().strip().splitlines() if self._output else []
        return f": {redact_text(lines[-1])[:300]}" if lines else ""

    @asynccontextmanager
    async def episode(self, deadline_s: float) -> AsyncIterator[Episode]:
        """Open an episode, whose process has ended afterwards. Raises EpisodeError, SlimectlError."""
        await asyncio.to_thread(self.description)
        assert self._folder is not None
        try:
            reader, writer = await asyncio.open_unix_connection(self._folder / "socket", limit=LINE)
        except OSError as error:
            raise EpisodeError(f"{self.specification.name} died{self.last_words()}") from error
        episode = Episode(self, reader, writer, deadline_s)
        try:
            yield episode
        finally:
            if episode.pid and not episode.is_over:
                self._kill(episode.pid)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _kill(self, pid: int) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write(f"{pid}\n".encode())
            self._process.stdin.flush()


@lru_cache(maxsize=4)
def shared_host(specification: Specification) -> EnvironmentHost:
    """Return this process's host of an environment, so that the tasks and agents of a run load it only once."""
    return EnvironmentHost(specification)


class Episode:
    """One episode. Its calls may take `deadline_s` seconds in total, not counting the policy's answers."""

    def __init__(
        self, host: EnvironmentHost, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, deadline_s: float
    ) -> None:
        self._host, self._reader, self._writer = host, reader, writer
        self.deadline_s = deadline_s
        self.spent_s = 0.0
        self.pid: int | None = None
        self.is_over = False
        """Whether the process has answered its last call. It then ends when its connection closes."""

    async def reset(self, task: Task) -> Observation:
        """Start the episode. Raises EpisodeError."""
        return await self._call("reset", dataclasses.asdict(task))

    async def step(self, action: Action) -> Observation:
        """Apply an answer of the policy. Raises EpisodeError."""
        return await self._call("step", dataclasses.asdict(action))

    async def close(self) -> Observation:
        """End the episode and return the rewards that are still due. Raises EpisodeError."""
        observation = await self._call("close", {})
        self.is_over = True
        return observation

    async def _call(self, method: str, argument: Mapping[str, Any]) -> Observation:
        name, began = self._host.specification.name, time.perf_counter()
        try:
            async with asyncio.timeout(max(0.0, self.deadline_s - self.spent_s)):
                if self.pid is None:
                    self.pid = (await self._line())["pid"]
                self._writer.write(json.dumps({"method": method, "argument": argument}, default=str).encode() + b"\n")
                await self._writer.drain()
                answer = await self._line()
        except TimeoutError:
            limit = f"rollout.env_timeout_s: {self.deadline_s:g} s"
            raise EpisodeTimeoutError(f"{name} took more than {limit} in {method}") from None
        except (OSError, ValueError) as error:
            raise EpisodeError(f"{name} died in {method}: {one_line(error)}{self._host.last_words()}") from None
        finally:
            self.spent_s += time.perf_counter() - began
        if "error" in answer:
            raise EpisodeError(f"{name} failed in {method}: {redact_text(answer['error'])}")
        return Observation.read(answer["result"])

    async def _line(self) -> dict[str, Any]:
        line = await self._reader.readline()
        if not line:
            raise ConnectionResetError("its process has ended")
        values: dict[str, Any] = json.loads(line)
        return values


class OutputTail:
    """Reads a pipe in a thread, so that its writer never waits, and keeps the end of the output."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._tail = bytearray()
        self._lock = threading.Lock()
        os.set_blocking(stream.fileno(), False)
        threading.Thread(target=self._follow, daemon=True).start()

    def text(self) -> str:
        """Return the last TAIL_BYTES bytes written so far, including those that the thread has not read yet."""
        self._read()
        return bytes(self._tail).decode(errors="replace")

    def _follow(self) -> None:
        with suppress(OSError, ValueError), selectors.DefaultSelector() as selector:
            selector.register(self._stream, selectors.EVENT_READ)
            while self._read():
                selector.select()

    def _read(self) -> bool:
        """Read the available output, and return whether more can follow."""
        with self._lock, suppress(BlockingIOError):
            while chunk := os.read(self._stream.fileno(), 1 << 16):
                self._tail += chunk
                del self._tail[:-TAIL_BYTES]
            return False
        return True


def _stop(process: subprocess.Popen[bytes], folder: Path, owner: int) -> None:
    """End a host with its episodes by closing its stdin. A fork of its owner leaves it running."""
    if os.getpid() != owner:
        return
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            with suppress(OSError):
                stream.close()
    shutil.rmtree(folder, ignore_errors=True)

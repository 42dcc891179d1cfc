"""The process of an agent: its input and outputs, and its end with all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

KEPT = 1 << 16
"""Bytes of each output that are kept, the last ones."""
GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL."""
TICK_S = 0.02
"""Seconds between looks at a program."""
MARK = "SLIMECTL_SESSION_URL"
"""Environment variable by which processes of an attempt are recognised that left its process group."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of an attempt: the exit status (below 0: the signal), its duration, and the ends of its outputs."""

    exit_code: int
    seconds: float
    stdout: str
    stderr: str
    timed_out: bool = False


class AgentProcess:
    """A running agent; `mark` is the value of MARK in its environment."""

    def __init__(self, process: asyncio.subprocess.Process, mark: str) -> None:
        self._process, self._mark = process, mark
        self._outputs = {"stdout": bytearray(), "stderr": bytearray()}
        assert process.stdout is not None
        assert process.stderr is not None
        self._readers = [
            asyncio.ensure_future(_read(stream, self._outputs[name]))
            for name, stream in (("stdout", process.stdout), ("stderr", process.stderr))
        ]

    @classmethod
    async def start(cls, argv: Sequence[str], task: str, environment: Mapping[str, str], *, mark: str) -> AgentProcess:
        """Start the program in a session of its own, with the task as a line on its stdin."""
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(task.encode(errors="replace") + b"\n")
        process.stdin.close()
        return cls(process, mark)

    async def ended_within(self, seconds: float) -> bool:
        """Return whether the program ends within so many seconds.

        It is asked for its exit status: asyncio's `wait` also waits for children that hold its pipes open.
        """
        ticks = max(1, round(seconds / TICK_S))
        for _ in range(ticks):
            if self._process.returncode is not None:
                return True
            await asyncio.sleep(TICK_S)
        return self._process.returncode is not None

    def ending(self, seconds: float) -> Ending:
        """Return how the program ended, which it has."""
        code = self._process.returncode
        stdout, stderr = (bytes(output).decode(errors="replace") for output in self._outputs.values())
        return Ending(-signal.SIGKILL if code is None else code, seconds, stdout, stderr)

    async def kill(self) -> None:
        """End the program and all that it started, SIGTERM first; it is safe to call it again."""
        if self._process.returncode is None:
            self._signal_group(signal.SIGTERM)
            await self.ended_within(GRACE_S)
        self._signal_group(signal.SIGKILL)
        for pid in await asyncio.to_thread(lambda: list(marked_processes(self._mark))):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        await self.ended_within(GRACE_S)
        # A process that escaped may hold the pipes open; what it writes is nobody's.
        await asyncio.wait(self._readers, timeout=0.5)
        for reader in self._readers:
            reader.cancel()

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


async def _read(stream: asyncio.StreamReader, output: bytearray) -> None:
    """Read a pipe to its end, so that its writer never waits, and keep the last bytes."""
    while chunk := await stream.read(KEPT):
        output += chunk
        del output[:-KEPT]


def marked_processes(mark: str) -> Iterator[int]:
    """Yield the ids of processes with this value of MARK in their environment; none where there is no /proc."""
    expected = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if expected in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                yield int(folder.name)

"""The process of an agent: its input, its outputs, and its end with everything that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

KEPT = 1 << 16
"""Number of last bytes of each output that are kept."""
GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL."""
DRAIN_S = 0.5
"""Seconds to wait for the outputs to close after all processes have ended."""
START = (
    "import sys, types; package = types.ModuleType('slimectl'); package.__path__ = [sys.argv[1]]; "
    "sys.modules['slimectl'] = package; from slimectl.agents.process_supervisor import start_from; "
    "start_from(sys.argv[2:])"
)


@dataclass(frozen=True, slots=True)
class Ending:
    """End of an attempt: the exit status (negative for a signal), the duration, and the last part of its outputs."""

    exit_code: int
    seconds: float
    stdout: str
    stderr: str
    timed_out: bool = False


class AgentProcess(asyncio.SubprocessProtocol):
    """A running agent. On Linux a supervising process is its parent."""

    def __init__(self) -> None:
        self._transport: asyncio.SubprocessTransport
        self._outputs = {1: bytearray(), 2: bytearray()}
        self._ended, self._closed = asyncio.Event(), asyncio.Event()

    @classmethod
    async def start(cls, argv: Sequence[str], task: str, environment: Mapping[str, str]) -> AgentProcess:
        """Start the program in its own session, with the task as a line on stdin."""
        if sys.platform == "linux":
            package = str(Path(__file__).parent.parent)
            python = [sys.executable, "-I", "-S", "-c", START]
            argv = [*python, package, str(os.getpid()), str(GRACE_S), *argv]
        loop = asyncio.get_running_loop()
        transport, process = await loop.subprocess_exec(cls, *argv, env=environment, start_new_session=True)
        stdin = transport.get_pipe_transport(0)
        assert isinstance(stdin, asyncio.WriteTransport)
        stdin.write(task.encode(errors="replace") + b"\n")
        stdin.close()
        return process

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Keep the last bytes of an output. Its writer never waits."""
        self._outputs[fd] += data
        del self._outputs[fd][:-KEPT]

    def process_exited(self) -> None:
        self._ended.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._closed.set()

    async def ended_within(self, seconds: float) -> bool:
        """Return whether the program ends within `seconds`, even if other processes keep its outputs open."""
        return await _is_set_within(self._ended, seconds)

    def ending(self, seconds: float) -> Ending:
        """Return how the program ended. Call this after its end. Its outputs are complete after `kill`."""
        code = self._transport.get_returncode()
        stdout, stderr = (bytes(output).decode(errors="replace") for output in self._outputs.values())
        return Ending(-signal.SIGKILL if code is None else code, seconds, stdout, stderr)

    async def kill(self) -> None:
        """End the program and everything that it started, first with SIGTERM. Can be called again."""
        try:
            if not self._ended.is_set():
                self._signal_group(signal.SIGTERM)
                await self.ended_within(2 * GRACE_S)  # the supervising process itself waits GRACE_S
            self._signal_group(signal.SIGKILL)
            await self.ended_within(GRACE_S)
            # A process that escaped may keep the pipes open. Its output is dropped.
            await _is_set_within(self._closed, DRAIN_S)
        finally:
            self._transport.close()

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._transport.get_pid(), number)


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()

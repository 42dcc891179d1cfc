"""A server across several machines, with one process on each, started, watched and stopped together."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Protocol

from slimectl.engines.supervisor.health import Server, failure_reason, is_alive, stop_quietly
from slimectl.engines.supervisor.server_pool import in_threads
from slimectl.system.listening import interface, own_address

TRIES = 2
"""Maximum start attempts. The meeting address may be taken by others before the processes use it."""


class NodeProcess(Server, Protocol):
    """The process of a server on one of its machines. The object may live there."""

    def meeting_address(self) -> str: ...

    def start(self, arguments: Sequence[str] = ()) -> str: ...


class NodeGroup:
    """health.Server with one process per machine. The first process answers requests at the server's address.

    `flags` converts the meeting address, on the first machine, to arguments for every process. The group is alive while
    all of its processes are, and it is restarted as a whole.
    """

    def __init__(self, processes: Sequence[NodeProcess], flags: Callable[[str], Sequence[str]]) -> None:
        self._processes, self._flags = list(processes), flags

    def start(self) -> str:
        """Start all processes together, and return the address of the first one. Raises the first error."""
        for attempt in range(1, TRIES + 1):
            self.stop()
            arguments = self._flags(self._processes[0].meeting_address())
            threads, outcomes = in_threads(methodcaller("start", arguments), self._processes)
            urls: dict[int, str] = {}
            failure: BaseException | None = None
            try:
                while failure is None and len(urls) < len(self._processes):
                    number, url, failure = outcomes.get()
                    urls[number] = str(url)
            finally:
                if failure is not None or len(urls) < len(self._processes):
                    self._stop_all()  # ends processes that are still starting
                for thread in threads:
                    thread.join()
            if failure is None:
                return urls[0]
            if attempt == TRIES or "in use" not in str(failure).lower():
                raise failure
        raise AssertionError("the last attempt returns or raises")

    def alive(self) -> bool:
        return all(is_alive(process) for process in self._processes)

    def death(self) -> str:
        """Return why the first dead process died. The others end with it."""
        node = next((node for node, process in enumerate(self._processes) if not is_alive(process)), 0)
        return f"on machine {node} of {len(self._processes)}: {failure_reason(self._processes[node])}"

    def stop(self) -> None:
        """Stop all processes. If a machine is gone, raises its error after stopping the others."""
        self._stop_all()
        for process in self._processes:
            process.stop()

    def _stop_all(self) -> None:
        for thread in in_threads(stop_quietly, self._processes)[0]:
            thread.join()


def interface_variables(host: str | None) -> dict[str, str]:
    """Return environment variables that make gloo use the interface of an address (None: this machine's own).

    By default, gloo looks up the host's own name, which may resolve to the loopback. A value set by the user is kept.
    """
    name = None if "GLOO_SOCKET_IFNAME" in os.environ else interface(host or own_address())
    return {"GLOO_SOCKET_IFNAME": name} if name else {}

"""Engines' side of a weight push over HTTP: requests to all workers at once, around the update and during it.

What one kind of server makes of each step is its subclass's, e.g. engines.sglang.weight_client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from torch import Tensor, dtype

from slimectl.engines.api_keys import NO_KEYS, Keys
from slimectl.engines.http.fan_out import Answer, Json, ask, ask_all
from slimectl.engines.http.payloads import SharedMemoryBlock

Body = Json | Callable[[str], Json]
"""Body for all workers, or a function of the URL."""

IDLE_TIMEOUT_S = 10.0
"""Seconds that a paused engine may take to end its last answers before its prefix cache is flushed."""


class HttpWorkers:
    """protocols.WeightUpdateClient over HTTP; `set_urls` replaces the workers, from any thread.

    A response may take `timeout_s`. Picklable; must not be used inside a running event loop.
    """

    def __init__(self, urls: Sequence[str], *, timeout_s: float = 600.0, keys: Keys = NO_KEYS) -> None:
        self.timeout_s = timeout_s
        self._keys = keys
        self.urls: tuple[str, ...] = ()
        self._mode = "abort"
        self._session_open = False
        self._block: SharedMemoryBlock | None = None
        self.set_urls(urls)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the shared-memory block: a copy allocates one itself."""
        return self.__dict__ | {"_block": None}

    def set_urls(self, urls: Sequence[str]) -> None:
        self.urls = tuple(url.rstrip("/") for url in urls)

    # --- steps that every kind of server implements ------------------------------------------------------------------

    @property
    def ranks(self) -> list[int]:
        raise NotImplementedError

    @property
    def checksums_by_hf_name(self) -> bool:
        return False

    @property
    def shares_memory(self) -> bool:
        """Whether `load_tensors` goes through shared memory on a CPU too, faster than any other transport."""
        return False

    def _pause(self, mode: str) -> None:
        """Pause generation; answers in flight continue afterwards (in_place, retract) or end (abort)."""
        raise NotImplementedError

    async def _resume(self, session: aiohttp.ClientSession, url: str) -> None:
        """End the update of one worker, flush its prefix cache and continue, whatever failed. Raises BackendError."""
        raise NotImplementedError

    def _open_session(self) -> None:
        """Prepare for tensors, before the first of them."""
        raise NotImplementedError

    def load_disk(self, folder: Path, *, version: str) -> None:
        raise NotImplementedError

    def load_tensors(self, tensors: Sequence[tuple[str, Tensor]], *, version: str) -> None:
        raise NotImplementedError

    def _join(self, group: dict[str, Any], offsets: dict[str, int]) -> None:
        """Join a process group; `offsets` has the first rank of every worker."""
        raise NotImplementedError

    def load_broadcast(self, forms: Sequence[tuple[str, dtype, tuple[int, ...]]], *, name: str, version: str) -> None:
        raise NotImplementedError

    def leave(self, *, name: str) -> None:
        raise NotImplementedError

    def checksums(self) -> list[dict[str, str]]:
        raise NotImplementedError

    def randomize_weights(self) -> None:
        raise NotImplementedError

    def sleep(self) -> None:
        """Release the memory of cache and weights, after ending requests in flight."""
        raise NotImplementedError

    def wake(self) -> None:
        """Allocate the memory again; a push brings the weights and continues generation."""
        raise NotImplementedError

    # --- around an update ------------------------------------------------------------------------------------------

    def begin(self, *, mode: str) -> None:
        self._mode, self._session_open = mode, False
        try:
            self._pause(mode)
        except BaseException:
            self._end(within_s=IDLE_TIMEOUT_S)
            raise

    def end(self, *, within_s: float | None = None) -> None:
        """End the update and continue. Flushes the prefix cache, except `in_place` with answers in flight."""
        for failure in self._end(within_s=within_s):
            raise failure

    def _end(self, *, within_s: float | None) -> list[BaseException]:
        results = ask_all(self._resume, self.urls, limit_s=min(within_s or self.timeout_s, self.timeout_s))
        self._session_open, self._mode = False, "abort"
        return [result for result in results if isinstance(result, BaseException)]

    def _begin_update(self) -> None:
        """Begin the update session before the first tensor."""
        if not self._session_open:
            self._open_session()
            self._session_open = True

    def _shared_block(self, tensors: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
        """Write tensors into shared memory that all workers of this machine read; returns its name and table."""
        size = sum(tensor.nbytes for _, tensor in tensors)
        if self._block is None or self._block.size < size:
            self._block = SharedMemoryBlock(size)
        return self._block.hold(tensors)

    def join(self, *, host: str, port: int, world: int, name: str, backend: str) -> None:
        offsets: dict[str, int] = {}
        next_rank = 1
        for url, ranks in zip(self.urls, self.ranks, strict=True):
            offsets[url], next_rank = next_rank, next_rank + ranks
        group = {
            "master_address": host, "master_port": port, "world_size": world, "group_name": name, "backend": backend
        }  # fmt: skip
        self._join(group, offsets)

    # --- requests --------------------------------------------------------------------------------------------------

    def _request_all(
        self, path: str, body: Body, *, urls: Sequence[str] | None = None, method: str = "POST"
    ) -> list[Answer]:
        """Send a request to every worker; returns their answers. Raises BackendError if one refuses."""
        answers = self._ask_all(path, body, urls=urls, method=method)
        for answer in answers:
            if answer.refused:
                raise answer.error()
        return answers

    def _ask_all(
        self,
        path: str,
        body: Body,
        *,
        urls: Sequence[str] | None = None,
        method: str = "POST",
        limit_s: float | None = None,
    ) -> list[Answer]:
        async def ask_one(session: aiohttp.ClientSession, url: str) -> Answer:
            return await self._ask(session, url, path, body(url) if callable(body) else body, method=method)

        limit_s = min(limit_s or self.timeout_s, self.timeout_s)
        results = ask_all(ask_one, self.urls if urls is None else urls, limit_s=limit_s)
        for answer in results:
            if isinstance(answer, BaseException):
                raise answer
        return results

    async def _ask(
        self, session: aiohttp.ClientSession, url: str, path: str, body: Json, *, method: str = "POST"
    ) -> Answer:
        return await ask(session, url, path, body, method=method, keys=self._keys)

"""Pushes weights to engines over HTTP: requests to all workers, and shared memory for the tensors.

Subclasses implement the steps for each kind of server, for example engines.sglang.weight_client.
"""

from __future__ import annotations

import asyncio
import copy
import io
import json
import math
import os
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import torch
from torch import Tensor

from slimectl.engines.api_keys import NO_KEYS, ServerKeys
from slimectl.errors import BackendError, StorageError
from slimectl.protocols import Adapter, WeightUpdateClient
from slimectl.system import shared_memory
from slimectl.system.event_loop import run_coroutine
from slimectl.system.http import Reply, parsed
from slimectl.system.shared_memory import SharedMemoryFile, free_bytes

NamedTensor = tuple[str, Tensor]

Json = Mapping[str, Any] | bytes
"""Request body, or the object to encode as one."""

Body = Json | Callable[[str], Json]
"""Body for all workers, or a function of the URL."""

CONNECT_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 10.0
"""Seconds to wait until a paused engine has ended its last responses and its prefix cache can be flushed."""
UPDATE_PATH = "/update_weights"
"""A path that requires the admin key, like every request of a push."""
RESERVED_BYTES = 16 * 2**20
"""Bytes of shared memory to allocate at a time."""


def aligned(tensors: Sequence[NamedTensor]) -> list[NamedTensor]:
    """Sort tensors by element size, largest first, so that each is aligned when they are concatenated."""
    return sorted(tensors, key=lambda named: -named[1].element_size())


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class WorkerReply(Reply):
    """A worker's response to a request for `path`."""

    url: str
    path: str

    @property
    def refused(self) -> bool:
        return self.status >= 400 or (isinstance(self.body, dict) and self.body.get("success") is False)

    def error(self) -> BackendError:
        hint = ". Set its key in engine.admin_api_key and engine.api_key." if self.status == 401 else ""
        return BackendError(f"engine at {self.url}: {self.path} was refused ({self.status}): {self.message}{hint}")


class HttpWorkers(WeightUpdateClient):
    """protocols.WeightUpdateClient over HTTP. `set_urls` replaces the workers and is thread-safe.

    A response may take `timeout_s`. Picklable. Do not use it inside a running event loop.
    """

    urls: tuple[str, ...] = ()

    def __init__(self, urls: Sequence[str], *, timeout_s: float = 600.0, keys: ServerKeys = NO_KEYS) -> None:
        self.timeout_s = timeout_s
        self._keys = keys
        self._update_headers: dict[str, dict[str, str]] = {}
        self._mode = "abort"
        self._session_open = False
        self._adapter: dict[str, Any] | None = None
        self._block: SharedMemoryBlock | None = None
        self._lent: SharedMemoryBlock | None = None
        self.set_urls(urls)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without shared-memory blocks. A copy allocates its own."""
        return self.__dict__ | {"_block": None, "_lent": None}

    def set_urls(self, urls: Sequence[str]) -> None:
        workers = tuple(url.rstrip("/") for url in urls)
        # Added, not replaced, because another thread may still be sending to the old workers.
        self._update_headers |= {url: self._keys.headers(url, UPDATE_PATH) for url in workers}
        self.urls = workers

    def only(self, urls: Sequence[str]) -> Self:
        some = copy.copy(self)
        some.set_urls(urls)
        return some

    # --- steps that each kind of server implements, in addition to the rest of WeightUpdateClient ---------------------

    @property
    def checksums_by_hf_name(self) -> bool:
        return False

    @property
    def shares_memory(self) -> bool:
        return False

    @property
    def adapter_transports(self) -> Sequence[str]:
        return ()

    def _pause(self, mode: str) -> None:
        """Pause generation. Responses in flight continue afterwards (in_place, retract) or end (abort)."""
        raise NotImplementedError

    async def _resume(self, session: aiohttp.ClientSession, url: str) -> None:
        """End one worker's update, flush its prefix cache and resume it, even after errors. Raises BackendError."""
        raise NotImplementedError

    def _open_session(self) -> None:
        """Prepare for the first tensor."""
        raise NotImplementedError

    def loads(self) -> dict[str, int]:
        """Return the number of requests at each worker that answers."""
        raise NotImplementedError

    def _join(self, group: dict[str, Any], offsets: dict[str, int]) -> None:
        """Join a process group. `offsets` has the first rank of every worker."""
        raise NotImplementedError

    # --- around an update ------------------------------------------------------------------------------------------

    def begin(self, *, mode: str) -> None:
        self._mode, self._session_open, self._adapter = mode, False, None
        try:
            self._pause(mode)
        except BaseException:
            self._end(within_s=IDLE_TIMEOUT_S)
            raise

    def end(self, *, within_s: float | None = None) -> None:
        """End the update and resume. Flushes the prefix cache, except in mode `in_place` with responses in flight."""
        for failure in self._end(within_s=within_s):
            raise failure

    def _end(self, *, within_s: float | None) -> list[BaseException]:
        results = ask_all(self._resume, self.urls, limit_s=min(within_s or self.timeout_s, self.timeout_s))
        self._session_open, self._mode = False, "abort"
        return [result for result in results if isinstance(result, BaseException)]

    def expect_adapter(self, adapter: Adapter) -> None:
        """Announce that the next tensors are an adapter. Opening the session sends this to the engines."""
        self._adapter = {
            "base": str(adapter.base),
            "fingerprint": adapter.fingerprint(adapter.base),
            "rank": adapter.rank,
            "alpha": adapter.alpha,
            "layers": len(adapter.layers),
        }

    def _begin_update(self) -> None:
        """Open the update session before the first tensor."""
        if not self._session_open:
            self._open_session()
            self._session_open = True

    @contextmanager
    def message_memory(self, most_bytes: int) -> Iterator[SharedMemoryBlock | None]:
        """Lend a block for messages of up to `most_bytes`, or None if not all workers can read it.

        The block is smaller if less memory is free. The process keeps the block for its next push.
        """
        if not self.shares_memory:
            yield None
            return
        block = _UNUSED.pop(most_bytes, None) or SharedMemoryBlock(min(most_bytes, free_bytes()))
        block.clear()
        self._lent = block
        try:
            yield block
        finally:
            self._lent = None
            _UNUSED.clear()
            _UNUSED[most_bytes] = block

    def release_memory(self) -> None:
        """Release the block kept for the next push."""
        _UNUSED.clear()

    def _shared_block(self, tensors: Sequence[NamedTensor]) -> dict[str, Any]:
        """Write tensors to shared memory for all workers on this machine. Return its name and table."""
        size = sum(tensor.nbytes for _, tensor in tensors)
        if self._lent is not None and size <= self._lent.size:
            return self._lent.hold(tensors)
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
    ) -> list[WorkerReply]:
        """Send a request to every worker and return the responses. Raises BackendError if a worker refuses."""
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
    ) -> list[WorkerReply]:
        async def ask_one(session: aiohttp.ClientSession, url: str) -> WorkerReply:
            return await self._ask(session, url, path, body(url) if callable(body) else body, method=method)

        limit_s = min(limit_s or self.timeout_s, self.timeout_s)
        results = ask_all(ask_one, self.urls if urls is None else urls, limit_s=limit_s)
        for answer in results:
            if isinstance(answer, BaseException):
                raise answer
        return results

    async def _ask(
        self, session: aiohttp.ClientSession, url: str, path: str, body: Json, *, method: str = "POST"
    ) -> WorkerReply:
        """Send a request to one worker. Raises BackendError if the worker is gone."""
        # Not bytes, because aiohttp would send a large body in one piece and block the loop.
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        data = io.BytesIO(payload) if method == "POST" else None
        keys = self._update_headers[url] if method == "POST" else self._keys.headers(url, path)
        try:
            async with session.request(
                method, url + path, data=data, headers={"Content-Type": "application/json", **keys}
            ) as response:
                text = await response.text()
        except aiohttp.ClientConnectorError as error:
            code = error.errno or 0
            reason = os.strerror(code) if code > 0 else str(error.os_error)  # an unresolved host has no code
            raise BackendError(f"engine at {url} cannot be reached: {reason}. See its log.") from error
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise BackendError(f"engine at {url} died during {path} ({reason}). See its log.") from error
        return WorkerReply(response.status, parsed(text), url, path.partition("?")[0])


def ask_all(
    question: Callable[[aiohttp.ClientSession, str], Coroutine[Any, Any, Any]], urls: Sequence[str], *, limit_s: float
) -> list[Any]:
    """Run `question` for every URL concurrently. Return all results, with exceptions in place.

    A server that is not running or takes longer than `limit_s` results in a BackendError.
    """

    async def ask_one(session: aiohttp.ClientSession, url: str) -> Any:
        try:
            return await asyncio.wait_for(question(session, url), limit_s)
        except TimeoutError:
            raise BackendError(
                f"engine at {url} did not respond within {limit_s:g} s. See its log, or raise sync.timeout_s."
            ) from None

    async def ask_each() -> list[Any]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            return await asyncio.gather(*(ask_one(session, url) for url in urls), return_exceptions=True)

    return run_coroutine(ask_each())


class SharedMemoryBlock:
    """Shared memory that successive messages reuse, because first touching a page costs more than filling it.

    A message has at most `size` bytes of tensors, which are created here (`empty`) or copied (`hold`). The memory is
    released with this object, and its tensors must not be used afterwards. Raises StorageError if memory is short.
    """

    def __init__(self, size: int) -> None:
        shared_memory.remove_orphans()
        if free_bytes() < size:  # containers often have 64 MiB
            raise _no_room(size)
        self.size = size
        # Twice the size leaves room for alignment. Only the used part is allocated.
        try:
            self._file = SharedMemoryFile(2 * size)
        except OSError as error:
            raise shared_memory.unwritable(error.strerror or str(error)) from error
        self._memory = self._file.memory
        self._used = self._end = self._reserved = 0
        self.free = weakref.finalize(self, self._file.close)

    def clear(self) -> None:
        """Begin a new message, which overwrites the tensors of the last one."""
        self._used = self._end = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor in the current message, or outside the block if the message exceeds `size`."""
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        if not nbytes or self._used + nbytes > self.size:
            return torch.empty(shape, dtype=dtype)
        start = -(-self._end // dtype.itemsize) * dtype.itemsize
        self._reserve(start + nbytes)
        self._used, self._end = self._used + nbytes, start + nbytes
        return torch.frombuffer(self._memory.buf, dtype=dtype, count=count, offset=start).view(shape)

    def hold(self, tensors: Sequence[NamedTensor]) -> dict[str, Any]:
        """Complete the message by copying tensors that are not in the block yet. Then the next message may begin.

        Returns the block's name and a table of [name, dtype, shape, offset].
        """
        start = torch.frombuffer(self._memory.buf, dtype=torch.uint8, count=1).data_ptr()
        are_here = [bool(tensor.numel()) and 0 <= tensor.data_ptr() - start < self._end for _, tensor in tensors]
        if not any(are_here):
            self.clear()
        places = []
        for (name, tensor), is_stored in zip(tensors, are_here, strict=True):
            stored = tensor if is_stored else self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor.detach())
            offset = stored.data_ptr() - start if stored.numel() else 0
            assert 0 <= offset <= self._end - stored.nbytes, f"{name} is not in the block"
            places.append([name, dtype_name(stored.dtype), list(stored.shape), offset])
        self.clear()
        return {"name": self._memory.name, "tensors": places}

    def _reserve(self, end: int) -> None:
        """Allocate the pages up to `end`, because a write to an unavailable page would kill the process (SIGBUS)."""
        if end <= self._reserved:
            return
        goal = min(-(-end // RESERVED_BYTES) * RESERVED_BYTES, self._memory.size)
        try:
            self._file.allocate(self._reserved, goal)
        except OSError as error:
            raise _no_room(goal - self._reserved) from error
        self._reserved = goal


_UNUSED: dict[int, SharedMemoryBlock] = {}
"""The block of the last push by requested bytes, kept for the next push."""


def _no_room(size: int) -> StorageError:
    room = f"{free_bytes() / 2**20:.0f} MiB free, but a weight message needs {size / 2**20:.0f} MiB"
    remedy = "Give the container more shared memory, or lower sync.update_weight_buffer_size."
    return StorageError(f"{shared_memory.FOLDER}: {room}. {remedy}")

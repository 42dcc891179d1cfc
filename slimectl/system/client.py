"""HTTP client on an event loop in a thread: connection pool, retries, pauses with jitter, and a time limit."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from slimectl.errors import BackendError
from slimectl.system.http import PASSING, backoff_s, error_message, parsed

if TYPE_CHECKING:
    import aiohttp

Result = TypeVar("Result")


class Background:
    """Event loop thread. The first coroutine starts it. It may be used again after `stop`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def runs(self) -> bool:
        return self._loop is not None

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        """Schedule a coroutine and return a future for any thread. Cancelling the future cancels the coroutine."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """Cancel all running coroutines, await `last`, and end the thread."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(_end(last), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, and restart it after a SystemExit: asyncio lets sys.exit of any task end it.

    Otherwise other tasks would wait forever. The awaiter of the exiting task gets the SystemExit as its exception.
    """
    while True:
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()
            return


async def _end(last: Callable[[], Awaitable[None]] | None) -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if last is not None:
        await last()


FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
MOST_BYTES = 16 << 20
"""Upper limit on the size of a response body."""


@dataclass(frozen=True)
class RetryPolicy:
    """Retry policy of one request: at most `tries` attempts, with `timeout_s` covering all attempts and waits."""

    timeout_s: float
    tries: int


class AttemptFailed(Exception):
    """One attempt failed. `passing` is whether a retry may succeed, `after_s` the wait that the server asks for."""

    def __init__(self, message: str, *, passing: bool, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.passing = passing
        self.after_s = after_s


class HttpClient:
    """HTTP client on its own event loop in a daemon thread. A context manager that keeps connections until it exits.

    Any thread may use it, including one that runs an event loop. Exiting cancels requests still in flight.
    """

    def __init__(self) -> None:
        self._background = Background("http-client")
        self._session: aiohttp.ClientSession | None = None
        self._next_times: dict[str, float] = {}

    def __enter__(self) -> HttpClient:
        return self

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        return self._background.submit(coroutine)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._background.stop(self._close)

    # Everything below runs in the event loop.

    async def turn(self, url: str, per_s: float) -> None:
        """Wait until the rate limit of `url` admits the next request: at most `per_s` per second (0: no limit)."""
        if per_s > 0:
            now = asyncio.get_running_loop().time()
            at = max(now, self._next_times.get(url, now))
            self._next_times[url] = at + 1 / per_s
            await asyncio.sleep(at - now)

    async def post(
        self, url: str, body: Any, *, patience: RetryPolicy, wanted_by: str, api_key: str = "", per_s: float = 0.0
    ) -> Any:
        """POST a JSON body and return the response's JSON. Raises BackendError with the server's message, if any."""
        started, message, tries = time.monotonic(), "no answer", 0
        try:
            async with asyncio.timeout(patience.timeout_s):
                for tries in range(1, patience.tries + 1):
                    await self.turn(url, per_s)
                    try:
                        return await self._try_once(url, body, api_key)
                    except AttemptFailed as refused:
                        message = str(refused)
                        if not refused.passing or tries == patience.tries:
                            break
                        await asyncio.sleep(
                            max(refused.after_s, backoff_s(tries, first_s=FIRST_WAIT_S, longest_s=LONGEST_WAIT_S))
                        )
        except TimeoutError:
            message = f"{message}. No time is left to try again"
        took = f"{tries} {'try' if tries == 1 else 'tries'}, {time.monotonic() - started:.0f} s"
        raise BackendError(f"{wanted_by} at {url}: {message} ({took})")

    async def _try_once(self, url: str, body: Any, api_key: str) -> Any:
        import aiohttp

        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        try:
            # Encoded here rather than by aiohttp, so that an unpaired surrogate is escaped and is not an error.
            data = json.dumps(body).encode()
            async with self._open_session().post(url, data=data, headers=headers, allow_redirects=False) as response:
                text = await _read(response)
                if response.status != 200:
                    raise _refusal(response.status, text, response.headers.get("Retry-After", ""))
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, aiohttp.InvalidURL):
                raise AttemptFailed("not an address. Write http://HOST:PORT/PATH", passing=False) from None
            raise AttemptFailed(f"no answer: {error or type(error).__name__}", passing=True) from None
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise AttemptFailed(f"the response is not JSON: {error_message(parsed(text))}", passing=False) from None

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            # The callers limit the number of concurrent requests.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
            )
        return self._session

    async def _close(self) -> None:
        if self._session is not None:
            await self._session.close()


def run_sync(make: Callable[[HttpClient], Awaitable[Result]]) -> Result:
    """Run the awaitable that `make` returns and return its result, for synchronous callers."""

    async def awaited(http: HttpClient) -> Result:
        return await make(http)

    with HttpClient() as http:
        return http.submit(awaited(http)).result()


async def _read(response: aiohttp.ClientResponse) -> str:
    chunks, size = [], 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        size += len(chunk)
        if size > MOST_BYTES:
            raise AttemptFailed(f"the response is larger than {MOST_BYTES >> 20} MiB", passing=False)
    return b"".join(chunks).decode(errors="replace")


def _refusal(status: int, text: str, after: str) -> AttemptFailed:
    after_s = min(float(after), LONGEST_WAIT_S) if after.isdigit() else 0.0
    return AttemptFailed(
        f"answered {status}: {error_message(parsed(text))}", passing=status in PASSING, after_s=after_s
    )

"""Questions to servers that grade: one pool of connections, retries with jitter, a limit on all of it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from slimectl.errors import BackendError, SettingsError

if TYPE_CHECKING:
    import aiohttp

Result = TypeVar("Result")

PASSING = (408, 425, 429, 500, 502, 503, 504)
"""Statuses that may be another one a moment later."""

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
MOST_BYTES = 16 << 20
"""Of an answer: who sends more is no grader."""

MOST_WORDS = 300


@dataclass(frozen=True)
class Patience:
    """How long and how often one question is asked: `timeout_s` is the limit on all tries and waits together."""

    timeout_s: float
    tries: int


def check_url(url: str) -> None:
    """Raises SettingsError for what is no HTTP address."""
    if not url.startswith(("http://", "https://")):
        raise SettingsError(f"score.rm_options.url: {url!r} is no address; write http://HOST:PORT/PATH")


class Refused(Exception):
    """One try came to nothing; whether another may do better, and when the server wants it."""

    def __init__(self, words: str, *, passing: bool, after_s: float = 0.0) -> None:
        super().__init__(words)
        self.passing = passing
        self.after_s = after_s


class Asker:
    """An event loop in a thread of its own, and connections that its questions share; works until the block is left.

    Any thread may use it, one that runs an event loop itself too. What is still under way at the end is cancelled.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="asker", daemon=True)
        self._session: aiohttp.ClientSession | None = None
        self._turns: dict[str, float] = {}

    def __enter__(self) -> Asker:
        self._thread.start()
        return self

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._ended(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # From here on: in the loop.

    def _run(self) -> None:
        """Drive the loop until it is stopped: asyncio lets sys.exit of any task end it, and others would wait for ever.

        Whoever awaits such a task gets the exit as its exception.
        """
        while True:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()
                return

    async def turn(self, url: str, per_s: float) -> None:
        """Wait until the next question may go to `url`, at most `per_s` a second (0: no limit)."""
        if per_s > 0:
            now = self._loop.time()
            at = max(now, self._turns.get(url, now))
            self._turns[url] = at + 1 / per_s
            await asyncio.sleep(at - now)

    async def post(
        self, url: str, body: Any, *, patience: Patience, wanted_by: str, api_key: str = "", per_s: float = 0.0
    ) -> Any:
        """The JSON that comes back. Raises BackendError, with the server's own words where it had any."""
        started, words, tries = time.monotonic(), "no answer", 0
        try:
            async with asyncio.timeout(patience.timeout_s):
                for tries in range(1, patience.tries + 1):
                    await self.turn(url, per_s)
                    try:
                        return await self._tried(url, body, api_key)
                    except Refused as refused:
                        words = str(refused)
                        if not refused.passing or tries == patience.tries:
                            break
                        await asyncio.sleep(max(refused.after_s, _pause(tries)))
        except TimeoutError:
            words = f"{words}; no time left"
        took = f"{tries} {'try' if tries == 1 else 'tries'}, {time.monotonic() - started:.0f} s"
        raise BackendError(f"{wanted_by} at {url}: {words} ({took})")

    async def _tried(self, url: str, body: Any, api_key: str) -> Any:
        import aiohttp

        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        try:
            # As bytes made here: half a surrogate pair in a response is escaped, not an error.
            data = json.dumps(body).encode()
            async with self._opened().post(url, data=data, headers=headers, allow_redirects=False) as response:
                text = await _read(response)
                if response.status != 200:
                    raise _refusal(response.status, text, response.headers.get("Retry-After", ""))
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, aiohttp.InvalidURL):
                raise Refused("this is no address; write http://HOST:PORT/PATH", passing=False) from None
            raise Refused(f"no answer: {error or type(error).__name__}", passing=True) from None
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise Refused(f"the answer is no JSON: {_short(text)}", passing=False) from None

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            # How many questions go out at once is for those to say who ask them.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
            )
        return self._session

    async def _ended(self) -> None:
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if self._session is not None:
            await self._session.close()


def finished(make: Callable[[Asker], Awaitable[Result]]) -> Result:
    """What the coroutine that `make` gives comes to, from code that does not await."""

    async def awaited(asker: Asker) -> Result:
        return await make(asker)

    with Asker() as asker:
        return asker.submit(awaited(asker)).result()


async def _read(response: aiohttp.ClientResponse) -> str:
    pieces, size = [], 0
    async for piece in response.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > MOST_BYTES:
            raise Refused(f"the answer is longer than {MOST_BYTES >> 20} MiB", passing=False)
    return b"".join(pieces).decode(errors="replace")


def _refusal(status: int, text: str, after: str) -> Refused:
    after_s = min(float(after), LONGEST_WAIT_S) if after.isdigit() else 0.0
    return Refused(f"answered {status}: {_short(text)}", passing=status in PASSING, after_s=after_s)


def _pause(tries: int) -> float:
    """Between half and all of 0.5 s, 1 s, 2 s, …: those who failed together do not come back together."""
    longest: float = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (tries - 1))
    return longest * random.uniform(0.5, 1.0)


def _short(text: str) -> str:
    """A server's words on one line; of the usual JSON shapes the message alone."""
    try:
        body = json.loads(text)
        for key in ("error", "message", "detail"):
            body = body.get(key, body) if isinstance(body, dict) else body
        text = body if isinstance(body, str) else text
    except (ValueError, RecursionError):
        pass
    return " ".join(text.split())[:MOST_WORDS] or "nothing"

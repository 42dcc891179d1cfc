"""A server that grades, in a thread of the test: real HTTP, answers by the test's own function."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from aiohttp import web

Answer = Callable[[Any], "Awaitable[web.Response] | web.Response"]


class Server:
    """`url`, the JSON bodies that came, the headers of the last, and how many were under way at most."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[Any] = []
        self.headers: dict[str, str] = {}
        self.going = self.most = 0


@contextlib.contextmanager
def grading(answer: Answer) -> Iterator[Server]:
    """A server that answers every POST by `answer(body)`, until the block is left."""
    made, loop = Server(), asyncio.new_event_loop()
    over = asyncio.Event()
    up = threading.Event()

    async def answered(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        made.bodies.append({"path": request.path, "body": body})
        made.headers = dict(request.headers)
        made.going += 1
        made.most = max(made.most, made.going)
        try:
            found = answer(body)
            return await found if isinstance(found, Awaitable) else found
        finally:
            made.going -= 1

    async def lived() -> None:
        app = web.Application()
        app.router.add_post("/{path:.*}", answered)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        up.set()
        await over.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(lived(),))
    thread.start()
    assert up.wait(300)
    try:
        yield made
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)
        loop.close()


def says(text: str) -> web.Response:
    """A chat completion of that text."""
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})

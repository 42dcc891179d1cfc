"""Streams the response of an engine to a terminal or a pipe."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

from slimectl.data.growing_text import GrowingText, before_stop
from slimectl.protocols import Engine
from slimectl.system.event_loop import run_coroutine
from slimectl.types import Completion, SamplingParams


def stream_answer(
    engine: Engine,
    tokenizer: Any,
    tokens: list[int],
    params: SamplingParams,
    *,
    show: Callable[[str], Any],
    stoppable: bool = False,
) -> Completion:
    """Continue `tokens` and call `show` with each new piece of text. Servers return the text in one piece.

    With `stoppable`, Ctrl-C ends the response, which keeps its text so far and finishes with "abort".
    """
    from slimectl.engines.embedded.engine import EmbeddedEngine

    growing = GrowingText(tokenizer.backend_tokenizer, keep_special=not params.skip_special_tokens)
    response: list[int] = []
    shown = 0

    def show_new(text: str) -> None:
        nonlocal shown
        if len(text) > shown:
            show(text[shown:])
            shown = len(text)

    async def stream() -> Completion:
        progress = asyncio.Event()

        def follow(start: int, new: list[int]) -> None:
            response[start:] = new
            progress.set()

        # Requests to servers are cancelled, because an abort would also end those of other clients.
        stop: Callable[[], object]
        if isinstance(engine, EmbeddedEngine):
            task, stop = asyncio.ensure_future(engine.generate(tokens, params=params, on_tokens=follow)), engine.end_all
        else:
            task = asyncio.ensure_future(engine.generate(tokens, params=params))
            stop = task.cancel
        task.add_done_callback(lambda _: progress.set())
        if stoppable:
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop)
        while not task.done():
            await progress.wait()
            progress.clear()
            show_new(before_stop(growing.read(response[:-1]), params.stop))  # the last token may be an end token
        if task.cancelled():
            return Completion([], [], "", "abort")
        show_new(task.result().text)
        return task.result()

    return run_coroutine(stream())

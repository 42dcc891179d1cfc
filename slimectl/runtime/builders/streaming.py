"""Streams the response of an engine to a terminal or a pipe."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

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
    return run_coroutine(_stream(engine, tokenizer, tokens, params, show, stoppable=stoppable))


async def _stream(
    engine: Engine,
    tokenizer: Any,
    tokens: list[int],
    params: SamplingParams,
    show: Callable[[str], Any],
    *,
    stoppable: bool,
) -> Completion:
    from slimectl.chats.requests import GenerationRequest
    from slimectl.engines.embedded.detokenizer import Detokenizer
    from slimectl.engines.embedded.engine import EmbeddedEngine
    from slimectl.engines.server.requests import RunningAnswer

    loop = asyncio.get_running_loop()
    if not isinstance(engine, EmbeddedEngine):
        # Cancelled, not aborted: an abort would also end other clients' requests on the same server.
        task = asyncio.ensure_future(engine.generate(tokens, params=params))
        if stoppable:
            loop.add_signal_handler(signal.SIGINT, task.cancel)
        await asyncio.wait([task])
        if task.cancelled():
            return Completion([], [], "", "abort")
        show(task.result().text)
        return task.result()
    sequence = engine.request(tokens, params)
    detokenizer = Detokenizer(tokenizer, keep_special=not params.skip_special_tokens)
    answer = RunningAnswer(sequence, GenerationRequest(params), detokenizer, rid="", index=0)
    progress = asyncio.Event()
    sequence.grown = progress.set
    sequence.future.add_done_callback(lambda _: progress.set())
    if stoppable:
        loop.add_signal_handler(signal.SIGINT, engine.end, sequence)
    engine.submit(sequence)
    while not answer.over:
        await progress.wait()
        progress.clear()
        answer.due()  # counts the new tokens
        answer.over = answer.done
        text = answer.text()
        if len(text) > answer.told_text:
            show(text[answer.told_text :])
            answer.told_text = len(text)
    return answer.completion

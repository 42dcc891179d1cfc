"""Streams an answer to a client. The engine's thread samples tokens, and a task of the endpoint sends them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from slimectl.agents.answer import AgentReply, GrowingAnswer
from slimectl.agents.chat_request import EndpointError
from slimectl.data.answers import ParsedAnswer
from slimectl.data.chat_responses import call_ids
from slimectl.data.tool_calls import ToolCall

Event = tuple[str | None, str]
"""Name and data of a stream event."""
NO_PARTS = ParsedAnswer("")


class AnswerStream:
    """The parts of an answer that can no longer change, while the rest is sampled.

    `add` is the engine's OnTokens. The other methods belong to the event loop of the request. A reader that is slower
    than the engine gets several tokens at once. `interval` is the minimum number of tokens between two readings.
    """

    def __init__(self, interval: int = 1) -> None:
        self.reply: AgentReply | None = None
        """The reply without its answer, once the request is admitted."""
        self.parts = NO_PARTS
        """Parts at the last reading."""
        self.call_ids: tuple[str, ...] = ()
        """Ids of the tool calls in `parts`."""
        self._interval = interval
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._is_waking = False
        self._tokens: list[int] = []
        self._count_read = 0
        self._new_answer: Callable[[], GrowingAnswer] | None = None
        self._growing: tuple[list[int], GrowingAnswer] | None = None
        """The answer that is being read, and its tokens."""

    def begin(self, reply: AgentReply, new_answer: Callable[[], GrowingAnswer]) -> None:
        """Set the reply without its content, and the function that reads the tokens of each try of the engine."""
        self.reply, self._new_answer = reply, new_answer

    def add(self, start: int, tokens: list[int]) -> None:
        """Add tokens of the answer from position `start` on. Position 0 restarts it. Can be called from any thread."""
        if start == 0:
            self._tokens, self._count_read = [], 0
        self._tokens += tokens
        if len(self._tokens) - self._count_read >= self._interval and not self._is_waking:
            self._is_waking = True
            with suppress(RuntimeError):  # the loop of the request has ended
                self._loop.call_soon_threadsafe(self._changed.set)

    async def readings(self, answering: asyncio.Future[Any]) -> AsyncIterator[ParsedAnswer]:
        """Yield the parts whenever there are new tokens, until the answer is complete or has failed."""
        answering.add_done_callback(lambda _: self._changed.set())
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._is_waking = False
            if answering.done():
                return
            self._read()
            yield self.parts

    def _read(self) -> None:
        tokens = self._tokens
        assert self._new_answer is not None
        if self._growing is None or self._growing[0] is not tokens:
            self._growing = tokens, self._new_answer()
        self._count_read = len(tokens)
        parts = self._growing[1].parts(tokens[: self._count_read])
        if extends(parts, self.parts):  # else another server has restarted the answer, and is behind
            self._take(parts)

    def finish(self, parts: ParsedAnswer) -> None:
        """Set the parts of the whole answer. Raises EndpointError if it differs from what has been sent."""
        if not extends(parts, self.parts):
            message = "the engine failed during the response, and another engine wrote a different one. Retry."
            raise EndpointError(message, status=503, code="answer_lost")
        self._take(parts)

    def _take(self, parts: ParsedAnswer) -> None:
        self.parts = parts
        self.call_ids += call_ids(parts.tool_calls[len(self.call_ids) :])


def extends(parts: ParsedAnswer, earlier: ParsedAnswer) -> bool:
    """Return whether an answer only extends the parts of an earlier reading."""
    is_longer = parts.content.startswith(earlier.content) and (
        earlier.reasoning is None or (parts.reasoning or "").startswith(earlier.reasoning)
    )
    return is_longer and parts.tool_calls[: len(earlier.tool_calls)] == earlier.tool_calls


class EventWriter(ABC):
    """Writes one response as the events of its API. `reply` has no answer yet."""

    def __init__(self, reply: AgentReply) -> None:
        self.reply = reply
        self._sent = NO_PARTS

    def begin(self) -> Iterator[Event]:
        """Yield the events before the first token."""
        yield from ()

    def add(self, parts: ParsedAnswer, ids: Sequence[str]) -> Iterator[Event]:
        """Yield the events for the new parts of an answer, whose calls have these ids."""
        sent, self._sent = self._sent, parts
        reasoning = None if parts.reasoning is None else parts.reasoning[len(sent.reasoning or "") :]
        first = len(sent.tool_calls)
        yield from self._new_parts(reasoning, parts.content[len(sent.content) :], parts.tool_calls[first:], ids[first:])

    @abstractmethod
    def _new_parts(
        self, reasoning: str | None, content: str, calls: Sequence[ToolCall], ids: Sequence[str]
    ) -> Iterator[Event]:
        """Yield the events of new reasoning (None if there is none so far), new content and new calls."""

    @abstractmethod
    def end(self, reply: AgentReply) -> Iterator[Event]:
        """Yield the events after the last part."""

    def close(self, replies: Sequence[AgentReply]) -> Iterator[Event]:
        """Yield the events after the last response to a request."""
        yield from ()

    @abstractmethod
    def fail(self, status: int, message: str, code: str | None, param: str | None = None) -> Iterator[Event]:
        """Yield the event of an error in the stream."""


class BlockEventWriter(EventWriter):
    """Writes an answer as consecutive blocks: reasoning, text, and all calls once the answer is complete."""

    def __init__(self, reply: AgentReply) -> None:
        super().__init__(reply)
        self._index = 0
        """Number of closed blocks."""
        self._block = ""
        """The open block: "reasoning", "text" or "" for none."""
        self._has_text = False

    def _new_parts(
        self, reasoning: str | None, content: str, calls: Sequence[ToolCall], ids: Sequence[str]
    ) -> Iterator[Event]:
        if reasoning is not None and not self._block and not self._has_text:
            self._block = "reasoning"
            yield from self._open("reasoning")
        if reasoning:
            yield from self._grow("reasoning", reasoning)
        if content:
            yield from self._open_text()
            yield from self._grow("text", content)

    def _open_text(self) -> Iterator[Event]:
        if not self._has_text:
            yield from self._close_block()
            self._block, self._has_text = "text", True
            yield from self._open("text")

    def _close_block(self) -> Iterator[Event]:
        if self._block:
            text = self._sent.content if self._block == "text" else self._sent.reasoning or ""
            yield from self._close(self._block, text)
            self._block, self._index = "", self._index + 1

    def end(self, reply: AgentReply) -> Iterator[Event]:
        self.reply, answer = reply, reply.answer
        if not answer.parts.tool_calls:
            yield from self._open_text()
        yield from self._close_block()
        for number, (call, call_id) in enumerate(zip(answer.parts.tool_calls, answer.call_ids, strict=True)):
            yield from self._call(number, call, call_id)
            self._index += 1
        yield from self._end(reply)

    @abstractmethod
    def _open(self, kind: str) -> Iterator[Event]:
        """Yield the events that open a block of "reasoning" or "text"."""

    @abstractmethod
    def _grow(self, kind: str, text: str) -> Iterator[Event]:
        """Yield the events of new text of the open block."""

    @abstractmethod
    def _close(self, kind: str, text: str) -> Iterator[Event]:
        """Yield the events that close the open block with this text."""

    @abstractmethod
    def _call(self, number: int, call: ToolCall, call_id: str) -> Iterator[Event]:
        """Yield the events of the call with this number."""

    @abstractmethod
    def _end(self, reply: AgentReply) -> Iterator[Event]:
        """Yield the events after the last block."""

"""Responses in progress, and the table of requests in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from slimectl.chats.requests import GenerationRequest
from slimectl.data.growing_text import before_stop
from slimectl.data.token_bytes import TokenBytes
from slimectl.engines.embedded.detokenizer import Detokenizer
from slimectl.engines.embedded.scheduler import RunningSequence
from slimectl.engines.server.engine_thread import EngineThread, LoopNotifier
from slimectl.engines.server.errors import PAUSED, RequestError
from slimectl.types import Completion

RESUME_ENDPOINTS = {
    "memory": "/resume_memory_occupation",
    "update": "/end_weight_update",
    "pause": "/continue_generation",
}
"""The endpoint that ends each pause of the engine, by reason."""
MOST_IN_FLIGHT = 65536
"""Maximum number of running and waiting responses."""


class RunningAnswer:
    """One sequence, and the part that has been sent (`told` tokens, `told_text` characters)."""

    def __init__(
        self,
        sequence: RunningSequence,
        generation: GenerationRequest,
        detokenizer: Detokenizer,
        *,
        rid: str,
        index: int,
    ) -> None:
        self.sequence = sequence
        self.rid = rid
        self.index = index
        self.told = 0
        self.told_text = 0
        self.over = False  # its last part has been sent
        self._seen = 0
        self._generation = generation
        self._detokenizer = detokenizer
        self._growing = detokenizer.growing_text()
        self.begun = time.monotonic()
        self._queued = time.perf_counter()

    @property
    def count(self) -> int:
        """Number of tokens to show: all of a finished response, else the number that `due` has seen."""
        return len(self.sequence.log_probs) if self.done else self._seen

    @property
    def done(self) -> bool:
        return self.sequence.future.done()

    @property
    def completion(self) -> Completion:
        """The finished completion. Raises the engine's error, if any."""
        return self.sequence.future.result()

    @property
    def latency_s(self) -> float:
        return time.monotonic() - self.begun

    @property
    def queue_s(self) -> float:
        """Seconds until the engine began to work on it, or until now."""
        return (self.sequence.admitted or time.perf_counter()) - self._queued

    @property
    def cut_at(self) -> str | None:
        """The stop string that ended the response and was removed, or None."""
        matched = self.sequence.matched if self.done else None
        return matched if isinstance(matched, str) and not self._generation.keep_stop else None

    def text(self) -> str:
        """Return the whole text of a finished response, else the part that can no longer change."""
        if self.done:
            return self._final_text()
        text = self._growing.read(self.sequence.tokens[: self.count])
        return text if self._generation.keep_stop else before_stop(text, self.sequence.params.stop)

    def due(self) -> bool:
        """Check for new tokens, and return whether a stream must send a chunk.

        The last token is held back until the response is done, so that its chunk has the finish reason.
        """
        count = len(self.sequence.log_probs)  # first, because the engine sets `finish` before it adds the last token
        if not self.done and self.sequence.finish:
            return False
        self._seen = count
        return not self.over and (self.done or count - self.told >= self._generation.interval)

    def _final_text(self) -> str:
        if not (self._generation.keep_special or self._generation.keep_stop):
            return self.completion.text
        text, cut = self._detokenizer.decode(self.completion.tokens), self.cut_at
        return text if cut is None or cut not in text else text[: text.rindex(cut)]

    def finish_reason(self) -> dict[str, Any] | None:
        """Return the finish reason in SGLang's format, or None while the response runs."""
        finish = self.completion.finish_reason if self.done else ""
        if finish == "stop":
            return {"type": "stop", "matched": self.sequence.matched}
        if finish == "length":
            return {"type": "length", "length": self.count}
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None} if finish else None

    def spans(self) -> list[dict[str, Any]]:
        """Return the token span of each weight version, in SGLang's format."""
        spans, count = list(self.sequence.spans), self.count
        ends = [*(start for _, start in spans), count][1:]
        return [
            {"version": version, "start": start, "end": min(end, count)}
            for (version, start), end in zip(spans, ends, strict=True)
            if start < count
        ]


class RequestTable:
    """All requests in flight, by id."""

    def __init__(self, thread: EngineThread, tokenizer: Any) -> None:
        self._thread = thread
        self._bell = LoopNotifier()
        self._by_rid: dict[str, list[RunningAnswer]] = {}
        self._in_flight = 0
        self.vocabulary = TokenBytes(tokenizer)
        self.detokenizers = {keep: Detokenizer(tokenizer, keep_special=keep) for keep in (False, True)}

    @contextmanager
    def ask(
        self, prompts: Sequence[tuple[list[int], GenerationRequest]], rids: Sequence[str], *, rid: str
    ) -> Iterator[RequestState]:
        """Start responses to prompts. Responses still running at the end of the block are aborted.

        `rid` is the id of the request, and `rids` are the ids of its prompts. Raises RequestError if an id is already
        in flight, and SettingsError for a prompt that cannot be continued.
        """
        if self._in_flight + sum(generation.n for _, generation in prompts) > MOST_IN_FLIGHT:
            raise RequestError(f"{self._in_flight} responses are in flight. Try again in a moment.", status=503)
        by_rid: dict[str, list[RunningAnswer]] = {rid: []}
        for (tokens, generation), prompt_rid in zip(prompts, rids, strict=True):
            for i in range(generation.n):
                sequence = self._thread.engine.request(
                    tokens,
                    generation.seeded(i),
                    top_count=generation.top_log_probs,
                    reports_experts=generation.routed_experts,
                )
                name = prompt_rid if generation.n == 1 else f"{prompt_rid}_{i}"
                detokenizer = self.detokenizers[generation.keep_special]
                answer = RunningAnswer(sequence, generation, detokenizer, rid=name, index=len(by_rid[rid]))
                for alias in {rid, prompt_rid, name}:
                    by_rid.setdefault(alias, []).append(answer)
        for duplicate in by_rid.keys() & self._by_rid.keys():
            raise RequestError(f"rid: {duplicate[:60]!a} is already in flight. Use another id, or none.", field="rid")
        self._by_rid |= by_rid
        self._in_flight += len(by_rid[rid])
        for answer in by_rid[rid]:
            self._thread.submit(answer.sequence)
        try:
            yield RequestState(by_rid[rid], self._bell)
        finally:
            self._in_flight -= len(by_rid[rid])
            for name in by_rid:
                del self._by_rid[name]
            for answer in by_rid[rid]:
                self._release(answer)

    def _release(self, answer: RunningAnswer) -> None:
        future = answer.sequence.future
        if not future.done():
            answer.sequence.grown = None
            future.cancel()
            self._thread.end(answer.sequence)
        elif not future.cancelled():
            future.exception()  # retrieve it so that asyncio does not report it

    def abort(self, rid: str) -> None:
        """Abort a request or one of its responses. Does nothing if it is not in flight."""
        for answer in self._by_rid.get(rid, []):
            self._thread.end(answer.sequence)

    def end_waits(self, longest_s: float) -> None:
        """Fail responses that have waited too long for a paused engine, so that their client retries.

        The RequestError is raised in the task that awaits the response.
        """
        since = self._thread.engine.paused_since
        if since is None:
            return
        latest = time.monotonic() - longest_s
        for answer in {id(answer): answer for answers in self._by_rid.values() for answer in answers}.values():
            if not answer.done and max(since, answer.begun) < latest:
                error = RequestError(
                    _paused_message(self._thread.engine.pause_reasons, longest_s), status=503, kind=PAUSED
                )
                answer.sequence.future.set_exception(error)
                self._thread.end(answer.sequence)


def _paused_message(reasons: list[str], seconds: float) -> str:
    way_out = next(
        (RESUME_ENDPOINTS[reason] for reason in RESUME_ENDPOINTS if reason in reasons), RESUME_ENDPOINTS["pause"]
    )
    return f"the engine has been paused for more than {seconds:g} s. Try again after {way_out}."


class RequestState:
    """The responses to one HTTP request."""

    def __init__(self, answers: list[RunningAnswer], bell: LoopNotifier) -> None:
        self.answers = answers
        self._event = asyncio.Event()
        for answer in answers:
            answer.sequence.future.add_done_callback(lambda _: self._event.set())
        self._ring = partial(bell.ring, self._event)

    async def finished(self) -> list[RunningAnswer]:
        """Wait for all responses. Raises the engine's error, if any."""
        while not all(answer.done for answer in self.answers):
            await self._event.wait()
            self._event.clear()
        for answer in self.answers:
            answer.sequence.future.result()
        return self.answers

    async def growing(self) -> AsyncIterator[RunningAnswer]:
        """Yield each response when it has new tokens, until all are finished. Raises the engine's error, if any."""
        for answer in self.answers:
            answer.sequence.grown = self._ring
        pending = self.answers
        self._event.set()
        while pending:
            await self._event.wait()
            self._event.clear()
            for answer in pending:
                if answer.due():
                    answer.over = answer.done
                    if answer.over:
                        answer.sequence.future.result()
                    yield answer
            pending = [answer for answer in pending if not answer.over]

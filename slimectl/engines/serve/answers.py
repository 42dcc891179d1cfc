"""Answers in the making, as a server sees them grow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from slimectl.engines.embedded.detokenizer import Detokenizer, StopScanner
from slimectl.engines.embedded.sequence import Sequence as Running
from slimectl.engines.serve.refusals import PAUSED, Refused
from slimectl.engines.serve.sampling import Wish
from slimectl.engines.serve.thread import Bell, EngineThread
from slimectl.types import Completion

HOLDS = {
    "memory": "/resume_memory_occupation",
    "update": "/end_weight_update",
    "pause": "/continue_generation",
}
"""What ends each hold of the engine."""
MOST_IN_FLIGHT = 65536
"""Answers that are written or wait for it."""


class Answer:
    """One sequence and what of it has been handed on already (`told` tokens, `told_text` characters)."""

    def __init__(self, sequence: Running, wish: Wish, detokenizer: Detokenizer, *, rid: str, index: int) -> None:
        self.sequence = sequence
        self.rid = rid
        self.index = index
        self.told = 0
        self.told_text = 0
        self.over = False  # the last of it has been handed on
        self._wish = wish
        self._detokenizer = detokenizer
        self._scanner = StopScanner(detokenizer, ())
        self.begun = time.monotonic()

    @property
    def count(self) -> int:
        """Tokens written so far, each with its log-probability; the engine may be adding more."""
        return len(self.sequence.log_probs)

    @property
    def done(self) -> bool:
        return self.sequence.future.done()

    @property
    def completion(self) -> Completion:
        """The whole answer. Raises what the engine raised."""
        return self.sequence.future.result()

    @property
    def latency_s(self) -> float:
        return time.monotonic() - self.begun

    @property
    def cut_at(self) -> str | None:
        """The stop string that ended it and was cut."""
        matched = self.sequence.matched if self.done else None
        return matched if isinstance(matched, str) and not self._wish.keep_stop else None

    def text(self) -> str:
        """All of the text once it is over; before, what can no longer change."""
        if self.done:
            return self._whole()
        self._scanner.scan(self.sequence.tokens[: self.count], stopping=False)
        text, stops = self._scanner.text, () if self._wish.keep_stop else self.sequence.params.stop
        return text[: len(text) - max((_overlap(text, stop) for stop in stops), default=0)]

    def due(self) -> bool:
        """Whether a stream has to say something."""
        return not self.over and (self.done or self.count - self.told >= self._wish.interval)

    def _whole(self) -> str:
        if not (self._wish.keep_special or self._wish.keep_stop):
            return self.completion.text
        text, cut = self._detokenizer.decode(self.completion.tokens), self.cut_at
        return text if cut is None or cut not in text else text[: text.rindex(cut)]

    def finish_reason(self) -> dict[str, Any] | None:
        """As SGLang has it; None while it goes on."""
        finish = self.completion.finish if self.done else ""
        if finish == "stop":
            return {"type": "stop", "matched": self.sequence.matched}
        if finish == "length":
            return {"type": "length", "length": self.count}
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None} if finish else None

    def spans(self) -> list[dict[str, Any]]:
        """Which weight version wrote which tokens, as SGLang has it."""
        spans, count = list(self.sequence.spans), self.count
        ends = [*(start for _, start in spans), count][1:]
        return [
            {"version": version, "start": start, "end": min(end, count)}
            for (version, start), end in zip(spans, ends, strict=True)
            if start < count
        ]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class Desk:
    """All requests in flight, by their ids."""

    def __init__(self, thread: EngineThread, tokenizer: Any) -> None:
        self._thread = thread
        self._bell = Bell()
        self._named: dict[str, list[Answer]] = {}
        self._in_flight = 0
        self._detokenizers = {keep: Detokenizer(tokenizer, keep_special=keep) for keep in (False, True)}

    def token_text(self, token: int) -> str:
        return self._detokenizers[True].decode([token])

    @contextmanager
    def ask(self, prompts: Sequence[tuple[list[int], Wish]], rids: Sequence[str], *, rid: str) -> Iterator[Request]:
        """The answers to prompts, begun; what still runs of them when the block is left ends.

        `rid` names the request, `rids` its prompts. Raises Refused for an id in flight already, SettingsError for a
        prompt that cannot be continued.
        """
        if self._in_flight + sum(wish.n for _, wish in prompts) > MOST_IN_FLIGHT:
            raise Refused(f"{self._in_flight} answers are in flight; ask again in a moment", status=503)
        named: dict[str, list[Answer]] = {rid: []}
        for (tokens, wish), prompt_rid in zip(prompts, rids, strict=True):
            for i in range(wish.n):
                sequence = self._thread.engine.request(tokens, wish.seeded(i))
                name = prompt_rid if wish.n == 1 else f"{prompt_rid}_{i}"
                detokenizer = self._detokenizers[wish.keep_special]
                answer = Answer(sequence, wish, detokenizer, rid=name, index=len(named[rid]))
                for alias in {rid, prompt_rid, name}:
                    named.setdefault(alias, []).append(answer)
        for duplicate in named.keys() & self._named.keys():
            raise Refused(f"rid: {duplicate[:60]!a} is in flight already; give another, or none", field="rid")
        self._named |= named
        self._in_flight += len(named[rid])
        for answer in named[rid]:
            self._thread.submit(answer.sequence)
        try:
            yield Request(named[rid], self._bell)
        finally:
            self._in_flight -= len(named[rid])
            for name in named:
                del self._named[name]
            for answer in named[rid]:
                self._leave(answer)

    def _leave(self, answer: Answer) -> None:
        future = answer.sequence.future
        if not future.done():
            answer.sequence.grown = None
            future.cancel()
            self._thread.end(answer.sequence)
        elif not future.cancelled():
            future.exception()  # seen, whoever asked for it

    def abort(self, rid: str) -> None:
        """End a request or one answer of it; nothing happens if it is not in flight."""
        for answer in self._named.get(rid, []):
            self._thread.end(answer.sequence)

    def end_waits(self, longest_s: float) -> None:
        """Fail what has waited too long for an engine that is held, so that its client asks again, here or elsewhere.

        Raises nothing; whoever awaits the answer gets Refused.
        """
        since = self._thread.engine.held_since
        if since is None:
            return
        latest = time.monotonic() - longest_s
        for answer in {id(answer): answer for named in self._named.values() for answer in named}.values():
            if not answer.done and max(since, answer.begun) < latest:
                error = Refused(_paused(self._thread.engine.holds, longest_s), status=503, kind=PAUSED)
                answer.sequence.future.set_exception(error)
                self._thread.end(answer.sequence)


def _paused(holds: list[str], seconds: float) -> str:
    way_out = next((HOLDS[hold] for hold in HOLDS if hold in holds), HOLDS["pause"])
    return f"the engine has been paused for {seconds:g} s and more; ask again after {way_out}"


class Request:
    """The answers to one HTTP request."""

    def __init__(self, answers: list[Answer], bell: Bell) -> None:
        self.answers = answers
        self._event = asyncio.Event()
        for answer in answers:
            answer.sequence.future.add_done_callback(lambda _: self._event.set())
        self._ring = partial(bell.ring, self._event)

    async def finished(self) -> list[Answer]:
        """All answers, whole. Raises what the engine raised."""
        while not all(answer.done for answer in self.answers):
            await self._event.wait()
            self._event.clear()
        for answer in self.answers:
            answer.sequence.future.result()
        return self.answers

    async def growing(self) -> AsyncIterator[Answer]:
        """Each answer when there is something new of it, until all are over. Raises what the engine raised."""
        for answer in self.answers:
            answer.sequence.grown = self._ring
        left = self.answers
        self._event.set()
        while left:
            await self._event.wait()
            self._event.clear()
            for answer in left:
                if answer.due():
                    answer.over = answer.done
                    if answer.over:
                        answer.sequence.future.result()
                    yield answer
            left = [answer for answer in left if not answer.over]

"""Sequence in generation: its tokens, and the conditions that end it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slimectl.types import Completion, SamplingParams

if TYPE_CHECKING:
    from slimectl.engines.embedded.detokenizer import StopScanner


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and the tokens sampled after it.

    `limit` is the number of tokens it may grow to (max_tokens, or what the context leaves); `end_tokens` end it from
    `min_tokens` on. `scanner` searches for stop strings, if there are any. `finish` is "" while it runs. `prefix` has
    the tokens to compute before the next one: the prompt, for a retracted sequence also its answer so far. `spans` has
    each weight version with the index of its first token. `grown` is called after every token, in the engine's thread.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    limit: int
    end_tokens: frozenset[int]
    future: asyncio.Future[Completion]
    scanner: StopScanner | None = None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int]] = field(default_factory=list)
    cached_tokens: int = 0
    finish: str = ""
    grown: Callable[[], None] | None = None
    prefix: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.prefix = self.prompt

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    def append(self, token: int, log_prob: float, version: str) -> None:
        """Append a sampled token and decide whether it is the last one."""
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, len(self.tokens)))
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        count = len(self.tokens)
        matched = self.scanner is not None and self.scanner.scan(self.tokens, stopping=count >= self.params.min_tokens)
        if matched or token in self.end_tokens:  # the sampler draws no end token before min_tokens
            self.finish = "stop"
        elif count >= self.limit:
            self.finish = "length"
        if self.grown is not None:
            self.grown()

    @property
    def matched(self) -> str | int | None:
        """Stop string, or token, that ended the sequence."""
        if self.scanner is not None and self.scanner.matched:
            return self.scanner.matched
        return self.tokens[-1] if self.finish == "stop" else None

    def deliver(self, text: str) -> None:
        """Resolve the future with the answer, in the event loop that awaits it."""
        versions = [version for version, _ in self.spans]
        answer = Completion(self.tokens, self.log_probs, text, self.finish, versions, cached_tokens=self.cached_tokens)
        self._resolve(answer)

    def fail(self, error: Exception) -> None:
        self._resolve(error)

    def _resolve(self, outcome: Completion | Exception) -> None:
        def settle() -> None:
            if self.future.done():  # its task was cancelled meanwhile
                return
            if isinstance(outcome, Exception):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)

        loop = self.future.get_loop()
        if loop.is_closed():
            return
        if loop is asyncio.get_running_loop():
            settle()
        else:  # requested in a loop that rests while another one drives the engine
            loop.call_soon_threadsafe(settle)

"""Running sequences, and the scheduler that admits and retires them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slimectl.data.routed_experts import encoded
from slimectl.protocols import OnTokens
from slimectl.types import Completion, EngineTimes, SamplingParams, TopTokens

if TYPE_CHECKING:
    from slimectl.data.images import Patches
    from slimectl.engines.embedded.detokenizer import StopScanner
    from slimectl.engines.embedded.grammar import GrammarState, TokenSet
    from slimectl.engines.embedded.prefix_tree import Node


@dataclass(slots=True, eq=False)
class RunningSequence:
    """A prompt and the tokens sampled after it.

    `limit` is the maximum response length: max_tokens, or the rest of the context. `end_tokens` end the sequence once
    it has `min_tokens`. `scanner` searches for stop strings. `finish` is "" while the sequence runs, and "error" if it
    ends with `error` instead of a response. `prefix` has the tokens to compute before the next one: the prompt, plus
    the response so far if the sequence was retracted. `spans` lists each weight version with the index of its first
    token. `grown` is called after every token, in the engine's thread. `grammar` restricts the tokens, and `loss_mask`
    then has 0 for tokens that it forced. `top` has the `top_count` likeliest tokens at the position of each token.

    The sequence reads the prefix tree up to `shared`, and its slot has the later tokens. `reusable` is true if all its
    keys and values come from the current weights. `computed` counts the tokens that the model has read. `images` are
    the prompt's images. The prompt has their ids in place of their tokens, and `rope_shift` is added to later rotary
    positions. `experts` has the experts of the computed tokens, in parts of [T, L, k]. A token that is recomputed keeps
    its first experts. The response includes them if `reports_experts` is true.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    limit: int
    end_tokens: frozenset[int]
    future: asyncio.Future[Completion]
    scanner: StopScanner | None = None
    grammar: GrammarState | TokenSet | None = None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    top_count: int = 0
    top: list[TopTokens] = field(default_factory=list)
    spans: list[tuple[str, int]] = field(default_factory=list)
    cached_tokens: int = 0
    finish: str = ""
    error: Exception | None = None
    grown: Callable[[], None] | None = None
    prefix: tuple[int, ...] = ()
    shared: Node | None = None
    reusable: bool = False
    computed: int = 0
    experts: list[Tensor] = field(default_factory=list)
    reports_experts: bool = False
    images: tuple[Patches, ...] = ()
    rope_shift: int = 0
    admitted: float = 0.0
    """When it first left the queue (time.perf_counter)."""

    first_token: float = 0.0

    def __post_init__(self) -> None:
        self.prefix = self.prompt

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def offset(self) -> int:
        """Number of tokens that the sequence reads from the prefix tree."""
        return 0 if self.shared is None else self.shared.end

    def append(self, token: int, log_prob: float, version: str, top: TopTokens) -> None:
        """Append a sampled token and decide whether it is the last one."""
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, len(self.tokens)))
        if not self.tokens:
            self.first_token = time.perf_counter()
        self.tokens.append(token)
        if self.top_count:
            self.top.append(top[: self.top_count])
        if self.grammar is not None:
            self.loss_mask.append(0 if self.grammar.is_forced else 1)
            self.grammar.advance(token)
        count = len(self.tokens)
        matched = self.scanner is not None and self.scanner.scan(self.tokens, stopping=count >= self.params.min_tokens)
        # The sampler never draws an end token before min_tokens. A complete text needs no end token.
        if matched or token in self.end_tokens or (self.grammar is not None and self._is_complete(self.grammar)):
            self.finish = "stop"
        elif count >= self.limit:
            self.finish = "length"
        self.log_probs.append(log_prob)  # last, because readers in other threads use its length
        if self.grown is not None:
            self.grown()

    def end_with(self, error: Exception) -> None:
        """End the sequence with an error. Its keys and values are not reused."""
        self.error, self.finish, self.reusable = error, "error", False

    def follow(self, on_tokens: OnTokens) -> None:
        """Call `on_tokens` with the unreported tokens after each new token, in the engine's thread."""
        reported = 0

        def report() -> None:
            nonlocal reported
            start, reported = reported, len(self.tokens)
            on_tokens(start, self.tokens[start:reported])

        self.grown = report

    def _is_complete(self, grammar: GrammarState | TokenSet) -> bool:
        """Whether nothing may follow and the sequence has no end tokens."""
        return not self.end_tokens and grammar.is_over

    @property
    def matched(self) -> str | int | None:
        """The stop string or token that ended the sequence, or None."""
        if self.scanner is not None and self.scanner.matched:
            return self.scanner.matched
        return self.tokens[-1] if self.finish == "stop" and self.tokens[-1] in self.end_tokens else None

    def deliver(self, text: str) -> None:
        """Resolve the future with the completion, in the event loop that awaits it."""
        versions, starts = [version for version, _ in self.spans], [start for _, start in self.spans]
        answer = Completion(
            self.tokens, self.log_probs, text, self.finish, versions, self.cached_tokens, version_starts=starts
        )
        answer.top_log_probs = self.top
        if self.first_token:
            answer.times = EngineTimes(self.admitted, self.first_token)
        if self.grammar is not None:
            answer.loss_mask = self.loss_mask
        if self.reports_experts and (experts_TLk := self.experts_between(0, self.length - 1)) is not None:
            answer.extras["routed_experts"] = encoded(experts_TLk.numpy())
        self._resolve(answer)

    def experts_between(self, start: int, end: int) -> Tensor | None:
        """Return the experts [T, L, k] of the tokens [start, end), or None in a dense model or without tokens."""
        if len(self.experts) > 1:
            self.experts = [torch.cat(self.experts)]
        return self.experts[0][start:end].clone() if self.experts and end > start else None

    def fail(self, error: Exception) -> None:
        self._resolve(error)

    def _resolve(self, outcome: Completion | Exception) -> None:
        def settle() -> None:
            if self.future.done():  # its task was cancelled
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
        else:  # the request came from another loop than the one that drives the engine
            loop.call_soon_threadsafe(settle)


class Scheduler:
    """Admits sequences first come, first served. Running sequences fill slots 0, 1, 2 … without gaps.

    `max_prefill` bounds the padded area (number of prompts times longest) of one prefill. A larger single prompt is
    still admitted. `work` returns how many tokens of a prompt must be computed.
    """

    def __init__(
        self, *, max_running: int, work: Callable[[tuple[int, ...]], int] = len, max_prefill: int = 8192
    ) -> None:
        self.max_running = max_running
        self._work = work
        self.max_prefill = max_prefill
        self.running: list[RunningSequence] = []
        self._waiting: deque[RunningSequence] = deque()
        self._waiting_for: Counter[tuple[int, ...]] = Counter()

    def has_work(self) -> bool:
        return bool(self.running or self._waiting)

    def add(self, sequence: RunningSequence) -> None:
        self._waiting.append(sequence)
        self._waiting_for[sequence.prefix] += 1

    def awaits(self, prompt: tuple[int, ...]) -> int:
        """Return how many siblings of this prompt are still in the queue."""
        return self._waiting_for[prompt]

    def admit(self) -> dict[tuple[int, ...], list[RunningSequence]]:
        """Move queued sequences to free slots, siblings next to each other, and return them by prompt."""
        admitted: dict[tuple[int, ...], list[RunningSequence]] = {}
        free = self.max_running - len(self.running)
        longest = 0
        while self._waiting and free:
            prompt = self._waiting[0].prefix
            if prompt not in admitted:
                longest = max(longest, self._work(prompt))
                if admitted and (len(admitted) + 1) * longest > self.max_prefill:
                    break
            sequence = self._next()
            if not sequence.finish:  # else its task was cancelled while it was queued
                admitted.setdefault(prompt, []).append(sequence)
                free -= 1
        now = time.perf_counter()
        for siblings in admitted.values():
            for sequence in siblings:
                sequence.admitted = sequence.admitted or now
            self.running.extend(siblings)
        return admitted

    def upcoming(self, prompts: list[tuple[int, ...]], *, tokens: int) -> list[tuple[int, ...]]:
        """Return the next queued prompts that fit, together with `prompts`, in a padded area of `tokens`."""
        longest, ahead = max(map(self._work, prompts)), dict.fromkeys(prompts)
        for sequence in self._waiting:
            if sequence.prefix in ahead:
                continue
            longest = max(longest, self._work(sequence.prefix))
            if (len(ahead) + 1) * longest > tokens:
                break
            ahead[sequence.prefix] = None
        return list(ahead)[len(prompts) :]

    def retire(self) -> tuple[list[RunningSequence], list[tuple[int, int]]]:
        """Drop finished sequences and fill their slots with the last ones.

        Return (finished, moves from slot to slot).
        """
        finished = [sequence for sequence in self.running if sequence.finish]
        if not finished:
            return [], []
        remaining = len(self.running) - len(finished)
        targets = [slot for slot in range(remaining) if self.running[slot].finish]
        sources = [slot for slot in range(remaining, len(self.running)) if not self.running[slot].finish]
        moves = list(zip(sources, targets, strict=True))
        for source, target in moves:
            self.running[target] = self.running[source]
        del self.running[remaining:]
        return finished, moves

    def retract(self) -> None:
        """Put running sequences back at the front of the queue. Prompt and response so far are recomputed later."""
        for sequence in reversed(self.running):
            if not sequence.finish:
                sequence.prefix = (*sequence.prompt, *sequence.tokens)
                self._waiting.appendleft(sequence)
                self._waiting_for[sequence.prefix] += 1
        self.running.clear()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def clear(self) -> list[RunningSequence]:
        """Drop all waiting and running sequences and return them."""
        dropped = [*self.running, *self._waiting]
        self.running.clear()
        self._waiting.clear()
        self._waiting_for.clear()
        return dropped

    def _next(self) -> RunningSequence:
        sequence = self._waiting.popleft()
        self._waiting_for[sequence.prefix] -= 1
        if not self._waiting_for[sequence.prefix]:
            del self._waiting_for[sequence.prefix]
        return sequence

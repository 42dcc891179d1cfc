"""One attempt of an agent: it answers requests with the policy, within limits, and records every turn."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from slimectl.agents.answer import Answer, AnswerReader, Reply
from slimectl.agents.answer_stream import AnswerStream
from slimectl.agents.chat_request import ChatRequest, RequestRefused, answer_message
from slimectl.agents.trajectory_tree import Continuation, TrajectoryTree, Turn
from slimectl.data.chat_responses import call_ids
from slimectl.errors import SettingsError
from slimectl.protocols import OnTokens
from slimectl.types import Completion, Sample, SamplingParams


class Generate(Protocol):
    """Continues tokens; `on_tokens` is given only for an answer that is streamed."""

    def __call__(
        self, tokens: list[int], params: SamplingParams, *, on_tokens: OnTokens | None = None
    ) -> Awaitable[Completion]: ...


MOST_IN_FLIGHT = 64
"""Requests of one session at the same time."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of one attempt: turns, tokens of a branch after its first prompt, and the context of the model."""

    turns: int
    response_tokens: int
    context: int | None = None


@dataclass(slots=True)
class Session:
    """Records the turns of one attempt in a tree.

    `params` are the sampling parameters of the rollout. Only where `obeys_requests` is set do a request's own
    temperature, top_p and seed replace them: a policy learns from what its own distribution sampled.
    """

    tokenizer: Any
    reader: AnswerReader
    generate: Generate
    params: SamplingParams
    limits: SessionLimits
    model: str = "*"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template. A request may add more."""
    obeys_requests: bool = False
    stream_interval: int = 1
    """Least number of tokens between two chunks of a stream."""
    tree: TrajectoryTree = field(init=False)
    is_closed: bool = False
    is_aborted: bool = False
    """Whether the engine broke off an answer, for a later round to begin the attempt again."""
    is_cut: bool = False
    """Whether a limit of turns or tokens was reached."""
    reward: Any = None
    """Reward that the agent posted."""
    counts: Counter[str] = field(default_factory=Counter)
    """Requests, refusals and calls of tools, for the sample's metadata."""
    answering_s: float = 0.0
    """Seconds in which the policy was at work for this attempt."""
    _in_flight: int = 0
    _answering_since: float = 0.0
    _responses: dict[str, Turn] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tree = TrajectoryTree(self.tokenizer, not self.params.skip_special_tokens, self.params.stop)

    @property
    def is_answering(self) -> bool:
        """Whether the policy is at work for this attempt."""
        return self._in_flight > 0

    async def answer(self, request: ChatRequest, stream: AnswerStream | None = None) -> Reply:
        """Answer a request and record the turn; `stream` gets the answer while it is sampled. Raises RequestRefused."""
        self._check(request)
        request = self._with_template_kwargs(request)
        if not self.is_answering:
            self._answering_since = time.monotonic()
        self._in_flight += 1
        try:
            return await self._answer(request, stream)
        finally:
            self._in_flight -= 1
            if not self.is_answering:
                self.answering_s += time.monotonic() - self._answering_since

    def _with_template_kwargs(self, request: ChatRequest) -> ChatRequest:
        return dataclasses.replace(request, template_kwargs={**self.template_kwargs, **request.template_kwargs})

    def _check(self, request: ChatRequest) -> None:
        self.counts["requests"] += 1
        if self.is_closed:
            raise RequestRefused("this session has ended", status=404, code="session_ended")
        if self.model not in ("*", request.model):
            message = f"model {request.model[:100]!r} is not served here; ask for {self.model!r}"
            raise RequestRefused(message, status=404, code="model_not_found")
        if self._in_flight >= MOST_IN_FLIGHT:
            message = f"{MOST_IN_FLIGHT} requests of this session are in flight; await one of them"
            raise RequestRefused(message, status=429, code="too_many_requests")
        if len(self.tree.turns) + self._in_flight + request.n > self.limits.turns:
            self.is_cut = True
            raise RequestRefused(f"the attempt has had its {self.limits.turns} turns", code="turn_limit")

    async def _answer(self, request: ChatRequest, stream: AnswerStream | None) -> Reply:
        continuation = self.tree.continuation(request)
        prompt = continuation.tokens
        params = self._params(request, self._room(continuation))
        reply = Reply(request, request.model or self.model, int(time.time()), len(prompt))
        if stream is not None:
            stream.begin(reply, partial(self.reader.growing, request, prompt, params.stop))
        completions = await self._completions(request, prompt, params, stream)
        if any(completion.finish_reason == "abort" for completion in completions):
            self.is_aborted = True
            raise RequestRefused("the round ended before the answer did", status=503, code="aborted")
        read = [self.reader.read(completion, request, prompt, params.stop) for completion in completions]
        if stream is not None:
            stream.finish(read[0])
        answers = [
            Answer(completion, parts, call_ids(parts.tool_calls) if stream is None else stream.call_ids)
            for completion, parts in zip(completions, read, strict=True)
        ]
        reply = dataclasses.replace(reply, answers=answers)
        for answer in answers:
            message = answer_message(answer.parts, answer.call_ids)
            turn = self.tree.add(request, continuation, answer.completion, message, params.temperature)
            self.counts["tool_calls"] += len(answer.parts.tool_calls)
        self._responses[reply.identity] = turn
        return reply

    async def _completions(
        self, request: ChatRequest, tokens: list[int], params: SamplingParams, stream: AnswerStream | None
    ) -> list[Completion]:
        """Return n completions; a call that the engine cannot force is left to the policy, and counted."""
        generate = self.generate if stream is None else partial(self.generate, on_tokens=stream.add)
        grammar = self.reader.grammar(request, tokens)
        if grammar is not None:
            constrained = dataclasses.replace(params, grammar=grammar, min_tokens=0)
            try:
                return await asyncio.gather(*(generate(tokens, constrained) for _ in range(request.n)))
            except SettingsError as error:
                if request.json_schema is not None:
                    raise RequestRefused(str(error)) from None
        self.counts["unforced_tool_choices"] += request.forced_tool is not None
        return await asyncio.gather(*(generate(tokens, params) for _ in range(request.n)))

    def _room(self, continuation: Continuation) -> int:
        """Return the number of tokens that an answer may have. Raises RequestRefused if there is none."""
        count = len(continuation.tokens)
        room = self.limits.response_tokens - (count - continuation.prompt_length)
        if self.limits.context is not None:
            room = min(room, self.limits.context - count)
        if room <= 0:
            self.is_cut = True
            message = f"{count} tokens leave no room for an answer: context {self.limits.context}, response of the " \
                f"whole attempt {self.limits.response_tokens}"  # fmt: skip
            raise RequestRefused(message, code="context_length_exceeded")
        return room

    def _params(self, request: ChatRequest, room: int) -> SamplingParams:
        max_tokens = min(room, request.max_tokens or room)
        stop = tuple(dict.fromkeys((*self.params.stop, *request.stop)))
        # The program gets a text without special tokens. The sample's text is decoded from its tokens.
        changes: dict[str, Any] = {"max_tokens": max_tokens, "stop": stop, "skip_special_tokens": True}
        changes["min_tokens"] = min(self.params.min_tokens, max_tokens)
        if self.obeys_requests:
            wishes = {"temperature": request.temperature, "top_p": request.top_p, "seed": request.seed}
            changes |= {name: value for name, value in wishes.items() if value is not None}
        return dataclasses.replace(self.params, **changes)

    def history(self, identity: str) -> list[dict[str, Any]]:
        """Return the messages up to a response, its answer included. Raises RequestRefused for an unknown one."""
        turn = self._responses.get(identity.removeprefix("resp_"))
        if turn is None:
            raise RequestRefused(f"previous_response_id: {identity[:80]!r} is no response of this session", status=404)
        return list(turn.messages)

    def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of a request's prompt. Raises RequestRefused."""
        return len(self.tree.continuation(self._with_template_kwargs(request)).tokens)

    def samples(self, template: Sample) -> list[Sample]:
        """Return a sample for each branch; `metadata.agent` has the spans of its turns and what was counted."""
        samples = self.tree.samples(template)
        for sample in samples:
            sample.metadata["agent"] |= self.report()
        return samples

    def report(self) -> dict[str, int]:
        """Return the counts of turns, requests, refusals and calls of tools; the last three where there are any."""
        return {"turn_count": len(self.tree.turns), **{name: count for name, count in self.counts.items() if count}}


def reward_value(value: Any) -> Any:
    """Return a reward: a finite number, a truth value as 0 or 1, or an object; None for anything else."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, int | float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, dict) else None

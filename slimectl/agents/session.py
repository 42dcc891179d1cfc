"""One attempt of an agent. It answers requests with the policy, within limits, and records every turn."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from slimectl.agents.answer import AgentAnswer, AgentReply, AnswerReader
from slimectl.agents.answer_stream import AnswerStream
from slimectl.agents.chat_request import EndpointError, answer_message
from slimectl.agents.trajectory_tree import Continuation, TrajectoryTree, Turn
from slimectl.chats.messages import MessageError
from slimectl.chats.requests import ChatRequest
from slimectl.data.chat_responses import call_ids
from slimectl.data.token_log_probs import TokenLogProb
from slimectl.errors import SettingsError
from slimectl.protocols import OnTokens
from slimectl.types import Completion, Sample, SamplingParams


class Generate(Protocol):
    """Continues tokens. `on_tokens` is given only for a streamed answer."""

    def __call__(
        self, tokens: list[int], params: SamplingParams, *, on_tokens: OnTokens | None = None
    ) -> Awaitable[Completion]: ...


Score = Callable[[list[int], int], Awaitable[Sequence[TokenLogProb]]]
"""Returns the log-probabilities of a prompt's tokens, and a number of the likeliest tokens at each position."""

MOST_IN_FLIGHT = 64
"""Maximum number of concurrent requests of one session."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of one attempt: turns, tokens of a branch after its first prompt, and the context of the model."""

    turns: int
    response_tokens: int
    context: int | None = None


@dataclass(slots=True)
class Session:
    """Records the turns of one attempt in a tree.

    `params` are the sampling parameters of the rollout. A request's own parameters (request_keys.SAMPLING) replace them
    only with `obeys_requests`, because a policy must be trained on samples of its own distribution.
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
    is_recorded: bool = True
    """Whether the samples and counts are used. If not, a request that cannot be applied in full is refused."""
    score: Score | None = None
    stream_interval: int = 1
    """Minimum number of tokens between two chunks of a stream."""
    tree: TrajectoryTree = field(init=False)
    is_closed: bool = False
    is_aborted: bool = False
    """Whether the engine aborted an answer, so that a later round repeats the attempt."""
    is_cut: bool = False
    """Whether a limit of turns or tokens was reached."""
    reward: Any = None
    """Reward that the agent posted."""
    counts: Counter[str] = field(default_factory=Counter)
    """Counts of requests, refusals and tool calls, for the sample's metadata."""
    answering_s: float = 0.0
    """Seconds in which the policy worked for this attempt."""
    _in_flight: int = 0
    _answering_since: float = 0.0
    _responses: dict[str, Turn] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tree = TrajectoryTree(self.tokenizer, not self.params.skip_special_tokens, self.params.stop)

    @property
    def is_answering(self) -> bool:
        """Whether the policy is working for this attempt."""
        return self._in_flight > 0

    async def answer(self, request: ChatRequest) -> AgentReply:
        """Answer a request and record the turn. Raises EndpointError."""
        [reply] = await self.answers([request])
        return reply

    async def answers(self, requests: Sequence[ChatRequest], streams: Sequence[AnswerStream] = ()) -> list[AgentReply]:
        """Answer the parts of one HTTP request and record a turn for each. Raises EndpointError.

        Each of the `streams`, if there are any, gets an answer while it is sampled.
        """
        self._check(requests)
        if not self.is_answering:
            self._answering_since = time.monotonic()
        self._in_flight += len(requests)
        try:
            tasks = self._tasks([self._with_template_kwargs(request) for request in requests], streams)
            return await gathered(tasks)
        finally:
            self._in_flight -= len(requests)
            if not self.is_answering:
                self.answering_s += time.monotonic() - self._answering_since

    def _tasks(
        self, requests: Sequence[ChatRequest], streams: Sequence[AnswerStream]
    ) -> list[Coroutine[Any, Any, AgentReply]]:
        """Return a coroutine for each request. Requests with the same prompt share it. Raises EndpointError."""
        prompts: dict[int, Continuation] = {}
        plans = []
        for request in requests:
            key = id(request.messages if request.prompt is None else request.prompt)
            if key not in prompts:
                prompts[key] = self.tree.continuation(request)
            plans.append((request, prompts[key], self._params(request, self._room(prompts[key]))))
        receivers: Sequence[AnswerStream | None] = streams or [None] * len(plans)
        return [self._answer(*plan, stream) for plan, stream in zip(plans, receivers, strict=True)]

    def _with_template_kwargs(self, request: ChatRequest) -> ChatRequest:
        return dataclasses.replace(request, template_kwargs={**self.template_kwargs, **request.template_kwargs})

    def count_unapplied(self, request: ChatRequest) -> None:
        """Count the keys of a request that ask for other sampling and are not applied."""
        count = len(request.unapplied)
        if not self.obeys_requests:
            count += sum(value != getattr(self.params, name) for name, value in request.sampling.items())
        self.counts["unapplied_keys"] += count

    def _check(self, requests: Sequence[ChatRequest]) -> None:
        [request, *_] = requests
        self.counts["requests"] += 1
        if self.is_closed:
            raise EndpointError("this session has ended", status=404, code="session_ended")
        if self.model not in ("*", request.model):
            message = f"model {request.model[:100]!r} is not served here. Use {self.model!r}."
            raise EndpointError(message, status=404, code="model_not_found")
        if self._in_flight + len(requests) > MOST_IN_FLIGHT:
            message = f"{MOST_IN_FLIGHT} requests of this session are in flight. Wait for one of them."
            raise EndpointError(message, status=429, code="too_many_requests")
        if len(self.tree.turns) + self._in_flight + len(requests) > self.limits.turns:
            self.is_cut = True
            raise EndpointError(f"the attempt has used its {self.limits.turns} turns", code="turn_limit")

    async def _answer(
        self, request: ChatRequest, continuation: Continuation, params: SamplingParams, stream: AnswerStream | None
    ) -> AgentReply:
        prompt, model = continuation.tokens, request.model or self.model
        reply = AgentReply(request, model, int(time.time()), len(prompt), self.reader.vocabulary)
        if request.echo:
            reply = await self._with_echo(reply, prompt)
        if stream is not None:
            stream.begin(reply, partial(self.reader.growing, request, prompt, params.stop))
        completion = await self._completion(request, prompt, params, stream)
        if completion.finish_reason == "abort":
            self.is_aborted = True
            raise EndpointError("the round ended before the response was complete", status=503, code="aborted")
        parts = self.reader.read(completion, request, prompt, params.stop)
        if stream is not None:
            stream.finish(parts)
        ids = call_ids(parts.tool_calls) if stream is None else stream.call_ids
        answer = AgentAnswer(completion, parts, ids, self.reader.stop_string(completion, request.stop))
        turn = self.tree.add(request, continuation, completion, answer_message(parts, ids), params.temperature)
        self.counts["tool_calls"] += len(parts.tool_calls)
        self._responses[reply.identity] = turn
        return dataclasses.replace(reply, sampled=answer)

    async def _with_echo(self, reply: AgentReply, prompt: list[int]) -> AgentReply:
        """Return a reply that starts with its prompt. Raises EndpointError for log-probabilities without `score`."""
        request = reply.request
        text = request.prompt if isinstance(request.prompt, str) else self.tokenizer.decode(prompt)
        if not request.log_probs:
            return dataclasses.replace(reply, echo=text)
        if self.score is None:
            raise EndpointError(
                "echo: this endpoint cannot return log-probabilities of prompts. Leave out logprobs, or send the "
                "request to `slimectl serve`."
            )
        return dataclasses.replace(reply, echo=text, echo_log_probs=await self.score(prompt, request.top_log_probs))

    async def _completion(
        self, request: ChatRequest, tokens: list[int], params: SamplingParams, stream: AnswerStream | None
    ) -> Completion:
        """Return a completion. If the engine cannot force a call, that is counted."""
        generate = self.generate if stream is None else partial(self.generate, on_tokens=stream.add)
        grammar = self.reader.grammar(request, tokens)
        if grammar is not None:
            constrained = dataclasses.replace(params, grammar=grammar, min_tokens=0)
            try:
                return await generate(tokens, constrained)
            except SettingsError as error:
                if request.json_schema is not None:
                    raise EndpointError(str(error)) from None
        if request.forced_tool is not None:
            if not self.is_recorded:
                raise EndpointError(
                    "tool_choice: cannot be forced. The chat template does not write calls as JSON objects."
                )
            self.counts["unforced_tool_choices"] += 1
        try:
            return await generate(tokens, params)
        except SettingsError as error:
            if params.top_log_probs:
                raise EndpointError(f"top_logprobs: {error}") from None
            raise

    def _room(self, continuation: Continuation) -> int:
        """Return the number of tokens that an answer may have. Raises EndpointError if there is none."""
        count = len(continuation.tokens)
        room = self.limits.response_tokens - (count - continuation.prompt_length)
        if self.limits.context is not None:
            room = min(room, self.limits.context - count)
        if room <= 0:
            self.is_cut = True
            is_full = self.limits.context is not None and count >= self.limits.context
            message = (
                f"{count} tokens leave no room for a response in a context of {self.limits.context}"
                if is_full
                else f"the attempt has used its {self.limits.response_tokens} response tokens"
            )
            raise EndpointError(message, code="context_length_exceeded")
        return room

    def _params(self, request: ChatRequest, room: int) -> SamplingParams:
        max_tokens = min(room, request.max_tokens or room)
        stop = tuple(dict.fromkeys((*self.params.stop, *request.stop)))
        # The program gets a text without special tokens. The sample's text is decoded from its tokens.
        changes: dict[str, Any] = {"max_tokens": max_tokens, "stop": stop, "skip_special_tokens": True}
        changes["min_tokens"] = min(self.params.min_tokens, max_tokens)
        changes["top_log_probs"] = request.top_log_probs
        if self.obeys_requests:
            changes |= request.sampling
        return dataclasses.replace(self.params, **changes)

    def history(self, identity: str) -> list[dict[str, Any]]:
        """Return the messages up to and including a response. Raises EndpointError if it is unknown."""
        turn = self._responses.get(identity.removeprefix("resp_"))
        if not self.is_recorded:
            raise MessageError("previous_response_id", "this server keeps no responses. Send all messages in input.")
        if turn is None:
            raise EndpointError(
                f"previous_response_id: {identity[:80]!r} is not a response of this session", status=404
            )
        return list(turn.messages)

    def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of a request's prompt. Raises EndpointError."""
        return len(self.tree.continuation(self._with_template_kwargs(request)).tokens)

    def reward_turns(self, rewards: Any) -> None:
        """Reward the responses so far, in order. Raises MessageError if there is not one number for each."""
        if not isinstance(rewards, list) or len(rewards) != len(self.tree.turns):
            message = f"must be a list with a number for each of the {len(self.tree.turns)} responses"
            raise MessageError("turn_rewards", message)
        for turn, value in zip(self.tree.turns, rewards, strict=True):
            turn.reward = _turn_reward(value)

    def reward_turn(self, reward: Any, state: Any = None) -> None:
        """Reward the last response, which was given in `state`. Raises MessageError if there is none."""
        if not self.tree.turns:
            raise MessageError("turn_reward", "this session has no response yet to reward")
        if not isinstance(state, str | None):
            raise MessageError("state", "must be a string, equal for equal states")
        self.tree.turns[-1].reward, self.tree.turns[-1].state = _turn_reward(reward), state

    def samples(self, template: Sample) -> list[Sample]:
        """Return a sample for each branch. `metadata.agent` has the spans of its turns and the counts."""
        samples = self.tree.samples(template)
        for sample in samples:
            sample.metadata["agent"] |= self.report()
        return samples

    def report(self) -> dict[str, int]:
        """Return the counts of turns, requests, refusals and tool calls. The last three are omitted if 0."""
        return {"turn_count": len(self.tree.turns), **{name: count for name, count in self.counts.items() if count}}


async def gathered(coroutines: Sequence[Coroutine[Any, Any, AgentReply]]) -> list[AgentReply]:
    """Return the results of coroutines that run together. If one raises, the others are cancelled."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _turn_reward(value: Any) -> float:
    """Return the reward of a turn. Raises MessageError if it is not a number."""
    number = reward_value(value)
    if not isinstance(number, int | float):
        raise MessageError("turn_reward", "must be a finite number")
    return float(number)


def reward_value(value: Any) -> Any:
    """Return a reward: a finite number, a boolean as 0 or 1, or an object. None for anything else."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, int | float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, dict) else None

"""The agent of an environment: the policy plays one episode per sample, and every turn is recorded."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from slimectl.agents.answer import AgentAnswer, AnswerReader
from slimectl.agents.chat_request import EndpointError, answer_message
from slimectl.agents.environments.episode import (
    Episode,
    EpisodeError,
    EpisodeTimeoutError,
    Specification,
    shared_host,
)
from slimectl.agents.environments.port import Action, Messages, Observation, Task
from slimectl.agents.openai_chat import read_chat
from slimectl.agents.session import Session, SessionLimits
from slimectl.chats.messages import MessageError
from slimectl.chats.requests import ChatRequest
from slimectl.data.chat import chat_of
from slimectl.errors import RecordError
from slimectl.types import Sample, SamplingParams, Status

SingleTurn = Callable[..., Awaitable[Sample]]
LIMITS = ("turn_limit", "context_length_exceeded")
"""Codes of refusals that end an episode early. It keeps the rewards so far."""


@dataclass(frozen=True, slots=True)
class EnvironmentOptions:
    """Limits of an episode. `timeout_s` limits only the environment's time."""

    specification: Specification
    timeout_s: float = 120.0
    max_turns: int = 64
    turn_tokens: int | None = None
    retries: int = 1
    concurrency: int = 64
    gives_reward: bool = True
    """Whether the environment's reward counts, because no verifier is set."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Transcript:
    """What happened in one episode. `players` has the player of each turn, `states` the state in which it was taken."""

    session: Session
    chats: dict[int, Messages] = field(default_factory=lambda: defaultdict(list))
    tools: Messages = field(default_factory=list)
    players: list[int] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    rewards: list[dict[int, Any]] = field(default_factory=list)
    errors: int = 0
    is_cut: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    _state: dict[int, str] = field(default_factory=dict)
    """The state that each player has seen last."""

    def add(self, observation: Observation) -> None:
        """Add what the environment returned at the beginning or after an action."""
        if self.players:
            self.rewards.append(observation.rewards)
            self.errors += observation.is_error
        self.info |= observation.info
        self.tools = observation.tools or self.tools
        chat = [] if observation.replaces_chat else self.chats[observation.player]
        if not observation.is_done:
            self.chats[observation.player] = [*chat, *observation.messages]
            if observation.state is not None or not observation.is_error or observation.player not in self._state:
                self._state[observation.player] = observation.state_key()

    def add_turn(self, player: int, chat: Messages) -> None:
        """Add a turn of the policy, after which the player's chat is `chat`."""
        self.players.append(player)
        self.states.append(self._state[player])
        self.chats[player] = chat

    def add_ending(self, observation: Observation) -> None:
        """Add the rewards that were still due when an episode ended early."""
        self.info |= observation.info
        self.rewards[-1] = self.rewards[-1] | observation.rewards

    def reward_turns(self) -> None:
        """Give every turn its state and reward. A player's reward for another's turn goes to the player's last turn.

        Rewards that are objects are not rewards of turns.
        """
        turns = self.session.tree.turns
        for turn, player, state in zip(turns, self.players, self.states, strict=True):
            turn.player, turn.state, turn.reward = player, state, 0.0
        for number, rewards in enumerate(self.rewards):
            for player, reward in rewards.items():
                own = [i for i, other in enumerate(self.players) if other == player]
                if own and isinstance(reward, int | float):
                    earned = turns[max((i for i in own if i <= number), default=own[0])]
                    earned.reward = (earned.reward or 0.0) + float(reward)

    def reward(self, player: int) -> Any:
        """Return a player's reward: the sum of numbers, or the last object. None if there was no reward."""
        rewards = [rewards[player] for rewards in self.rewards if rewards.get(player) is not None]
        objects = [reward for reward in rewards if isinstance(reward, dict)]
        return objects[-1] if objects else sum(rewards) if rewards else None


class EnvironmentAgent:
    """Plays an episode with the policy for each attempt, and returns a sample for each of its branches.

    A branch is a player's chat. An environment that rewrites a chat starts another branch.
    """

    name = "rollout.env"
    resumes = False
    per_group = False
    limits_time = True
    """This agent limits the time of its attempts, so the limit on tool time does not apply."""
    renders_chats = True
    """Every request goes through the chat template, including string prompts."""

    def __init__(self, options: EnvironmentOptions, single_turn: SingleTurn | None = None) -> None:
        """`single_turn` answers evaluation prompts that are not tasks of the environment."""
        self.options = options
        self._single_turn = single_turn
        self._host = shared_host(options.specification)
        self._shared: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = weakref.WeakKeyDictionary()

    async def __call__(self, arguments: Mapping[str, Any]) -> list[Sample]:
        """Return the samples of one attempt.

        An episode that its environment aborts is played again. Raises RuntimeError after the last try, and RecordError
        for a prompt that is not a task of the environment.
        """
        sample: Sample = arguments["sample"]
        description = await asyncio.to_thread(self._host.description)
        is_task = description["tasks"] == "data" or "env" in sample.metadata
        if self._single_turn is not None and arguments.get("evaluation") and not is_task:
            return [await self._single_turn(sample, arguments["sampling_params"], arguments["generate"])]
        task = task_of(sample, description["tasks"], self.options.specification.name)
        failures: Counter[str] = Counter()
        seconds = 0.0
        shared = self._shared_parts(arguments["tokenizer"])
        async with shared.places:
            while True:
                transcript = Transcript(self._session(arguments, shared.reader))
                try:
                    async with self._host.episode(self.options.timeout_s) as episode:
                        try:
                            await self._play(episode, transcript, task)
                        finally:
                            seconds += episode.spent_s
                    break
                except EpisodeError as error:
                    failures["failures"] += 1
                    failures["timeouts"] += isinstance(error, EpisodeTimeoutError)
                    if failures["failures"] > self.options.retries:
                        sample.metadata["env"] = self._report(task, transcript, failures, seconds)
                        raise RuntimeError(str(error)) from None
        if transcript.session.is_aborted:
            sample.status = Status.ABORTED
            return [sample]
        report = self._report(task, transcript, failures, seconds)
        return list(self._samples(transcript, sample, report, gives_reward=description["gives_reward"]))

    def _shared_parts(self, tokenizer: Any) -> _Shared:
        loop = asyncio.get_running_loop()
        if loop not in self._shared:
            self._shared[loop] = _Shared(asyncio.Semaphore(self.options.concurrency), AnswerReader(tokenizer))
        return self._shared[loop]

    def _session(self, arguments: Mapping[str, Any], reader: AnswerReader) -> Session:
        params: SamplingParams = arguments["sampling_params"]
        limits = SessionLimits(self.options.max_turns, params.max_tokens, arguments.get("context"))
        policy = (arguments["tokenizer"], reader, arguments["generate"])
        return Session(*policy, params, limits, template_kwargs=self.options.template_kwargs)

    async def _play(self, episode: Episode, transcript: Transcript, task: Task) -> None:
        """Play an episode to its end, or to a limit of turns or tokens. Raises EpisodeError."""
        observation = await episode.reset(task)
        transcript.add(observation)
        while not observation.is_done:
            player = observation.player
            try:
                answer = await self._answer(transcript, player)
            except EndpointError as refusal:
                if transcript.session.is_aborted:
                    return
                if refusal.code not in LIMITS or not transcript.players:
                    raise RuntimeError(f"{self.options.specification.name}: {refusal}") from None
                transcript.is_cut = True
                break
            except MessageError as error:
                raise RuntimeError(f"{self.options.specification.name}: {error}") from None
            observation = await episode.step(action_of(answer, player))
            transcript.add(observation)
        if transcript.is_cut:
            transcript.add_ending(await episode.close())
            return
        with suppress(EpisodeError):  # its rewards are known, and its process ends in any case
            await episode.close()

    async def _answer(self, transcript: Transcript, player: int) -> AgentAnswer:
        """Return the policy's answer to a player's chat, and append it to the chat. Raises EndpointError."""
        request = self._request(transcript.chats[player], transcript.tools)
        reply = await transcript.session.answer(request)
        answer = reply.answer
        transcript.add_turn(player, [*request.messages, answer_message(answer.parts, answer.call_ids)])
        return answer

    def _request(self, chat: Messages, tools: Messages) -> ChatRequest:
        return read_chat({"messages": chat, "tools": tools, "max_tokens": self.options.turn_tokens})

    def _report(self, task: Task, transcript: Transcript, failures: Counter[str], seconds: float) -> dict[str, Any]:
        report: dict[str, Any] = {"name": self.options.specification.name, "task": task.index, "split": task.split}
        report |= {"turns": len(transcript.players), "tool_calls": transcript.session.counts["tool_calls"]}
        report |= {"errors": transcript.errors, "failures": failures["failures"], "timeouts": failures["timeouts"]}
        report["seconds"] = round(seconds, 4)
        return report | ({"info": transcript.info} if transcript.info else {})

    def _samples(
        self, transcript: Transcript, sample: Sample, report: dict[str, Any], *, gives_reward: bool
    ) -> Iterator[Sample]:
        transcript.reward_turns()
        leaves = [turn for turn in transcript.session.tree.turns if not turn.children]
        of_turn = dict(zip(transcript.session.tree.turns, transcript.players, strict=True))
        several = len(set(transcript.players)) > 1
        for leaf, branch in zip(reversed(leaves), transcript.session.samples(sample), strict=True):
            player = of_turn[leaf]
            rewards = [rewards.get(player, 0.0) for rewards in transcript.rewards]
            branch.metadata["env"] = report | {"rewards": rewards} | ({"player": player} if several else {})
            branch.non_generation_time += report["seconds"]
            if self.options.gives_reward and gives_reward:
                branch.reward = transcript.reward(player) or 0.0
            if transcript.is_cut:
                branch.status = Status.TRUNCATED
            yield branch


@dataclass(frozen=True, slots=True)
class _Shared:
    """Parts that the attempts of one event loop share."""

    places: asyncio.Semaphore
    reader: AnswerReader


def task_of(sample: Sample, kind: str, name: str) -> Task:
    """Return the task of a sample for an environment whose tasks are "seeds", "rows" or "data".

    Raises RecordError for a prompt that is not one of its tasks.
    """
    drawn = sample.metadata.get("env")
    if isinstance(drawn, dict) and type(drawn.get("task")) is int:
        return Task(drawn["task"], str(drawn.get("split", "train")))
    if kind != "data":
        raise RecordError(f"prompt {sample.group_index}: not a task of {name}. Give env, or env@[a:b], as data.")
    metadata = {key: value for key, value in sample.metadata.items() if key != "env"}
    return Task(messages=chat_of(sample), label=sample.label, metadata=metadata | sample.extra)


def action_of(answer: AgentAnswer, player: int) -> Action:
    """Return an answer of the policy in the form that an environment expects."""
    calls = [
        {"id": call_id, "name": call.name, "arguments": call.arguments}
        for call, call_id in zip(answer.parts.tool_calls, answer.call_ids, strict=True)
    ]
    text = answer.completion.text
    return Action(answer.parts.content, calls, player, answer.is_cut, raw=text)


def specification_of(name: str, arguments: Mapping[str, Any], python: str | None = None) -> Specification:
    """Return the specification of KIND:ID with its arguments."""
    kind, _, target = name.partition(":")
    return Specification(kind, target, json.dumps(arguments, sort_keys=True), python or "")

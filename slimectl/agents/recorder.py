"""APIs for agents over one engine, without recording or with sessions that become samples when they end."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from slimectl.agents.answer import AnswerReader
from slimectl.agents.chat_request import EndpointError
from slimectl.agents.endpoint import MESSAGES, RESPONSES, Endpoint, Route
from slimectl.agents.session import Generate, Score, Session, SessionLimits, reward_value
from slimectl.chats.requests import RequestBody
from slimectl.types import Sample, SamplingParams

MOST_TURNS = 100_000
"""Maximum turns of one session, so that a client in a loop does not fill the memory."""
MOST_SESSIONS = 10_000
"""Maximum number of open sessions."""


@dataclass(slots=True)
class UnrecordedApis:
    """The Responses and Messages APIs over an engine. Each request has its own session, which is not recorded.

    `params` are the defaults for parameters that a request leaves out.
    """

    tokenizer: Any
    params: SamplingParams
    context: int
    stream_interval: int = 1
    _generate: Generate | None = None
    _score: Score | None = None
    _reader: AnswerReader = field(init=False)

    def __post_init__(self) -> None:
        self._reader = AnswerReader(self.tokenizer)

    def routes(self, generate: Generate, score: Score | None = None) -> Iterator[Route]:
        """Yield the routes of the APIs, which ask this engine."""
        self._generate, self._score = generate, score
        yield from Endpoint(lambda request: self._session(is_recorded=False)).routes(apis=(RESPONSES, MESSAGES))

    def _session(self, *, is_recorded: bool) -> Session:
        assert self._generate is not None
        limits = SessionLimits(MOST_TURNS, self.context, self.context)
        return Session(
            self.tokenizer,
            self._reader,
            self._generate,
            self.params,
            limits,
            obeys_requests=True,
            is_recorded=is_recorded,
            stream_interval=self.stream_interval,
            score=self._score,
        )

    def close(self) -> None:
        """Do nothing: no session is open."""


@dataclass(slots=True, kw_only=True)
class SessionRecorder(UnrecordedApis):
    """Opens a session for every name that a client uses, and hands the samples of ended ones to `write`.

    The name comes from the path (/s/NAME/v1/…). Without one in the path, it is a hash of the client's key. A session
    ends by POST /s/NAME/end, after `idle_s` seconds without a request, or with the server.
    """

    write: Callable[[Sample], None]
    idle_s: float = 1800.0
    count: int = 0
    """Sessions that have been written."""
    _sessions: dict[str, Session] = field(default_factory=dict)
    _used: dict[str, float] = field(default_factory=dict)
    """Time of the last request of each session."""

    def routes(self, generate: Generate, score: Score | None = None) -> Iterator[Route]:
        """Yield the routes of the recording APIs, which ask this engine."""
        self._generate, self._score = generate, score
        endpoint = Endpoint(self.find)
        for prefix in ("", "/s/{session}"):
            yield from endpoint.routes(prefix)
            yield "POST", f"{prefix}/end", self.end
        yield from endpoint.session_routes("/s/{session}")
        yield "POST", "/reward", endpoint.reward

    def find(self, request: web.Request) -> Session:
        """Return the session of a request, opened with its first one. Raises EndpointError beyond MOST_SESSIONS."""
        name, now = session_name(request), time.monotonic()
        for idle in [used_name for used_name, used in self._used.items() if now - used > self.idle_s]:
            if not self._sessions[idle].is_answering:
                self._end(idle)
        if name not in self._sessions:
            if len(self._sessions) >= MOST_SESSIONS:
                raise EndpointError(f"{MOST_SESSIONS} sessions are open. End some with POST /s/NAME/end.", status=429)
            self._sessions[name] = self._session(is_recorded=True)
        self._used[name] = now
        return self._sessions[name]

    async def end(self, request: web.Request) -> web.Response:
        """End a session with the reward in the body, if any. Answer with the number of its samples."""
        name = session_name(request)
        if name not in self._sessions:
            return web.json_response({"error": {"message": "no such session"}}, status=404)
        text = await request.text()
        try:
            reward = reward_value(RequestBody.of(json.loads(text)).raw("reward")) if text.strip() else None
        except (ValueError, RecursionError):
            return web.json_response({"error": {"message": "the body is not a JSON object"}}, status=400)
        if reward is not None:
            self._sessions[name].reward = reward
        return web.json_response({"session": name, "samples": self._end(name)})

    def _end(self, name: str) -> int:
        session = self._sessions.pop(name)
        del self._used[name]
        session.is_closed = True
        samples = session.samples(Sample(group_index=self.count, index=self.count, metadata={"session": name}))
        for sample in samples:
            sample.reward = session.reward
            sample.rollout_id = sample.index if len(samples) > 1 else None
            self.write(sample)
        self.count += bool(samples)
        return len(samples)

    def close(self) -> None:
        """End all sessions."""
        for name in list(self._sessions):
            self._end(name)


def request_key(request: web.Request) -> str:
    """Return the client's key, or an empty string."""
    return request.headers.get("Authorization", "").partition(" ")[2] or request.headers.get("x-api-key", "")


def session_name(request: web.Request) -> str:
    """Return the name in the path, else a name from the hash of the client's key, so that the key is not stored."""
    if name := request.match_info.get("session"):
        return str(name)
    key = request_key(request)
    return f"key-{hashlib.sha256(key.encode(errors='replace')).hexdigest()[:12]}" if key else "default"

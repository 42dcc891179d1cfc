"""slime's adapters for coding agents: an HTTP application per API, whose sessions become samples."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.web_log import AccessLogger

from slimectl.agents.answer import AnswerReader
from slimectl.agents.chat_request import EndpointError
from slimectl.agents.endpoint import CHAT, COMPLETIONS, LONGEST_BODY, MESSAGES, RESPONSES, Api, Endpoint
from slimectl.agents.recorder import request_key
from slimectl.agents.session import Session, SessionLimits
from slimectl.errors import HookError
from slimectl.hooks.generation_context import GenerationContext, current_generation
from slimectl.migrate.slime_shapes import sampling_params as sampling_params_of
from slimectl.protocols import OnTokens
from slimectl.system.event_loop import awaited
from slimectl.types import Completion, Sample, SamplingParams

NO_LIMIT = 1 << 30
DRAIN_TICK_S = 0.05


@dataclass
class BaseAdapter:
    """Serves the policy to agents in sandboxes. The key of a request is the name of its session.

    The run's engine answers, whatever `sglang_url` is.

    Parsers are not needed: the chat template shows how the model writes reasoning and calls. `fork_threshold_tokens` is
    not needed either, because histories that agree share one branch.
    """

    tokenizer: Any
    sglang_url: str
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    max_turns_per_sid: int | None = None
    fork_threshold_tokens: int | None = None
    debug_callback: Any = None
    app: web.Application = field(init=False)
    apis: tuple[Api, ...] = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)

    def __post_init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._reader = AnswerReader(self.tokenizer)
        self.app = web.Application(client_max_size=LONGEST_BODY)
        endpoint = Endpoint(self._find)
        for method, path, handler in (*endpoint.routes(apis=self.apis), *endpoint.session_routes("")):
            self.app.router.add_route(method, path, handler)
        self.app.router.add_get("/healthz", _health)

    def _find(self, request: web.Request) -> Session:
        session = self._sessions.get(request_key(request))
        if session is None:
            raise EndpointError("no such session, or it has ended", status=404, code="session_ended")
        return session

    def open_session(
        self, sid: str, *, sampling_defaults: Mapping[str, Any] | None = None, max_context_tokens: int = 0
    ) -> None:
        """Start a session. Its agent asks with `sid` as its key.

        Raises ValueError for a name that is in use, and HookError outside a generate function.
        """
        if sid in self._sessions:
            raise ValueError(f"session {sid} is open already. Give each attempt its own name")
        params = sampling_params_of(dict(sampling_defaults or {}), SamplingParams()) or SamplingParams()
        limits = SessionLimits(self.max_turns_per_sid or NO_LIMIT, params.max_tokens, max_context_tokens or None)
        context = current_generation()
        if context is None:
            raise HookError("open_session: there is no engine here. Call it in rollout.custom_generate_function_path")
        policy = _Policy(context, asyncio.get_running_loop())
        self._sessions[sid] = Session(self.tokenizer, self._reader, policy, params, limits)

    async def finish_session(
        self,
        sid: str,
        *,
        base_sample: Sample | None = None,
        reward: float = 0.0,
        extra_metadata: Mapping[str, Any] | None = None,
        wait_timeout: float = 5.0,
    ) -> list[Sample]:
        """End a session and return a sample with the reward for each branch. A second call returns none."""
        session = self._sessions.pop(sid, None)
        if session is None:
            return []
        session.is_closed = True
        for _ in range(int(wait_timeout / DRAIN_TICK_S)):
            if not session.is_answering:
                break
            await asyncio.sleep(DRAIN_TICK_S)
        samples = session.samples(base_sample) if base_sample is not None else []
        for sample in samples:
            sample.reward, sample.rollout_id = reward, base_sample.index if base_sample is not None else None
            sample.metadata |= extra_metadata or {}
        return samples

    async def drop_session(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """End a session without samples."""
        await self.finish_session(sid, wait_timeout=wait_timeout)


class AnthropicAdapter(BaseAdapter):
    """Serves Anthropic's API."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, apis=(MESSAGES,))


class OpenAIAdapter(BaseAdapter):
    """Serves OpenAI's APIs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, apis=(CHAT, COMPLETIONS, RESPONSES))


async def _health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


@dataclass(frozen=True)
class _Policy:
    """Asks the run's engine in the event loop of the attempt, whatever loop serves the agent."""

    context: GenerationContext
    loop: asyncio.AbstractEventLoop

    async def __call__(
        self, tokens: list[int], params: SamplingParams, *, on_tokens: OnTokens | None = None
    ) -> Completion:
        work = self.context.generate(tokens, params)
        if self.loop is asyncio.get_running_loop():
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(awaited(work), self.loop))


class FilteredAccessLogger(AccessLogger):
    """Logs requests that failed."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        if response.status >= 400:
            super().log(request, response, time)


@dataclass
class ThreadedApp:
    """A running application, with the port that it listens on."""

    port: int
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    runner: web.AppRunner

    def stop(self) -> None:
        """Close the application and end its thread."""
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


def run_app_in_thread(
    app: web.Application,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    thread_name: str = "app",
    runner_kwargs: Mapping[str, Any] | None = None,
) -> ThreadedApp:
    """Serve an application in a thread with its own event loop, and return it when it listens."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name=thread_name, daemon=True)
    thread.start()
    runner = web.AppRunner(app, **(runner_kwargs or {}))

    async def start() -> int:
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        return int(runner.addresses[0][1])

    return ThreadedApp(asyncio.run_coroutine_threadsafe(start(), loop).result(), thread, loop, runner)

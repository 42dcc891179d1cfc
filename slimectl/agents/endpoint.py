"""HTTP endpoint of the policy for agents, with the APIs of OpenAI and Anthropic. Sessions are recorded.

A session has a path, `/s/NAME/v1/…`. Its name is secret if the endpoint generated it.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from aiohttp import web

from slimectl.agents import anthropic_messages, openai_chat, openai_responses, request_keys
from slimectl.agents.answer import AgentReply
from slimectl.agents.answer_stream import AnswerStream, Event, EventWriter
from slimectl.agents.chat_request import EndpointError, numbered
from slimectl.agents.request_keys import ApiKeys
from slimectl.agents.session import Session, reward_value
from slimectl.chats.messages import MessageError
from slimectl.chats.requests import ChatRequest, RequestBody
from slimectl.errors import RecordError, SettingsError, SlimectlError
from slimectl.system.http import send_part

LONGEST_BODY = 64 << 20
"""Maximum bytes of a request."""

Route = tuple[str, str, Callable[[web.Request], Awaitable[web.StreamResponse]]]
"""Method, path and handler."""
FindSession = Callable[[web.Request], Session]
"""Returns the session of a request. Raises EndpointError for an unknown one."""
ErrorBody = Callable[[int, str, str | None, str | None], dict[str, Any]]
"""Returns an error body from the status, the message, OpenAI's code and the invalid key."""


@dataclass(frozen=True, slots=True)
class Api:
    """One API: how to read its requests, and how to write its responses, streams and errors."""

    path: str
    keys: ApiKeys
    read: Callable[[Any, Session], list[ChatRequest]]
    """Returns a request for each prompt."""
    body: Callable[[Sequence[AgentReply]], dict[str, Any]]
    writer: Callable[[AgentReply], EventWriter]
    error_body: ErrorBody = openai_chat.error_body

    def requests(self, values: Any, session: Session) -> list[ChatRequest]:
        """Read a body and return a request for each response. Raises EndpointError or MessageError."""
        RequestBody.of(values)
        counted = self.keys.check(values, counts=session.is_recorded)
        requests = numbered(self.read(values, session))
        return [replace(request, unapplied=tuple(counted)) for request in requests]


CHAT = Api(
    "/v1/chat/completions",
    request_keys.CHAT,
    lambda values, session: [openai_chat.read_chat(values)],
    openai_chat.chat_response,
    openai_chat.ChatEventWriter,
)
COMPLETIONS = Api(
    "/v1/completions",
    request_keys.COMPLETIONS,
    lambda values, session: openai_chat.read_completions(values),
    openai_chat.completion_response,
    openai_chat.CompletionEventWriter,
)
RESPONSES = Api(
    "/v1/responses",
    request_keys.RESPONSES,
    lambda values, session: [openai_responses.read_response(values, session.history)],
    openai_responses.response,
    openai_responses.ResponseEventWriter,
)
MESSAGES = Api(
    "/v1/messages",
    request_keys.MESSAGES,
    lambda values, session: [anthropic_messages.read_messages(values)],
    anthropic_messages.response,
    anthropic_messages.MessageEventWriter,
    anthropic_messages.error_body,
)
APIS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)


class Endpoint:
    """Handlers of all routes. `find` returns the session of a request."""

    def __init__(self, find: FindSession) -> None:
        self._find = find

    def routes(self, prefix: str = "", *, apis: Iterable[Api] = APIS) -> Iterator[Route]:
        """Yield the routes of these APIs below a prefix, which may contain variables for `find`."""
        for api in apis:
            yield "POST", f"{prefix}{api.path}", partial(self._ask, api)
            if api is MESSAGES:
                yield "POST", f"{prefix}{api.path}/count_tokens", self.count

    def session_routes(self, prefix: str) -> Iterator[Route]:
        """Yield the other routes of a session: its model and its reward."""
        yield "GET", f"{prefix}/v1/models", self.models
        yield "GET", f"{prefix}/v1/models/{{name:.+}}", self.model
        yield "POST", f"{prefix}/reward", self.reward

    async def _ask(self, api: Api, request: web.Request) -> web.StreamResponse:
        async def answer(session: Session) -> web.StreamResponse:
            requests = api.requests(await _json(request), session)
            session.count_unapplied(requests[0])
            if requests[0].stream:
                return await _stream(request, session, requests, api.writer)
            return web.json_response(api.body(await session.answers(requests)))

        return await self._answer(request, answer, api.error_body)

    async def count(self, request: web.Request) -> web.StreamResponse:
        async def answer(session: Session) -> web.StreamResponse:
            tokens = session.count_tokens(MESSAGES.requests(await _json(request), session)[0])
            return web.json_response({"input_tokens": tokens})

        return await self._answer(request, answer, anthropic_messages.error_body)

    async def models(self, request: web.Request) -> web.StreamResponse:
        async def answer(session: Session) -> web.StreamResponse:
            return web.json_response({"object": "list", "data": [_card(session)]})

        return await self._answer(request, answer)

    async def model(self, request: web.Request) -> web.StreamResponse:
        async def answer(session: Session) -> web.StreamResponse:
            name, card = request.match_info["name"], _card(session)
            if session.model != "*" and name != card["id"]:
                raise EndpointError(f"model {name[:100]!r} is not served here. {card['id']!r} is.", status=404)
            return web.json_response(card | {"id": name})

        return await self._answer(request, answer)

    async def reward(self, request: web.Request) -> web.StreamResponse:
        async def answer(session: Session) -> web.StreamResponse:
            body = RequestBody.of(await _json(request))
            if "turn_reward" in body:
                session.reward_turn(body.raw("turn_reward"), body.raw("state"))
            if "turn_rewards" in body:
                session.reward_turns(body.raw("turn_rewards"))
            if "reward" in body or not ("turn_reward" in body or "turn_rewards" in body):
                session.reward = reward_value(body.raw("reward"))
                if session.reward is None:
                    raise MessageError("reward", "must be a finite number or an object")
            return web.json_response({"reward": session.reward})

        return await self._answer(request, answer)

    async def _answer(
        self,
        request: web.Request,
        answer: Callable[[Session], Any],
        error_body: ErrorBody = openai_chat.error_body,
    ) -> web.StreamResponse:
        """Answer a request. A refusal becomes an error body of its API."""
        session = None
        try:
            session = self._find(request)
            response: web.StreamResponse = await answer(session)
        except (EndpointError, MessageError, SlimectlError) as error:
            if session is not None and not isinstance(error, SlimectlError):
                session.counts["refused_requests"] += 1
            status, message, code, param = _refusal(error)
            return web.json_response(error_body(status, message, code, param), status=status)
        return response


def _refusal(error: Exception) -> tuple[int, str, str | None, str | None]:
    """Return the status, message, code and key of an HTTP error."""
    if isinstance(error, EndpointError):
        return error.status, str(error), error.code, None
    is_refused = isinstance(error, (MessageError, RecordError, SettingsError))
    status = 400 if is_refused else int(getattr(error, "status", 500))
    return status, str(error), None, getattr(error, "field", None)


async def _json(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge:
        raise EndpointError(f"the body is longer than {LONGEST_BODY} bytes", status=413) from None
    except (ValueError, RecursionError) as error:
        raise EndpointError(f"the body is not JSON: {str(error)[:100]}") from None


def _card(session: Session) -> dict[str, Any]:
    name = "policy" if session.model == "*" else session.model
    return {"id": name, "object": "model", "created": 0, "owned_by": "slimectl"}


async def _stream(
    request: web.Request,
    session: Session,
    requests: Sequence[ChatRequest],
    new_writer: Callable[[AgentReply], EventWriter],
) -> web.StreamResponse:
    """Send answers while they are sampled. If the client disconnects, they are cancelled and not recorded."""
    streams = [AnswerStream(session.stream_interval) for _ in requests]
    answering = asyncio.ensure_future(session.answers(requests, streams))
    output = _StreamOutput(request, new_writer)
    try:
        await asyncio.gather(*(output.follow(stream, answering) for stream in streams))
        await output.finish(streams, await answering)
    except ConnectionError:
        raise
    except Exception as error:
        if not output.writers:
            raise
        session.counts["refused_requests"] += isinstance(error, (EndpointError, MessageError))
        await output.send(next(iter(output.writers.values())).fail(*_refusal(error)))
        if not isinstance(error, (EndpointError, MessageError, SlimectlError)) and not hasattr(error, "status"):
            raise  # a bug, which belongs in the log
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
    await output.response.write_eof()
    return output.response


class _StreamOutput:
    """The response to a streamed request.

    Nothing is sent before the first token, so that a refusal until then still has an HTTP status.
    """

    def __init__(self, request: web.Request, new_writer: Callable[[AgentReply], EventWriter]) -> None:
        self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        self.writers: dict[AnswerStream, EventWriter] = {}
        self._request, self._new_writer = request, new_writer
        self._sending = asyncio.Lock()

    async def follow(self, stream: AnswerStream, answering: asyncio.Future[Any]) -> None:
        """Send the new parts of one answer until all answers are complete."""
        async for parts in stream.readings(answering):
            assert stream.reply is not None
            writer = await self._begun(stream, stream.reply)
            await self.send(writer.add(parts, stream.call_ids))

    async def finish(self, streams: Sequence[AnswerStream], replies: Sequence[AgentReply]) -> None:
        """Send the rest and the end of every answer."""
        for stream, reply in zip(streams, replies, strict=True):
            writer = await self._begun(stream, reply)
            await self.send([*writer.add(stream.parts, stream.call_ids), *writer.end(reply)])
        await self.send(writer.close(replies))

    async def _begun(self, stream: AnswerStream, reply: AgentReply) -> EventWriter:
        """Return the writer of an answer, after sending the events before the first token."""
        if stream not in self.writers:
            self.writers[stream] = writer = self._new_writer(replace(reply, sampled=None))
            await self.send(writer.begin())
        return self.writers[stream]

    async def send(self, events: Iterable[Event]) -> None:
        """Send events in one packet. Raises ConnectionResetError if the client reads nothing."""
        async with self._sending:
            if not self.response.prepared:
                await self.response.prepare(self._request)
            lines = [(f"event: {name}\n" if name else "") + f"data: {data}\n\n" for name, data in events]
            if lines:
                await send_part(self.response, "".join(lines))


class SessionServer:
    """An endpoint on 127.0.0.1 whose sessions are opened by this process."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self.address = ""

    async def start(self) -> None:
        app = web.Application(client_max_size=LONGEST_BODY)
        endpoint, prefix = Endpoint(self._find), "/s/{session}"
        for method, path, handler in (*endpoint.routes(prefix), *endpoint.session_routes(prefix)):
            app.router.add_route(method, path, handler)
        # A client that disconnects cancels its handler, and its answer is not recorded.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.address = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @asynccontextmanager
    async def open(self, session: Session) -> AsyncIterator[str]:
        """Serve a session within the block, and yield its address, whose name is secret."""
        name = secrets.token_urlsafe(18)
        self._sessions[name] = session
        try:
            yield f"{self.address}/s/{name}"
        finally:
            session.is_closed = True
            del self._sessions[name]

    def _find(self, request: web.Request) -> Session:
        session = self._sessions.get(request.match_info["session"])
        if session is None:
            raise EndpointError("no such session, or it has ended", status=404, code="session_ended")
        return session

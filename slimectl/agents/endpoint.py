"""HTTP endpoint of the policy for agents: the APIs of OpenAI and Anthropic over recorded sessions.

A session is a path, `/s/NAME/v1/…`, whose name is secret where the endpoint drew it.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from slimectl.agents import anthropic_messages, openai_chat, openai_responses
from slimectl.agents.answer import Reply
from slimectl.agents.answer_stream import AnswerStream, Event, EventWriter
from slimectl.agents.chat_request import Body, ChatRequest, RequestRefused
from slimectl.agents.session import Session, reward_value
from slimectl.chats.messages import MessageError
from slimectl.errors import SlimectlError

LONGEST_BODY = 64 << 20
"""Bytes of a request."""
SEND_S = 60.0
"""Seconds that a client may read nothing of a stream."""

Route = tuple[str, str, Callable[[web.Request], Awaitable[web.StreamResponse]]]
"""Method, path and handler."""
FindSession = Callable[[web.Request], Session]
"""Returns the session of a request. Raises RequestRefused for an unknown one."""
ErrorBody = Callable[[int, str, str | None], dict[str, Any]]
"""Returns the body of an error: its status, message and OpenAI's code."""


@dataclass(frozen=True, slots=True)
class Api:
    """One way to ask: how its requests are read, and its responses, streams and errors written."""

    path: str
    read: Callable[[Any, Session], ChatRequest]
    body: Callable[[Reply], dict[str, Any]]
    writer: Callable[[Reply], EventWriter]
    error_body: ErrorBody = openai_chat.error_body


def _message_request(values: Any, session: Session) -> ChatRequest:
    return anthropic_messages.read_messages(values)


APIS = (
    Api(
        "/v1/chat/completions",
        lambda values, session: openai_chat.read_chat(values),
        openai_chat.chat_response,
        openai_chat.ChatEventWriter,
    ),
    Api(
        "/v1/completions",
        lambda values, session: openai_chat.read_completion(values),
        openai_chat.completion_response,
        openai_chat.CompletionEventWriter,
    ),
    Api(
        "/v1/responses",
        lambda values, session: openai_responses.read_response(values, session.history),
        openai_responses.response,
        openai_responses.ResponseEventWriter,
    ),
    Api(
        "/v1/messages",
        _message_request,
        anthropic_messages.response,
        anthropic_messages.MessageEventWriter,
        anthropic_messages.error_body,
    ),
)


class Endpoint:
    """Handlers of all routes; `find` names the session of a request."""

    def __init__(self, find: FindSession) -> None:
        self._find = find

    def routes(self, prefix: str = "") -> Iterator[Route]:
        """Yield the routes below a prefix, which may have variables for `find`."""
        for api in APIS:
            yield "POST", f"{prefix}{api.path}", partial(self._ask, api)
        yield "POST", f"{prefix}/v1/messages/count_tokens", self.count
        yield "GET", f"{prefix}/v1/models", self.models
        yield "POST", f"{prefix}/reward", self.reward

    async def _ask(self, api: Api, request: web.Request) -> web.StreamResponse:
        async def answer(session: Session) -> web.StreamResponse:
            chat = api.read(await _json(request), session)
            if chat.stream:
                return await _stream(request, session, chat, api.writer)
            return web.json_response(api.body(await session.answer(chat)))

        return await self._answer(request, answer, api.error_body)

    async def count(self, request: web.Request) -> web.StreamResponse:
        async def answer(session: Session) -> web.StreamResponse:
            tokens = session.count_tokens(_message_request(await _json(request), session))
            return web.json_response({"input_tokens": tokens})

        return await self._answer(request, answer, anthropic_messages.error_body)

    async def models(self, request: web.Request) -> web.StreamResponse:
        async def answer(session: Session) -> web.StreamResponse:
            name = "policy" if session.model == "*" else session.model
            return web.json_response(
                {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "slimectl"}]}
            )

        return await self._answer(request, answer)

    async def reward(self, request: web.Request) -> web.StreamResponse:
        async def answer(session: Session) -> web.StreamResponse:
            session.reward = reward_value(Body(await _json(request)).values.get("reward"))
            if session.reward is None:
                raise RequestRefused("reward: must be a finite number or an object")
            return web.json_response({"reward": session.reward})

        return await self._answer(request, answer)

    async def _answer(
        self,
        request: web.Request,
        answer: Callable[[Session], Any],
        error_body: ErrorBody = openai_chat.error_body,
    ) -> web.StreamResponse:
        """Answer a request; a refusal becomes an error body of its API."""
        session = None
        try:
            session = self._find(request)
            response: web.StreamResponse = await answer(session)
        except (RequestRefused, MessageError, SlimectlError) as error:
            if session is not None and not isinstance(error, SlimectlError):
                session.counts["refused_requests"] += 1
            status, message, code = _refusal(error)
            return web.json_response(error_body(status, message, code), status=status)
        return response


def _refusal(error: Exception) -> tuple[int, str, str | None]:
    """Return the status, message and code of an error of HTTP."""
    if isinstance(error, RequestRefused):
        return error.status, str(error), error.code
    return 400 if isinstance(error, MessageError) else int(getattr(error, "status", 500)), str(error), None


async def _json(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge:
        raise RequestRefused(f"the body is longer than {LONGEST_BODY} bytes", status=413) from None
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the body is not JSON: {str(error)[:100]}") from None


async def _stream(
    request: web.Request, session: Session, chat: ChatRequest, new_writer: Callable[[Reply], EventWriter]
) -> web.StreamResponse:
    """Send an answer while it is sampled; it ends, unrecorded, with a client that leaves.

    Nothing is sent before the first token: until then a refusal still has a status of HTTP.
    """
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    stream = AnswerStream(session.stream_interval)
    answering = asyncio.ensure_future(session.answer(chat, stream))
    writer: EventWriter | None = None
    try:
        async for parts in stream.readings(answering):
            if writer is None:
                assert stream.reply is not None
                writer = await _begin(request, response, new_writer(stream.reply))
            await _send(response, writer.add(parts, stream.call_ids))
        reply = await answering
        writer = writer or await _begin(request, response, new_writer(reply))
        await _send(response, writer.add(stream.parts, stream.call_ids))
        await _send(response, writer.end(reply))
    except ConnectionError:
        raise
    except Exception as error:
        if writer is None:
            raise
        session.counts["refused_requests"] += isinstance(error, RequestRefused)
        await _send(response, writer.fail(*_refusal(error)))
        if not isinstance(error, (RequestRefused, SlimectlError)) and not hasattr(error, "status"):
            raise  # a defect: it belongs into the log
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
    await response.write_eof()
    return response


async def _begin(request: web.Request, response: web.StreamResponse, writer: EventWriter) -> EventWriter:
    await response.prepare(request)
    await _send(response, writer.begin())
    return writer


async def _send(response: web.StreamResponse, events: Iterable[Event]) -> None:
    """Send events in one packet. Raises ConnectionResetError if the client reads nothing."""
    lines = [(f"event: {name}\n" if name else "") + f"data: {data}\n\n" for name, data in events]
    if not lines:
        return
    try:
        async with asyncio.timeout(SEND_S):
            await response.write("".join(lines).encode())
    except TimeoutError:
        raise ConnectionResetError(f"the client has read nothing for {SEND_S:.0f} s") from None


class SessionServer:
    """An endpoint on 127.0.0.1 whose sessions are opened from within this process."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self.address = ""

    async def start(self) -> None:
        app = web.Application(client_max_size=LONGEST_BODY)
        for method, path, handler in Endpoint(self._find).routes("/s/{session}"):
            app.router.add_route(method, path, handler)
        # A client that disconnects cancels its handler, and its answer ends unrecorded.
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
        """Serve a session within the block, under the address that is given; its name is secret."""
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
            raise RequestRefused("no such session, or it has ended", status=404, code="session_ended")
        return session

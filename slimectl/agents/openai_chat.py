"""OpenAI's chat completions and completions: requests, responses and chunk streams."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from slimectl.agents.answer import AgentAnswer, AgentReply
from slimectl.agents.answer_stream import Event, EventWriter
from slimectl.agents.chat_request import MOST_RESPONSES
from slimectl.chats import requests
from slimectl.chats.requests import ChatRequest, RequestBody
from slimectl.data.answers import ParsedAnswer
from slimectl.data.chat_responses import (
    CHAT,
    COMPLETION,
    OPENING,
    ApiKind,
    assistant_message,
    finish_reason,
    message_delta,
    token_usage,
)
from slimectl.data.token_log_probs import TokenLogProb, chat_scores, completion_log_probs
from slimectl.data.tool_calls import ToolCall


def read_chat(values: Any) -> ChatRequest:
    """Read the body of /chat/completions. Raises MessageError."""
    body = RequestBody.of(values)
    request = requests.read_chat(body)
    _check_continuation(body, is_continued=request.messages[-1]["role"] == "assistant")
    return request


def _check_continuation(body: RequestBody, *, is_continued: bool) -> None:
    """Raise MessageError unless the request agrees with the server, which continues a last assistant message."""
    for name, expected in (("continue_final_message", is_continued), ("add_generation_prompt", not is_continued)):
        if body.flag(name, expected) != expected:
            reason = f"must be {str(expected).lower()}, because a last assistant message is always continued"
            raise body.refuse(name, reason)


def read_completions(values: Any) -> list[ChatRequest]:
    """Read the body of /completions. Raises MessageError."""
    return requests.read_completions(RequestBody.of(values), most=MOST_RESPONSES)


def chat_response(replies: Sequence[AgentReply]) -> dict[str, Any]:
    """Return the body of a response to a chat."""
    choices = [
        _choice(reply, {"message": assistant_message(reply.answer.parts, reply.answer.call_ids)}, _chat_end(reply))
        for reply in replies
    ]
    return {**_frame(replies[0], CHAT, choices, complete=True), "usage": usage(replies)}


def completion_response(replies: Sequence[AgentReply]) -> dict[str, Any]:
    """Return the body of a response to a completion."""
    choices = [
        _choice(reply, {"text": reply.echo + reply.answer.completion.text},
                _completion_end(reply, [*reply.echo_log_probs, *reply.answer.log_probs]))
        for reply in replies
    ]  # fmt: skip
    return {**_frame(replies[0], COMPLETION, choices, complete=True), "usage": usage(replies)}


def _choice(reply: AgentReply, content: Mapping[str, Any], end: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": reply.request.index, **content, **end}


def _chat_end(reply: AgentReply) -> dict[str, Any]:
    """Return how a response to a chat ended, with the log-probabilities of all tokens if requested."""
    vocabulary = reply.vocabulary
    scores = chat_scores(reply.answer.log_probs, vocabulary, name=vocabulary.text) if reply.request.log_probs else None
    return {**_end(reply.answer), "logprobs": scores}


def _completion_end(reply: AgentReply, scores: Sequence[TokenLogProb], *, offset: int = 0) -> dict[str, Any]:
    shown = reply.request.log_probs and scores
    log_probs = completion_log_probs(scores, reply.vocabulary, offset=offset, name=reply.vocabulary.text)
    end = RUNNING if reply.sampled is None else _end(reply.sampled)
    return {**end, "logprobs": log_probs if shown else None}


RUNNING = MappingProxyType({"finish_reason": None, "logprobs": None})
"""End of a choice in a chunk that is not the last one."""


class ChunkWriter(EventWriter):
    """Writes the chunks of a stream. The last chunk of a response has its finish reason.

    An engine reports tokens before their log-probabilities. A stream with log-probabilities therefore has the whole
    response in its last chunk.
    """

    kind: ApiKind

    def add(self, parts: ParsedAnswer, ids: Sequence[str]) -> Iterator[Event]:
        if not self.reply.request.log_probs:
            yield from super().add(parts, ids)

    def close(self, replies: Sequence[AgentReply]) -> Iterator[Event]:
        if self.reply.request.stream_usage:
            yield None, json.dumps({**_frame(self.reply, self.kind, [], complete=False), "usage": usage(replies)})
        yield None, "[DONE]"

    def fail(self, status: int, message: str, code: str | None, param: str | None = None) -> Iterator[Event]:
        yield None, json.dumps(error_body(status, message, code, param))

    def _chunk(self, content: Mapping[str, Any], end: Mapping[str, Any] = RUNNING) -> Event:
        return None, json.dumps(_frame(self.reply, self.kind, [_choice(self.reply, content, end)], complete=False))


class ChatEventWriter(ChunkWriter):
    """Writes the chunks of a streamed chat: its role, its parts, each call as a whole, its end."""

    kind = CHAT
    _call_count = 0

    def begin(self) -> Iterator[Event]:
        yield self._chunk({"delta": OPENING})

    def _new_parts(
        self, reasoning: str | None, content: str, calls: Sequence[ToolCall], ids: Sequence[str]
    ) -> Iterator[Event]:
        if delta := message_delta(reasoning, content, calls, ids, first_call=self._call_count):
            yield self._chunk({"delta": delta})
            self._call_count += len(calls)

    def end(self, reply: AgentReply) -> Iterator[Event]:
        delta: dict[str, Any] = {}
        if reply.request.log_probs:
            parts, ids = reply.answer.parts, reply.answer.call_ids
            yield from self._new_parts(None, "", parts.tool_calls, ids)
            delta = message_delta(parts.reasoning, parts.content, (), (), first_call=0)
        yield self._chunk({"delta": delta}, _chat_end(reply))


class CompletionEventWriter(ChunkWriter):
    """Writes the chunks of a streamed completion."""

    kind = COMPLETION

    def begin(self) -> Iterator[Event]:
        if self.reply.echo:
            yield self._chunk({"text": self.reply.echo}, _completion_end(self.reply, self.reply.echo_log_probs))

    def _new_parts(
        self, reasoning: str | None, content: str, calls: Sequence[ToolCall], ids: Sequence[str]
    ) -> Iterator[Event]:
        if content:
            yield self._chunk({"text": content})

    def end(self, reply: AgentReply) -> Iterator[Event]:
        text = reply.answer.completion.text if reply.request.log_probs else ""
        yield self._chunk({"text": text}, _completion_end(reply, reply.answer.log_probs, offset=len(reply.echo)))


def error_body(status: int, message: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error response."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _end(answer: AgentAnswer) -> dict[str, Any]:
    reason = finish_reason(answer.parts, is_cut=answer.is_cut)
    return {"finish_reason": reason, "matched_stop": answer.matched}


def _frame(reply: AgentReply, kind: ApiKind, choices: list[dict[str, Any]], *, complete: bool) -> dict[str, Any]:
    return kind.frame(reply.identity, reply.created, reply.model, choices, complete=complete)


def usage(replies: Sequence[AgentReply]) -> dict[str, Any]:
    """Count tokens. A prompt with several responses counts once."""
    prompts = replies[:: replies[0].request.n]
    return token_usage(
        sum(reply.prompt_tokens for reply in prompts),
        sum(reply.completion_tokens for reply in replies),
        sum(reply.cached_tokens for reply in prompts),
    )

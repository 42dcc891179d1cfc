"""OpenAI's chat completions and completions: requests, responses, and streams of chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from slimectl.agents.answer import Answer, Reply
from slimectl.agents.answer_stream import Event, EventWriter
from slimectl.agents.chat_request import (
    Body,
    ChatRequest,
    RequestRefused,
    schema_text,
)
from slimectl.chats.messages import checked_text, normalized_chat
from slimectl.data.chat_responses import (
    CHAT,
    COMPLETION,
    OPENING,
    ApiKind,
    assistant_message,
    chat_log_probs,
    finish_reason,
    message_delta,
    token_log_prob,
    token_usage,
)
from slimectl.data.tool_calls import ToolCall


def read_chat(values: Any) -> ChatRequest:
    """Read the body of /chat/completions. Raises RequestRefused."""
    body = Body(values)
    choice = body.get("tool_choice", str, dict, default="auto")
    tools = [] if choice == "none" else body.objects("tools")
    return ChatRequest(
        refuse_empty(normalized_chat(body.objects("messages"))),
        tools,
        **_shared(body),
        max_tokens=body.positive("max_completion_tokens", "max_tokens"),
        forced_tool=forced_tool(choice, tools),
        json_schema=schema_text(body.get("response_format", dict, default={}), "response_format"),
        template_kwargs=body.get("chat_template_kwargs", dict, default={}),
    )


def read_completion(values: Any) -> ChatRequest:
    """Read the body of /completions: one prompt, as a text or as token ids. Raises RequestRefused."""
    body = Body(values)
    prompt = body.get("prompt", str, list, default="")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        [prompt] = prompt
    if not prompt or (isinstance(prompt, list) and not all(type(token) is int and token >= 0 for token in prompt)):
        raise RequestRefused("prompt: must be one text or one list of token ids")
    if isinstance(prompt, str):
        checked_text(prompt, "prompt")
    return ChatRequest(prompt=prompt, max_tokens=body.positive("max_tokens") or 16, **_shared(body))


def forced_tool(choice: str | dict[str, Any], tools: Sequence[Any]) -> str | None:
    """Return the name of the tool that has to be called, "" for any; None where the policy decides."""
    if not tools or choice in ("auto", "none"):
        return None
    function = choice.get("function", choice) if isinstance(choice, dict) else {}
    return str(function.get("name") or "") if isinstance(function, dict) else ""


def _shared(body: Body) -> dict[str, Any]:
    n = body.positive("n") or 1
    stream = body.get("stream", bool, default=False)
    if n > 16 or (n > 1 and stream):
        raise RequestRefused("n: at most 16 answers, and one in a stream")
    log_probs = bool(body.get("logprobs", bool, int, default=False))
    seed = body.get("seed", int)
    return {
        **body.sampling(),
        "stop": body.texts("stop"),
        "n": n,
        "stream": stream,
        "log_probs": log_probs,
        "seed": seed,
    }


def refuse_empty(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages that the policy can answer, or continue if the last one is the assistant's.

    Raises RequestRefused.
    """
    if not messages:
        raise RequestRefused("messages: is missing or empty")
    return messages


def chat_response(reply: Reply) -> dict[str, Any]:
    """Return the body of a response to a chat."""
    choices = [
        {
            "index": i,
            "message": assistant_message(answer.parts, answer.call_ids),
            "finish_reason": _finish(answer),
            **_log_probs(reply, answer),
        }
        for i, answer in enumerate(reply.answers)
    ]
    return {**_frame(reply, CHAT, choices, complete=True), "usage": usage(reply)}


def completion_response(reply: Reply) -> dict[str, Any]:
    """Return the body of a response to a completion."""
    choices = [
        {"index": i, "text": answer.completion.text, "finish_reason": _finish(answer), "logprobs": None}
        for i, answer in enumerate(reply.answers)
    ]
    return {**_frame(reply, COMPLETION, choices, complete=True), "usage": usage(reply)}


class ChatEventWriter(EventWriter):
    """Writes the chunks of a streamed chat: its role, its parts, each call as a whole, its end with the usage."""

    def begin(self) -> Iterator[Event]:
        yield self._chunk(OPENING)

    def _new_parts(
        self, reasoning: str | None, content: str, calls: Sequence[ToolCall], ids: Sequence[str]
    ) -> Iterator[Event]:
        if delta := message_delta(reasoning, content, calls, ids, first_call=self._call_count):
            yield self._chunk(delta)
            self._call_count += len(calls)

    def end(self, reply: Reply) -> Iterator[Event]:
        [answer] = reply.answers
        end = {"finish_reason": _finish(answer), **_log_probs(reply, answer)}
        yield self._chunk({}, end, usage=usage(reply))
        yield None, "[DONE]"

    def fail(self, status: int, message: str, code: str | None) -> Iterator[Event]:
        yield None, json.dumps(error_body(status, message, code))

    _call_count = 0

    def _chunk(
        self, delta: dict[str, Any], end: Mapping[str, Any] = MappingProxyType({"finish_reason": None}), **values: Any
    ) -> Event:
        choice = {"index": 0, "delta": delta, **end}
        return None, json.dumps({**_frame(self.reply, CHAT, [choice], complete=False), **values})


class CompletionEventWriter(EventWriter):
    """Writes the chunks of a streamed completion."""

    def _new_parts(
        self, reasoning: str | None, content: str, calls: Sequence[ToolCall], ids: Sequence[str]
    ) -> Iterator[Event]:
        if content:
            yield self._chunk(content, None)

    def end(self, reply: Reply) -> Iterator[Event]:
        yield self._chunk("", _finish(reply.answers[0]), usage=usage(reply))
        yield None, "[DONE]"

    def fail(self, status: int, message: str, code: str | None) -> Iterator[Event]:
        yield None, json.dumps(error_body(status, message, code))

    def _chunk(self, text: str, finish: str | None, **values: Any) -> Event:
        choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}
        return None, json.dumps({**_frame(self.reply, COMPLETION, [choice], complete=False), **values})


def error_body(status: int, message: str, code: str | None) -> dict[str, Any]:
    """Return the body of an error response."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _finish(answer: Answer) -> str:
    return finish_reason(answer.parts, is_cut=answer.is_cut)


def _log_probs(reply: Reply, answer: Answer) -> dict[str, Any]:
    """Return the log-probabilities of a chat's answer where they were asked for; tokens are named by their ids."""
    if not reply.request.log_probs:
        return {"logprobs": None}
    scored = zip(answer.completion.tokens, answer.completion.log_probs, strict=True)
    entries = [token_log_prob(f"token_id:{token}", log_prob, None) for token, log_prob in scored]
    return {"logprobs": chat_log_probs([(entry, []) for entry in entries])}


def _frame(reply: Reply, kind: ApiKind, choices: list[dict[str, Any]], *, complete: bool) -> dict[str, Any]:
    return kind.frame(reply.identity, reply.created, reply.model, choices, complete=complete)


def usage(reply: Reply) -> dict[str, Any]:
    return token_usage(reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens)

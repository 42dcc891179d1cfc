"""OpenAI's Responses API: requests, responses and event streams."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, compress
from typing import Any

from slimectl.agents.answer import AgentAnswer, AgentReply
from slimectl.agents.answer_stream import BlockEventWriter, Event
from slimectl.agents.request_keys import INCLUDES
from slimectl.chats.messages import REASONING, MessageError, function_call, plain_text
from slimectl.chats.request_keys import names
from slimectl.chats.requests import (
    MOST_TOP,
    ChatRequest,
    RequestBody,
    forced_tool,
    read_schema,
    refuse_empty,
    shared_fields,
)
from slimectl.data.token_log_probs import chat_scores
from slimectl.data.tool_calls import ToolCall

TEXT_EVENTS = {"reasoning": "reasoning_text", "text": "output_text"}
"""Event names for the text of each kind of block."""
LOG_PROBS = "message.output_text.logprobs"
"""Value of `include` that requests the log-probabilities of the text."""
ECHOED = names(
    "instructions tools tool_choice parallel_tool_calls max_output_tokens previous_response_id text metadata "
    "top_logprobs"
)
History = Callable[[str], list[dict[str, Any]]]
"""Returns the messages up to and including the response with this id. Raises EndpointError if it is unknown."""


def read_response(values: Any, history: History) -> ChatRequest:
    """Read the body of /responses. Raises MessageError, and EndpointError for an unknown earlier response."""
    body = RequestBody.of(values)
    choice = body.raw("tool_choice")
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.objects("tools") or [])]
    log_probs, top = _log_probs(body)
    messages: list[dict[str, Any]] = []
    if instructions := body.text("instructions"):
        messages.append({"role": "system", "content": instructions})
    if previous := body.text("previous_response_id"):
        earlier = history(previous)
        messages += earlier[1:] if messages and earlier and earlier[0]["role"] == "system" else earlier
    is_text = isinstance(body.raw("input"), str)
    items = [{"role": "user", "content": body.text("input")}] if is_text else body.objects("input") or []
    messages += _messages(items)
    return ChatRequest(
        refuse_empty(messages, "input"),
        [] if choice == "none" else tools,
        **shared_fields(body),
        max_tokens=body.count("max_output_tokens"),
        log_probs=log_probs,
        top_log_probs=top,
        single_call=not body.flag("parallel_tool_calls", True),
        echoed={name: values[name] for name in ECHOED if values.get(name) is not None},
        forced_tool=forced_tool(choice, tools),
        json_schema=read_schema(body.inner("text").inner("format"), is_nested=False),
    )


def _log_probs(body: RequestBody) -> tuple[bool, int]:
    """Return whether to send log-probabilities, and for how many of the likeliest tokens. Raises MessageError."""
    included = body.texts("include", max_count=1024)
    if unknown := sorted({*included} - INCLUDES):
        raise body.refuse("include", f"{unknown[0]!r} is not available here. Use {', '.join(sorted(INCLUDES))}.")
    top = body.whole("top_logprobs", 0, high=MOST_TOP)
    if top and LOG_PROBS not in included:
        raise body.refuse("top_logprobs", f"needs {LOG_PROBS!r} in include")
    return LOG_PROBS in included, top


def _tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise MessageError(at, f"is a tool of type {tool.get('type')!r}. Only functions of the client are supported.")
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages for a chat template. Consecutive texts and calls of the assistant form one message."""
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        at = f"input[{i}]"
        kind = item.get("type") or "message"
        if kind == "message":
            if not isinstance(item.get("role"), str):
                raise MessageError(f"{at}.role", "is not a string")
            _append(messages, {"role": item["role"], "content": plain_text(item.get("content"), f"{at}.content")})
        elif kind == "function_call":
            call = function_call(item.get("name"), item.get("arguments"), item.get("call_id"))
            _append(messages, {"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            output = plain_text(item.get("output"), f"{at}.output")
            messages.append({"role": "tool", "content": output, "tool_call_id": str(item.get("call_id") or "")})
        elif kind == "reasoning":
            if thought := plain_text(item.get("content"), f"{at}.content"):
                _append(messages, {"role": "assistant", "content": "", REASONING: thought})
        else:
            raise MessageError(at, f"items of type {kind!r} are not supported")
    return messages


def _append(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Append a message. An assistant message is merged into a preceding one."""
    last = messages[-1] if messages else None
    if last is None or message["role"] != "assistant" or last["role"] != "assistant":
        messages.append(message)
        return
    merged = {**last, **message, "content": last["content"] + message["content"]}
    if calls := [*last.get("tool_calls", []), *message.get("tool_calls", [])]:
        merged["tool_calls"] = calls
    messages[-1] = merged


def response(replies: Sequence[AgentReply]) -> dict[str, Any]:
    """Return the body of a response."""
    [reply] = replies
    answer = reply.answer
    return _opening(reply) | {
        "status": "incomplete" if answer.is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if answer.is_cut else None,
        "output": _items(reply, answer),
        "usage": {
            "input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens,
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }  # fmt: skip


def _opening(reply: AgentReply) -> dict[str, Any]:
    """Return a response that is in progress."""
    return {
        "id": f"resp_{reply.identity}", "object": "response", "created_at": reply.created, "model": reply.model,
        "status": "in_progress", "incomplete_details": None,
        "error": None, "instructions": None, "metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto",
        "tools": [], "temperature": reply.request.sampling.get("temperature"),
        "top_p": reply.request.sampling.get("top_p"), **reply.request.echoed, "output": [], "usage": None,
    }  # fmt: skip


def _items(reply: AgentReply, answer: AgentAnswer) -> list[dict[str, Any]]:
    """Return the items of an answer: its reasoning, its text, its calls."""
    parts, items = answer.parts, list[dict[str, Any]]()
    if parts.reasoning is not None:
        items.append(_text_item(reply, "reasoning", parts.reasoning))
    if parts.content or not parts.tool_calls:
        items.append(_text_item(reply, "text", parts.content))
    calls = zip(parts.tool_calls, answer.call_ids, strict=True)
    return items + [_call_item(reply, number, call, call_id) for number, (call, call_id) in enumerate(calls)]


def _text_item(reply: AgentReply, kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        content = [{"type": "reasoning_text", "text": text}]
        return {"type": "reasoning", "id": f"rs_{reply.identity}", "summary": [], "content": content}
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": _text_log_probs(reply, text)}
    return {"type": "message", "id": f"msg_{reply.identity}", "status": "completed", "role": "assistant",
            "content": [part]}  # fmt: skip


def _text_log_probs(reply: AgentReply, text: str) -> list[dict[str, Any]]:
    """Return the log-probabilities of the tokens of a text that is a part of the answer."""
    if not text or reply.sampled is None or not reply.request.log_probs:
        return []
    vocabulary, scores = reply.vocabulary, reply.sampled.log_probs
    pieces = [vocabulary.of(score.token) for score in scores]
    ends = list(accumulate(map(len, pieces)))
    start = b"".join(pieces).rfind(text.encode())
    is_inside = [start < end and end - len(piece) < start + len(text.encode())
                 for piece, end in zip(pieces, ends, strict=True)]  # fmt: skip
    of_text = scores if start < 0 else list(compress(scores, is_inside))
    entries: list[dict[str, Any]] = chat_scores(of_text, vocabulary, name=vocabulary.text)["content"]
    return entries


def _call_item(reply: AgentReply, number: int, call: ToolCall, call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "id": f"fc_{reply.identity}{number}", "call_id": call_id, "name": call.name,
            "arguments": call.arguments, "status": "completed"}  # fmt: skip


class ResponseEventWriter(BlockEventWriter):
    """Writes the numbered events of a streamed response."""

    _number = 0

    def begin(self) -> Iterator[Event]:
        yield self._event("response.created", response=_opening(self.reply))
        yield self._event("response.in_progress", response=_opening(self.reply))

    def _open(self, kind: str) -> Iterator[Event]:
        item = _text_item(self.reply, kind, "")
        [part] = item["content"]
        in_progress = {"status": "in_progress"} if "status" in item else {}
        yield self._item_event("added", item | in_progress | {"content": []})
        yield self._event("response.content_part.added", **self._place(item), part=part)

    def _grow(self, kind: str, text: str) -> Iterator[Event]:
        item = _text_item(self.reply, kind, "")
        log_probs: dict[str, Any] = {"logprobs": []} if kind == "text" else {}
        yield self._event(f"response.{TEXT_EVENTS[kind]}.delta", **self._place(item), delta=text, **log_probs)

    def _close(self, kind: str, text: str) -> Iterator[Event]:
        item = _text_item(self.reply, kind, text)
        [part] = item["content"]
        log_probs = {"logprobs": part["logprobs"]} if kind == "text" else {}
        yield self._event(f"response.{TEXT_EVENTS[kind]}.done", **self._place(item), text=text, **log_probs)
        yield self._event("response.content_part.done", **self._place(item), part=part)
        yield self._item_event("done", item)

    def _call(self, number: int, call: ToolCall, call_id: str) -> Iterator[Event]:
        item = _call_item(self.reply, number, call, call_id)
        at = {"output_index": self._index, "item_id": item["id"]}
        yield self._item_event("added", item | {"status": "in_progress", "arguments": ""})
        yield self._event("response.function_call_arguments.delta", **at, delta=call.arguments)
        yield self._event("response.function_call_arguments.done", **at, name=call.name, arguments=call.arguments)
        yield self._item_event("done", item)

    def _end(self, reply: AgentReply) -> Iterator[Event]:
        result = response([reply])
        yield self._event(f"response.{result['status']}", response=result)

    def fail(self, status: int, message: str, code: str | None, param: str | None = None) -> Iterator[Event]:
        yield self._event("error", code=code, message=message, param=param)

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"output_index": self._index, "item_id": item["id"], "content_index": 0}

    def _item_event(self, change: str, item: dict[str, Any]) -> Event:
        return self._event(f"response.output_item.{change}", output_index=self._index, item=item)

    def _event(self, name: str, /, **values: Any) -> Event:
        data = json.dumps({"type": name, "sequence_number": self._number, **values})
        self._number += 1
        return name, data

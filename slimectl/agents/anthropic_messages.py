"""Anthropic's Messages API: requests, responses and event streams."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from slimectl.agents.answer import AgentAnswer, AgentReply
from slimectl.agents.answer_stream import BlockEventWriter, Event
from slimectl.chats.messages import REASONING, MessageError, function_call, plain_text
from slimectl.chats.requests import (
    ChatRequest,
    RequestBody,
    forced_tool,
    read_schema,
    refuse_empty,
    shared_fields,
    stop_strings,
)
from slimectl.data.tool_calls import ToolCall

BLOCK_TYPES = {"reasoning": "thinking", "text": "text"}
"""Type and text field of each kind of block in an answer."""


def read_messages(values: Any) -> ChatRequest:
    """Read the body of /messages. Raises MessageError."""
    body = RequestBody.of(values)
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.objects("tools") or [])]
    choice = body.inner("tool_choice")
    kind = choice.choice("type", "auto", ("auto", "any", "tool", "none"))
    named = {"type": "function", "name": choice.raw("name")}
    messages: list[dict[str, Any]] = []
    if system := plain_text(body.raw("system"), "system"):
        messages.append({"role": "system", "content": system})
    for i, message in enumerate(body.objects("messages") or []):
        messages += _messages(message, f"messages[{i}]")
    return ChatRequest(
        refuse_empty(messages),
        [] if kind == "none" else tools,
        **shared_fields(body),
        stop=stop_strings(body, "stop_sequences"),
        max_tokens=body.count("max_tokens"),
        single_call=choice.flag("disable_parallel_tool_use"),
        forced_tool=forced_tool({"any": "required", "tool": named}.get(kind), tools),
        json_schema=read_schema(body.inner("output_config").inner("format"), is_nested=False),
    )


def _tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    """Return a tool in OpenAI's form, which chat templates expect."""
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
        raise MessageError(at, "is not a client tool with name and input_schema")
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _messages(message: dict[str, Any], at: str) -> Iterator[dict[str, Any]]:
    """Convert one of Anthropic's messages to messages for a chat template. Each tool result becomes its own message."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise MessageError(f"{at}.role", f"must be user or assistant, not {role!r}")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise MessageError(f"{at}.content", "is neither a string nor a list of blocks")
    calls, texts, thoughts = [], [], []
    for i, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "tool_result":
            result = plain_text(block.get("content"), f"{at}.content[{i}].content")
            yield {"role": "tool", "content": result, "tool_call_id": str(block.get("tool_use_id") or "")}
        elif kind == "tool_use":
            calls.append(function_call(block.get("name"), block.get("input"), block.get("id")))
        elif kind == "thinking":
            thoughts.append(plain_text(block.get("thinking"), f"{at}.content[{i}].thinking"))
        elif kind != "redacted_thinking":
            texts.append(plain_text([block], f"{at}.content[{i}]"))
    text = "".join(texts)
    if text or calls or not blocks:
        reasoning = {REASONING: thought} if (thought := "".join(thoughts)) else {}
        yield {"role": role, "content": text, **reasoning, **({"tool_calls": calls} if calls else {})}


def response(replies: Sequence[AgentReply]) -> dict[str, Any]:
    """Return the body of a response."""
    [reply] = replies
    return _opening(reply) | {"content": _blocks(reply.answer), **_end(reply.answer)}


def _opening(reply: AgentReply) -> dict[str, Any]:
    """Return a message without content."""
    return {
        "id": f"msg_{reply.identity}", "type": "message", "role": "assistant", "model": reply.model,
        "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(reply),
    }  # fmt: skip


def _usage(reply: AgentReply) -> dict[str, int]:
    return {
        "input_tokens": reply.prompt_tokens - reply.cached_tokens,
        "cache_read_input_tokens": reply.cached_tokens,
        "output_tokens": reply.completion_tokens,
    }


def _blocks(answer: AgentAnswer) -> list[dict[str, Any]]:
    parts = answer.parts
    blocks: list[dict[str, Any]] = []
    if parts.reasoning is not None:
        blocks.append(_text_block("reasoning", parts.reasoning))
    if parts.content or not parts.tool_calls:
        blocks.append(_text_block("text", parts.content))
    return blocks + list(map(_call_block, parts.tool_calls, answer.call_ids))


def _text_block(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _call_block(call: ToolCall, call_id: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": call.name, "input": json.loads(call.arguments)}


def _end(answer: AgentAnswer) -> dict[str, Any]:
    reason = "max_tokens" if answer.is_cut else "tool_use" if answer.parts.tool_calls else "end_turn"
    reason = "stop_sequence" if answer.stop is not None and reason == "end_turn" else reason
    return {"stop_reason": reason, "stop_sequence": answer.stop}


class MessageEventWriter(BlockEventWriter):
    """Writes the events of a streamed message."""

    def begin(self) -> Iterator[Event]:
        yield _event("message_start", message=_opening(self.reply))

    def _open(self, kind: str) -> Iterator[Event]:
        yield _event("content_block_start", index=self._index, content_block=_text_block(kind, ""))

    def _grow(self, kind: str, text: str) -> Iterator[Event]:
        name = BLOCK_TYPES[kind]
        yield _event("content_block_delta", index=self._index, delta={"type": f"{name}_delta", name: text})

    def _close(self, kind: str, text: str) -> Iterator[Event]:
        yield _event("content_block_stop", index=self._index)

    def _call(self, number: int, call: ToolCall, call_id: str) -> Iterator[Event]:
        block = _call_block(call, call_id)
        delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield _event("content_block_start", index=self._index, content_block={**block, "input": {}})
        yield _event("content_block_delta", index=self._index, delta=delta)
        yield _event("content_block_stop", index=self._index)

    def _end(self, reply: AgentReply) -> Iterator[Event]:
        yield _event("message_delta", delta=_end(reply.answer), usage=_usage(reply))
        yield _event("message_stop")

    def fail(self, status: int, message: str, code: str | None, param: str | None = None) -> Iterator[Event]:
        yield "error", json.dumps(error_body(status, message, code))


def _event(name: str, /, **values: Any) -> Event:
    return name, json.dumps({"type": name, **values})


def error_body(status: int, message: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error response. This API has no field for `param`."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 413: "request_too_large"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}

"""Anthropic's Messages: requests, responses, and streams of events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from slimectl.agents.answer import Answer, Reply
from slimectl.agents.chat_request import (
    Body,
    ChatRequest,
    RequestRefused,
    schema_text,
)
from slimectl.agents.openai_chat import refuse_empty
from slimectl.data.chat_messages import function_call, plain_text


def read_messages(values: Any) -> ChatRequest:
    """Read the body of /messages. Raises RequestRefused."""
    body = Body(values)
    choice = body.get("tool_choice", dict, default={})
    tools = (
        []
        if choice.get("type") == "none"
        else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.objects("tools"))]
    )
    messages: list[dict[str, Any]] = []
    if system := plain_text(body.values.get("system"), "system"):
        messages.append({"role": "system", "content": system})
    for i, message in enumerate(body.objects("messages")):
        messages += _messages(message, f"messages[{i}]")
    return ChatRequest(
        refuse_empty(messages),
        tools,
        **body.sampling(),
        stop=body.texts("stop_sequences"),
        max_tokens=body.positive("max_tokens"),
        stream=body.get("stream", bool, default=False),
        forced_tool=str(choice.get("name") or "") if tools and choice.get("type") in ("any", "tool") else None,
        json_schema=schema_text(
            Body(body.get("output_config", dict, default={})).get("format", dict, default={}), "output_config.format"
        ),
    )


def _tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    """Return a tool in OpenAI's form, which chat templates take."""
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
        raise RequestRefused(f"{at}: is no tool of the client's, with name and input_schema")
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _messages(message: dict[str, Any], at: str) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat template that one of Anthropic's is: each tool's result is one of its own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestRefused(f"{at}.role: must be user or assistant, not {role!r}")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise RequestRefused(f"{at}.content: is neither a text nor a list of blocks")
    calls = []
    texts = []
    for i, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "tool_result":
            result = plain_text(block.get("content"), f"{at}.content[{i}].content")
            yield {"role": "tool", "content": result, "tool_call_id": str(block.get("tool_use_id") or "")}
        elif kind == "tool_use":
            calls.append(function_call(block.get("name"), block.get("input"), block.get("id")))
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(plain_text([block], f"{at}.content[{i}]"))
    text = "".join(texts)
    if text or calls or not blocks:
        yield {"role": role, "content": text, **({"tool_calls": calls} if calls else {})}


def response(reply: Reply) -> dict[str, Any]:
    """Return the body of a response."""
    [answer] = reply.answers
    return {
        "id": f"msg_{reply.identity}", "type": "message", "role": "assistant", "model": reply.model,
        "content": _blocks(answer), "stop_reason": _stop_reason(answer), "stop_sequence": None,
        "usage": {
            "input_tokens": reply.prompt_tokens - reply.cached_tokens, "cache_read_input_tokens": reply.cached_tokens,
            "output_tokens": reply.completion_tokens,
        },
    }  # fmt: skip


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    parts = answer.parts
    blocks: list[dict[str, Any]] = []
    if parts.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": parts.reasoning, "signature": ""})
    if parts.content or not parts.tool_calls:
        blocks.append({"type": "text", "text": parts.content})
    for call, call_id in zip(parts.tool_calls, answer.call_ids, strict=True):
        blocks.append({"type": "tool_use", "id": call_id, "name": call.name, "input": json.loads(call.arguments)})
    return blocks


def _stop_reason(answer: Answer) -> str:
    return "max_tokens" if answer.is_cut else "tool_use" if answer.parts.tool_calls else "end_turn"


def events(reply: Reply) -> Iterator[tuple[str, str]]:
    """Yield the name and the data of each event of a stream."""
    message = response(reply)
    blocks, stop_reason = message["content"], message["stop_reason"]
    message |= {"content": [], "stop_reason": None, "usage": {**message["usage"], "output_tokens": 0}}
    yield _event("message_start", message=message)
    for i, block in enumerate(blocks):
        empty, delta = _opening(block)
        yield _event("content_block_start", index=i, content_block=empty)
        yield _event("content_block_delta", index=i, delta=delta)
        yield _event("content_block_stop", index=i)
    end = {"stop_reason": stop_reason, "stop_sequence": None}
    yield _event("message_delta", delta=end, usage={"output_tokens": reply.completion_tokens})
    yield _event("message_stop")


def _opening(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a block without its content, and the delta that brings it."""
    if block["type"] == "tool_use":
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    name = "thinking" if block["type"] == "thinking" else "text"
    return {**block, name: ""}, {"type": f"{name}_delta", name: block[name]}


def _event(name: str, **values: Any) -> tuple[str, str]:
    return name, json.dumps({"type": name, **values})


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return the body of an error response."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 413: "request_too_large"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}

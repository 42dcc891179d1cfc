"""OpenAI's Responses: requests, responses, and streams of events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from slimectl.agents.answer import Answer, Reply
from slimectl.agents.chat_request import (
    Body,
    ChatRequest,
    RequestRefused,
    schema_text,
)
from slimectl.agents.openai_chat import forced_tool, refuse_empty
from slimectl.data.chat_messages import checked_text, function_call, plain_text

TEXTS = ("input_text", "output_text", "text", "refusal")

History = Callable[[str], list[dict[str, Any]]]
"""Returns the messages up to a response of this id, the answer included. Raises RequestRefused for an unknown one."""


def read_response(values: Any, history: History) -> ChatRequest:
    """Read the body of /responses. Raises RequestRefused."""
    body = Body(values)
    choice = body.get("tool_choice", str, dict, default="auto")
    tools = [] if choice == "none" else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.objects("tools"))]
    messages: list[dict[str, Any]] = []
    previous = body.get("previous_response_id", str)
    if instructions := body.get("instructions", str):
        messages.append({"role": "system", "content": checked_text(instructions, "instructions")})
    if previous:
        earlier = history(previous)
        messages += earlier[1:] if messages and earlier and earlier[0]["role"] == "system" else earlier
    items = body.get("input", str, list, default=[])
    messages += _messages([{"role": "user", "content": items}] if isinstance(items, str) else items)
    return ChatRequest(
        refuse_empty(messages),
        tools,
        **body.sampling(),
        max_tokens=body.positive("max_output_tokens"),
        stream=body.get("stream", bool, default=False),
        forced_tool=forced_tool(choice, tools),
        json_schema=schema_text(
            Body(body.get("text", dict, default={})).get("format", dict, default={}), "text.format"
        ),
    )


def _tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise RequestRefused(f"{at}: only functions of the client's are known here, not {tool.get('type')!r}")
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _messages(items: list[Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat template; what the assistant said and called in a row is one message."""
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        at = f"input[{i}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            role = str(item.get("role"))
            content = plain_text(item.get("content"), f"{at}.content", TEXTS)
            _append(messages, {"role": "system" if role == "developer" else role, "content": content})
        elif kind == "function_call":
            call = function_call(item.get("name"), item.get("arguments"), item.get("call_id"))
            _append(messages, {"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            output = plain_text(item.get("output"), f"{at}.output", TEXTS)
            messages.append({"role": "tool", "content": output, "tool_call_id": str(item.get("call_id") or "")})
        elif kind != "reasoning":
            raise RequestRefused(f"{at}: an item of type {kind!r} is not known here")
    return messages


def _append(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Append a message; one of the assistant's goes on with the one before it."""
    last = messages[-1] if messages else None
    if last is None or message["role"] != "assistant" or last["role"] != "assistant":
        messages.append(message)
        return
    merged = {**last, "content": last["content"] + message["content"]}
    if calls := [*last.get("tool_calls", []), *message.get("tool_calls", [])]:
        merged["tool_calls"] = calls
    messages[-1] = merged


def response_id(reply: Reply) -> str:
    return f"resp_{reply.identity}"


def response(reply: Reply) -> dict[str, Any]:
    """Return the body of a response."""
    [answer] = reply.answers
    return {
        "id": response_id(reply), "object": "response", "created_at": reply.created, "model": reply.model,
        "status": "incomplete" if answer.is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if answer.is_cut else None,
        "error": None, "instructions": None, "metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto",
        "tools": [], "temperature": reply.request.temperature, "top_p": reply.request.top_p,
        "output": _items(reply, answer),
        "usage": {
            "input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens,
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }  # fmt: skip


def _items(reply: Reply, answer: Answer) -> list[dict[str, Any]]:
    """Return the items of an answer: its reasoning, its text, its calls."""
    parts, items = answer.parts, list[dict[str, Any]]()
    if parts.reasoning is not None:
        content = [{"type": "reasoning_text", "text": parts.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{reply.identity}", "summary": [], "content": content})
    if parts.content or not parts.tool_calls:
        text = {"type": "output_text", "text": parts.content, "annotations": [], "logprobs": []}
        items.append({"type": "message", "id": f"msg_{reply.identity}", "status": "completed", "role": "assistant",
                      "content": [text]})  # fmt: skip
    for i, (call, call_id) in enumerate(zip(parts.tool_calls, answer.call_ids, strict=True)):
        items.append({"type": "function_call", "id": f"fc_{reply.identity}{i}", "call_id": call_id, "name": call.name,
                      "arguments": call.arguments, "status": "completed"})  # fmt: skip
    return items


def events(reply: Reply) -> Iterator[tuple[str, str]]:
    """Yield the name and the data of each event of a stream."""
    result = response(reply)
    opening = {**result, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    numbered: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": opening}),
        ("response.in_progress", {"response": opening}),
    ]
    for index, item in enumerate(result["output"]):
        numbered += _item_events(index, item)
    ending = "response.incomplete" if result["status"] == "incomplete" else "response.completed"
    numbered.append((ending, {"response": result}))
    for number, (name, values) in enumerate(numbered):
        yield name, json.dumps({"type": name, "sequence_number": number, **values})


def _item_events(index: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    at = {"output_index": index, "item_id": item["id"]}
    if item["type"] == "message":
        [part] = item["content"]
        text = part["text"]
        yield (
            "response.output_item.added",
            {"output_index": index, "item": {**item, "status": "in_progress", "content": []}},
        )
        yield "response.content_part.added", {**at, "content_index": 0, "part": {**part, "text": ""}}
        yield "response.output_text.delta", {**at, "content_index": 0, "delta": text, "logprobs": []}
        yield "response.output_text.done", {**at, "content_index": 0, "text": text, "logprobs": []}
        yield "response.content_part.done", {**at, "content_index": 0, "part": part}
    elif item["type"] == "function_call":
        name, arguments = item["name"], item["arguments"]
        yield (
            "response.output_item.added",
            {"output_index": index, "item": {**item, "status": "in_progress", "arguments": ""}},
        )
        yield "response.function_call_arguments.delta", {**at, "delta": arguments}
        yield "response.function_call_arguments.done", {**at, "name": name, "arguments": arguments}
    else:
        yield "response.output_item.added", {"output_index": index, "item": item}
    yield "response.output_item.done", {"output_index": index, "item": item}

"""Builds responses of OpenAI's chat completions and completions APIs, whole or as stream chunks."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slimectl.data.answers import ParsedAnswer
from slimectl.data.tool_calls import ToolCall


@dataclass(frozen=True, slots=True)
class ApiKind:
    """Differences between the responses of the two endpoints."""

    prefix: str
    complete: str
    chunk: str
    chat: bool

    def frame(
        self, identity: str, created: int, model: str, choices: list[dict[str, Any]], *, complete: bool
    ) -> dict[str, Any]:
        """Return a response or a stream chunk with these choices."""
        kind = self.complete if complete else self.chunk
        head = {"id": f"{self.prefix}-{identity}", "object": kind, "created": created, "model": model}
        return {**head, "choices": choices}


COMPLETION = ApiKind("cmpl", "text_completion", "text_completion", chat=False)
CHAT = ApiKind("chatcmpl", "chat.completion", "chat.completion.chunk", chat=True)

OPENING = {"role": "assistant", "content": ""}
"""First delta of a streamed chat response."""


def call_ids(calls: Sequence[ToolCall]) -> tuple[str, ...]:
    """Return the id of each call: the model's own, or a new one."""
    return tuple(call.call_id or f"call_{uuid.uuid4().hex[:24]}" for call in calls)


def assistant_message(parts: ParsedAnswer, ids: Sequence[str]) -> dict[str, Any]:
    """Return a response as the message that a client gets. Its content is null if it only calls tools."""
    message: dict[str, Any] = {"role": "assistant", "content": parts.content}
    if parts.reasoning is not None:
        message["reasoning_content"] = parts.reasoning
    if parts.tool_calls:
        message["content"] = parts.content or None
        message["tool_calls"] = written_calls(parts.tool_calls, ids)
    return message


def message_delta(
    reasoning: str | None, content: str, calls: Sequence[ToolCall], ids: Sequence[str], *, first_call: int
) -> dict[str, Any]:
    """Return the new part of a streamed message. Calls are sent whole and numbered from `first_call`.

    >>> message_delta(None, "so", [], [], first_call=0)
    {'content': 'so'}
    """
    delta: dict[str, Any] = {"reasoning_content": reasoning} if reasoning else {}
    if content:
        delta["content"] = content
    if calls:
        delta["tool_calls"] = [{"index": first_call + i, **call} for i, call in enumerate(written_calls(calls, ids))]
    return delta


def written_calls(calls: Sequence[ToolCall], ids: Sequence[str]) -> list[dict[str, Any]]:
    """Return calls in the form of a message to a client, with their arguments as text."""
    return [
        {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call, call_id in zip(calls, ids, strict=True)
    ]


def finish_reason(parts: ParsedAnswer, *, is_cut: bool) -> str:
    """Return why a response ended: length limit, tool calls, or stop."""
    return "length" if is_cut else "tool_calls" if parts.tool_calls else "stop"


def token_usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """Return the token counts of a response. `cached` counts the prompt tokens taken from the cache."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def token_log_prob(text: str, log_prob: float | None, content: Sequence[int] | None) -> dict[str, Any]:
    """Return the log-probability entry of a token of a chat response. `content` holds its bytes, None if unknown."""
    return {"token": text, "logprob": log_prob, "bytes": None if content is None else list(content)}


def chat_log_probs(entries: Sequence[tuple[dict[str, Any], list[dict[str, Any]]]]) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice: the entry of each token and of its likeliest alternatives."""
    return {"content": [entry | {"top_logprobs": top} for entry, top in entries], "refusal": None}

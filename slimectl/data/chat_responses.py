"""Responses of OpenAI's chat completions and completions, whole and as chunks of a stream."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slimectl.data.answers import ParsedAnswer
from slimectl.data.tool_calls import ToolCall


@dataclass(frozen=True, slots=True)
class ApiKind:
    """What differs between responses of the two endpoints."""

    prefix: str
    complete: str
    chunk: str
    chat: bool

    def frame(
        self, identity: str, created: int, model: str, choices: list[dict[str, Any]], *, complete: bool
    ) -> dict[str, Any]:
        """Return a response, or a chunk of one, with these choices."""
        kind = self.complete if complete else self.chunk
        head = {"id": f"{self.prefix}-{identity}", "object": kind, "created": created, "model": model}
        return {**head, "choices": choices}


COMPLETION = ApiKind("cmpl", "text_completion", "text_completion", chat=False)
CHAT = ApiKind("chatcmpl", "chat.completion", "chat.completion.chunk", chat=True)

OPENING = {"role": "assistant", "content": ""}
"""Delta with which the stream of a chat's answer begins."""


def call_ids(calls: Sequence[ToolCall]) -> tuple[str, ...]:
    """Return the id of each call: the model's own, or a new one."""
    return tuple(call.call_id or f"call_{uuid.uuid4().hex[:24]}" for call in calls)


def assistant_message(parts: ParsedAnswer, ids: Sequence[str]) -> dict[str, Any]:
    """Return an answer as the message that a client gets; its content is null where it only calls tools."""
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
    """Return what is new of a message that is streamed; the calls, each of them whole, are numbered from `first_call`.

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
    """Return calls as a message to a client has them, with their arguments as text."""
    return [
        {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call, call_id in zip(calls, ids, strict=True)
    ]


def finish_reason(parts: ParsedAnswer, *, is_cut: bool) -> str:
    """Return why an answer ended: its limit, its calls of tools, or its own end."""
    return "length" if is_cut else "tool_calls" if parts.tool_calls else "stop"


def token_usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """Return the counts of tokens of a response; `cached` ones of the prompt were not computed again."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def token_log_prob(text: str, log_prob: float | None, content: Sequence[int] | None) -> dict[str, Any]:
    """Return the log-probability of a token of a chat's answer; `content` are its bytes, None where not known."""
    return {"token": text, "logprob": log_prob, "bytes": None if content is None else list(content)}


def chat_log_probs(entries: Sequence[tuple[dict[str, Any], list[dict[str, Any]]]]) -> dict[str, Any]:
    """Return the `logprobs` of a chat's choice: of each token its entry, and those of the likeliest in its place."""
    return {"content": [entry | {"top_logprobs": top} for entry, top in entries], "refusal": None}

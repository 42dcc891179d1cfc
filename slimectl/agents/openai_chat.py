"""OpenAI's chat completions and completions: requests, responses, and streams of chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from slimectl.agents.answer import Answer, Reply
from slimectl.agents.chat_request import (
    Body,
    ChatRequest,
    RequestRefused,
    schema_text,
)
from slimectl.data.chat_messages import assistant_message, checked_text, template_message, token_usage


def read_chat(values: Any) -> ChatRequest:
    """Read the body of /chat/completions. Raises RequestRefused."""
    body = Body(values)
    choice = body.get("tool_choice", str, dict, default="auto")
    tools = [] if choice == "none" else body.objects("tools")
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(body.objects("messages"))]
    return ChatRequest(
        refuse_empty(messages),
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
    """Return messages that the policy can answer. Raises RequestRefused for none, or where it has the last word."""
    if not messages:
        raise RequestRefused("messages: is missing or empty")
    if messages[-1]["role"] == "assistant":
        raise RequestRefused("messages: the last one is the assistant's; this endpoint begins each answer anew")
    return messages


def _message(message: dict[str, Any], at: str) -> dict[str, Any]:
    result = template_message(message, at)
    # Templates know "system"; "developer" is OpenAI's newer name of it.
    role = "system" if result["role"] == "developer" else result["role"]
    return {**result, "role": role, "content": result["content"] or ""}


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
    return {**_head(reply, "chat.completion", "chatcmpl"), "choices": choices, "usage": usage(reply)}


def completion_response(reply: Reply) -> dict[str, Any]:
    """Return the body of a response to a completion."""
    choices = [
        {"index": i, "text": answer.completion.text, "finish_reason": _finish(answer), "logprobs": None}
        for i, answer in enumerate(reply.answers)
    ]
    return {**_head(reply, "text_completion", "cmpl"), "choices": choices, "usage": usage(reply)}


def chat_events(reply: Reply) -> Iterator[tuple[None, str]]:
    """Yield the chunks of a streamed answer: its role, its parts, its end with the usage."""
    [answer] = reply.answers
    message = assistant_message(answer.parts, answer.call_ids)
    calls = [{"index": i, **call} for i, call in enumerate(message.pop("tool_calls", []))]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
    deltas += [{"tool_calls": [call]} for call in calls]
    head = _head(reply, "chat.completion.chunk", "chatcmpl")
    for delta in deltas:
        yield None, json.dumps({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    end = {"index": 0, "delta": {}, "finish_reason": _finish(answer), **_log_probs(reply, answer)}
    yield None, json.dumps({**head, "choices": [end], "usage": usage(reply)})
    yield None, "[DONE]"


def completion_events(reply: Reply) -> Iterator[tuple[None, str]]:
    """Yield the chunks of a streamed completion."""
    yield None, json.dumps(completion_response(reply))
    yield None, "[DONE]"


def _finish(answer: Answer) -> str:
    return "length" if answer.is_cut else "tool_calls" if answer.parts.tool_calls else "stop"


def _log_probs(reply: Reply, answer: Answer) -> dict[str, Any]:
    """Return the log-probabilities of a chat's answer where they were asked for; tokens are named by their ids."""
    if not reply.request.log_probs:
        return {"logprobs": None}
    scored = zip(answer.completion.tokens, answer.completion.log_probs, strict=True)
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": log_prob, "bytes": None, "top_logprobs": []}
        for token, log_prob in scored
    ]
    return {"logprobs": {"content": content, "refusal": None}}


def _head(reply: Reply, kind: str, prefix: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{reply.identity}", "object": kind, "created": reply.created, "model": reply.model}


def usage(reply: Reply) -> dict[str, Any]:
    return token_usage(reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens)

"""Chats as text for a terminal: messages and turns, each under its role."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from slimectl.chats.messages import content_text
from slimectl.cli.terminal import has_colours, paint, visible
from slimectl.viewer.turns import Turn, turns_of

BEGINNING = r"(?:<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>)(\w{1,20})(?:<\|end_header_id\|>)?"
"""Marks before a message in the templates of common families, and its role."""
END = re.compile(r"(?:<\|im_end\|>|<\|eot_id\|>|<end_of_turn>)\s*$")


def chat_text(messages: Any) -> str:
    """Return the messages of a chat as harmless text, each under its role; anything else as JSON."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return visible(json.dumps(messages, ensure_ascii=False))
    return "\n".join(_turn(str(message.get("role", "message")), _message_text(message)) for message in messages)


def _message_text(message: Mapping[str, Any]) -> str:
    calls = message.get("tool_calls")
    calls = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    lines = [f"calls {json.dumps(call.get('function', call), ensure_ascii=False)}" for call in calls]
    return "\n".join(filter(None, [content_text(message.get("content")), *lines]))


def response_turns(record: Mapping[str, Any]) -> list[Turn]:
    """Return the turns of a sample's response: runs of tokens of the policy or of the environment."""
    tokens = record.get("tokens")
    if not isinstance(tokens, list):
        return []
    prompt_length = len(tokens) - int(record.get("response_length", 0))
    return [turn for turn in turns_of(record, prompt_length) if turn["author"] != "prompt"]


def turns_text(
    record: Mapping[str, Any], turns: Sequence[Mapping[str, Any]], decode: Callable[[Sequence[int]], str]
) -> str:
    """Return the turns of a response as harmless text: turns of the policy after >>>, others under their roles."""
    lines = []
    for turn in turns:
        text = decode(record["tokens"][turn["start"] : turn["end"]])
        if turn["author"] == "policy":
            lines.append(f">>> {visible(END.sub('', text))}")
        else:
            lines += [_turn(role, message) for role, message in _messages(text)]
    return "\n".join(lines)


def _messages(text: str) -> Iterator[tuple[str, str]]:
    """Yield (role, text) of the messages that a template wrote between two turns of the policy."""
    before, *pairs = re.split(BEGINNING, text)
    if unmarked := END.sub("", before).strip():
        yield "environment", unmarked
    for role, message in zip(pairs[::2], pairs[1::2], strict=True):
        if content := END.sub("", message).strip():
            yield role, content


def _turn(role: str, text: str) -> str:
    name = f"[{visible(role, 40)}]"
    return f"{paint(name, '1') if has_colours() else name} {visible(text)}"

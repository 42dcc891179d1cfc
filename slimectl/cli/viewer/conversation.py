"""Turns samples into messages with roles, and the branches of an attempt into a tree of messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from slimectl.chats.messages import content_text
from slimectl.cli.viewer.turns import Turn, turns_of

Decode = Callable[[Sequence[int]], str]

HEADER = re.compile(
    r"(?:<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>)(\w{1,20})(?:<\|end_header_id\|>)?\n*"
    r"|<\|(system|user|assistant|observation)\|>\n?|<｜(User|Assistant)｜>"
)
"""The beginning of a message in a chat template, with its role."""
END = re.compile(
    r"(?:<\|(?:im_end|eot_id|eom_id|end_of_text|end|endoftext)\|>|<(?:end_of_turn|eos)>|</s>|<｜end▁of▁sentence｜>|\n)+$"
)
"""The end of a message in a chat template."""
MARKS = re.compile(r"(?:<[^<>\s]{1,40}>|\s)*")
"""Special tokens before the first message, such as <|begin_of_text|>."""
ROLES = {"model": "assistant", "observation": "tool"}
MAX_NODE_TEXT = 2000
"""Maximum characters of a message in a tree. The page of a sample shows all."""


class Message(NamedTuple):
    """A message of a sample. Its author is "prompt", "policy" or "environment"."""

    role: str
    author: str
    text: str


def conversation(record: Mapping[str, Any], decode: Decode | None) -> list[Message]:
    """Return the messages of a sample: its prompt, then what the policy and the environment added.

    Without a tokenizer, the response is one message.
    """
    tokens = list(record.get("tokens") or [])
    prompt = _prompt(record, tokens[: _prompt_length(record)], decode)
    response_role = "response" if [message.role for message in prompt] == ["prompt"] else "assistant"
    if decode is None or not tokens:
        return [*prompt, Message(response_role, "policy", str(record.get("response", "")))]
    response = [
        message
        for turn in response_turns(record)
        for message in _of_turn(turn, decode(tokens[turn["start"] : turn["end"]]), response_role)
    ]
    return [*prompt, *response]


def response_turns(record: Mapping[str, Any]) -> list[Turn]:
    """Return the turns of a sample's response: consecutive tokens of the policy or of the environment."""
    return [turn for turn in turns_of(record, _prompt_length(record)) if turn["author"] != "prompt"]


def _prompt_length(record: Mapping[str, Any]) -> int:
    return len(record.get("tokens") or []) - int(record.get("response_length") or 0)


def prompt_messages(prompt: Any) -> list[Message]:
    """Return the messages of a recorded prompt: a chat, or one message with the text, or with JSON of other values."""
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
        return [Message("prompt", "prompt", text)]
    return [Message(str(message.get("role", "message")), "prompt", _content(message)) for message in prompt]


def _content(message: Mapping[str, Any]) -> str:
    """Return the text of a message, then its tool calls as JSON, one per line."""
    calls = message.get("tool_calls")
    calls = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    lines = [f"calls {json.dumps(call.get('function', call), ensure_ascii=False)}" for call in calls]
    return "\n".join(filter(None, [content_text(message.get("content") or ""), *lines]))


def _prompt(record: Mapping[str, Any], tokens: Sequence[int], decode: Decode | None) -> list[Message]:
    """Return the messages of a prompt. A templated text is split into the messages of its chat template."""
    messages = prompt_messages(record.get("prompt"))
    if isinstance(record.get("prompt"), list) or decode is None:
        return messages
    templated = decode(tokens)
    return list(_split(templated, "prompt", "prompt")) if HEADER.search(templated) else messages


def _of_turn(turn: Turn, text: str, response_role: str) -> Iterator[Message]:
    if turn["author"] == "policy":
        yield Message(response_role, "policy", END.sub("", text))
    else:
        yield from _split(text, "environment", "environment")


def _split(text: str, role: str, author: str) -> Iterator[Message]:
    """Yield the messages in a templated text. Text before the first header has the given role."""
    position = 0
    for header in [*HEADER.finditer(text), None]:
        end = len(text) if header is None else header.start()
        body = END.sub("", text[position:end])
        if body and not (position == 0 and header is not None and MARKS.fullmatch(body)):
            yield Message(role, author, body)
        if header is not None:
            name = next(filter(None, header.groups())).lower()
            role, position = ROLES.get(name, name), header.end()


def attempt_tree(conversations: Mapping[int, Sequence[Message]]) -> dict[str, Any]:
    """Return the tree of the branches of an attempt, by row.

    A node has the messages that its branches share, the rows that end there, and its children.
    """
    remaining = {row: list(messages) for row, messages in conversations.items()}
    shared: list[Message] = []
    while all(remaining.values()):
        common = _common([messages[0] for messages in remaining.values()])
        if common is None:
            break
        shared.append(common)
        for messages in remaining.values():
            text = messages[0].text[len(common.text) :]
            messages[:1] = [messages[0]._replace(text=text)] if text else []
    groups: list[dict[int, list[Message]]] = []
    for row, messages in remaining.items():
        if messages:
            same = (group for group in groups if _common([next(iter(group.values()))[0], messages[0]]))
            group = next(same, None)
            if group is None:
                groups.append({row: messages})
            else:
                group[row] = messages
    return {
        "messages": [message._replace(text=message.text[:MAX_NODE_TEXT])._asdict() for message in shared],
        "rows": [row for row, messages in remaining.items() if not messages],
        "children": [attempt_tree(group) for group in groups],
    }


def _common(messages: Sequence[Message]) -> Message | None:
    """Return the message with which all begin: an equal one, or a response that the other responses continue."""
    shortest = min(messages, key=lambda message: len(message.text))
    same_role = all(message[:2] == shortest[:2] for message in messages)
    if not same_role or not all(message.text.startswith(shortest.text) for message in messages):
        return None
    equal = all(message.text == shortest.text for message in messages)
    return shortest if equal or (shortest.text and shortest.author == "policy") else None


def own_prompt(records: Sequence[Mapping[str, Any]]) -> Any:
    """Return the prompt of a group: the messages with which all its branches begin.

    An agent may use another history in each branch. Branches are recorded from the last to the first, so if they share
    no user message, the last record has the prompt.
    """
    prompts = [record.get("prompt", "") for record in records]
    if not prompts or not all(isinstance(prompt, list) for prompt in prompts):
        return prompts[0] if prompts else ""
    length = 0
    while all(len(prompt) > length and prompt[length] == prompts[0][length] for prompt in prompts):
        length += 1
    shared = prompts[0][:length]
    asks = any(isinstance(message, dict) and message.get("role") == "user" for message in shared)
    return shared if asks else prompts[-1]

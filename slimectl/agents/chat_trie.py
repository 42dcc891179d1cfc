"""Stores the chats of a session as a trie of messages, to find the longest known beginning of a request.

A message that equals the last one at its position is only compared, not serialised and hashed. So the cost of a turn
depends only on its new messages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from slimectl.chats.requests import ChatRequest

Value = TypeVar("Value")


@dataclass(slots=True, eq=False)
class ChatNode(Generic[Value]):
    """A beginning of chats. `message` is its last message, and `value` is stored for it."""

    message: dict[str, Any]
    value: Value | None = None
    _children: dict[bytes, ChatNode[Value]] = field(default_factory=dict)
    _latest: ChatNode[Value] | None = None

    def find(self, message: dict[str, Any]) -> ChatNode[Value] | None:
        """Return this beginning extended by a message, or None if that is unknown."""
        if self._latest is not None and _is_same(self._latest.message, message):
            return self._latest
        child = self._children.get(message_key(message))
        if child is not None:
            if not _is_same(child.message, message):
                child.message = message
            self._latest = child
        return child

    def add(self, message: dict[str, Any]) -> ChatNode[Value]:
        """Add and return this beginning extended by a message."""
        child = self._latest = self._children.setdefault(message_key(message), ChatNode(message))
        return child


@dataclass(frozen=True, slots=True)
class KnownChat(Generic[Value]):
    """A request's messages after its head, and the nodes of its longest known beginning, starting with the empty one.

    Messages that equal messages of an earlier request are the same objects. The head represents the tools and the
    arguments of the template.
    """

    _chat: list[dict[str, Any]]
    _nodes: list[ChatNode[Value]]

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self._chat[1:]

    def beginning(self) -> tuple[int, Value] | None:
        """Return the number of messages and the value of the longest proper beginning that has a value."""
        for count in range(min(len(self._nodes), len(self._chat)) - 1, 0, -1):
            value = self._nodes[count].value
            if value is not None:
                return count - 1, value
        return None

    def add(self, answer: dict[str, Any], value: Value) -> None:
        """Add the chat with an answer to it, and store its value.

        An answer that continues an assistant message is stored both after it and as one message with it.
        """
        self._add([*self._chat, answer], value)
        if (last := self._chat[-1]).get("role") == "assistant":
            content = f"{last.get('content') or ''}{answer.get('content') or ''}"
            self._add([*self._chat[:-1], {**last, **answer, "content": content}], value)

    def _add(self, chat: list[dict[str, Any]], value: Value) -> None:
        count = min(len(self._nodes), len(chat))
        node = self._nodes[count - 1]
        for message in chat[count - 1 :]:
            node = node.add(message)
        node.value = value


@dataclass(slots=True)
class ChatTrie(Generic[Value]):
    """All known beginnings of chats."""

    _root: ChatNode[Value] = field(default_factory=lambda: ChatNode({}))

    def find(self, request: ChatRequest) -> KnownChat[Value]:
        beginning = [request.tools, dict(request.template_kwargs)]
        head = {"role": "head", "content": json.dumps(beginning, sort_keys=True, default=str)}
        chat = [head, *request.messages]
        nodes = [self._root]
        for i, message in enumerate(chat):
            node = nodes[-1].find(message)
            if node is None:
                break
            nodes.append(node)
            chat[i] = node.message
        return KnownChat(chat, nodes)


def message_key(message: Mapping[str, Any]) -> bytes:
    """Return the key by which two messages count as the same.

    It excludes reasoning, surrounding blanks and the ids of calls, because clients omit them or write their own.
    """
    calls = [
        [call["function"].get("name"), call["function"].get("arguments")]
        for call in message.get("tool_calls") or ()
        if isinstance(call.get("function"), dict)
    ]
    content = message.get("content") or ""
    identity = [message.get("role"), content.strip() if isinstance(content, str) else content, calls]
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode(errors="replace")).digest()


def _is_same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return whether two messages are equal. In tool calls, 1 does not equal 1.0 or true."""
    return a == b and ("tool_calls" not in a or _is_equal_json(a["tool_calls"], b["tool_calls"]))


def _is_equal_json(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is_equal_json(value, b[name]) for name, value in a.items())
    if isinstance(a, Sequence) and not isinstance(a, str):
        return len(a) == len(b) and all(map(_is_equal_json, a, b))
    return bool(a == b)

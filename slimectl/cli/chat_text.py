"""Formats the messages of a sample for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from slimectl.cli.terminal import has_colours, paint, visible
from slimectl.cli.viewer.conversation import Message


def messages_text(messages: Iterable[Message]) -> str:
    """Return messages as text that is safe to print: the policy's after >>>, others after their role.

    A prompt that is a string has no prefix.
    """
    return "\n".join(map(_message_text, messages))


def _message_text(message: Message) -> str:
    text = visible(message.text)
    if message.author == "policy":
        return f">>> {text}"
    if message.role == "prompt":
        return text
    name = f"[{visible(message.role, 40)}]"
    return f"{paint(name, '1') if has_colours() else name} {text}"

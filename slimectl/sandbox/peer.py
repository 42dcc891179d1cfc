"""Calls between a program and its judge over one channel. Each may send a request while the other waits."""

from __future__ import annotations

import builtins
import json
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from os import read, write
from typing import Any

from slimectl.sandbox.wire import CannotCrossError, Decoder, Encoder

MAX_MESSAGE = 16 << 20
"""Maximum length of a message in bytes."""


MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, ArithmeticError)
"""Exceptions of decoding for a message that this code did not write."""


class BrokenChannelError(BaseException):
    """The other side has ended, or wrote something invalid. Not an Exception, so that a test does not catch it."""


class Peer(ABC):
    """One end of the channel."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._ids: dict[int, int] = {}
        self.objects: list[Any] = []
        """Values of this side that the other side refers to by number."""

    @abstractmethod
    def kind_of(self, value: Any) -> list[Any]:
        """Return the description of a value that the other side refers to. Raises CannotCrossError."""

    @abstractmethod
    def reference(self, number: int, kind: list[Any]) -> Any:
        """Return the proxy for a value of the other side."""

    @abstractmethod
    def number_of(self, value: Any) -> int | None:
        """Return the number of a proxy for a value of the other side, or None for any other value."""

    @abstractmethod
    def perform(self, operation: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """Execute a request of the other side."""

    def printed(self) -> str:
        """Return the output printed since the last call."""
        return ""

    def refer(self, value: Any) -> list[Any]:
        """Return the form of a value that is not plain data: its number on one of the sides."""
        number = self.number_of(value)
        if number is not None:
            return ["yours", number]
        if id(value) not in self._ids:
            kind = self.kind_of(value)
            self._ids[id(value)] = len(self.objects)
            self.objects.append(value)
        else:
            kind = self.kind_of(value)
        return ["mine", self._ids[id(value)], kind]

    def resolve(self, form: list[Any]) -> Any:
        """Return the value of such a form."""
        if form[0] == "mine":
            return self.reference(form[1], form[2])
        if form[0] == "yours":
            return self.objects[form[1]]
        raise ValueError(f"unknown tag {form[0]!r:.40}")

    def ask(self, operation: str, *arguments: Any, keywords: dict[str, Any] | None = None) -> Any:
        """Send a request to the other side. Return its result or raise its exception."""
        encoder = Encoder(self.refer)
        forms = [encoder.encode(value) for value in arguments]
        named_forms = [[name, encoder.encode(value)] for name, value in (keywords or {}).items()]
        self._send({"do": operation, "arguments": forms, "keywords": named_forms})
        while "do" in (message := self.receive()):
            self.answer(message)
        sys.stdout.write(self._checked(message.get("printed", ""), str))
        decoder = Decoder(self.resolve, encoder.containers)
        try:
            targets = [encoder.containers[number] for number, _ in message.get("changed", ())]
            result = decoder.decode(message.get("result"))
            raised = decoder.decode(message.get("raised"))
            for container, (_, content) in zip(targets, message.get("changed", ()), strict=True):
                decoder.fill(container, content)
            error = _exception(*raised) if raised else None
        except MALFORMED as failure:
            raise BrokenChannelError(f"sent no message: {type(failure).__name__}") from None
        if error:
            raise error
        return result

    def answer(self, message: dict[str, Any]) -> None:
        """Execute a request. Send the result or exception, and the arguments as the call left them."""
        decoder = Decoder(self.resolve)
        try:
            arguments = [decoder.decode(form) for form in message["arguments"]]
            keywords = {name: decoder.decode(form) for name, form in message["keywords"]}
        except MALFORMED as failure:
            raise BrokenChannelError(f"sent no message: {type(failure).__name__}") from None
        containers = decoder.containers
        before = self._contents(containers)
        try:
            result = self.perform(message["do"], arguments, keywords)
            reply = self._reply(containers, before, "result", lambda: result)
        except BrokenChannelError:
            raise
        except BaseException as error:
            described = error  # Python deletes the name `error` after its block
            reply = self._reply(containers, before, "raised", lambda: self._described(described))
        try:
            self._send(reply)
        except CannotCrossError as error:
            self._send({"raised": Encoder(self.refer).encode(self._described(error))})

    def _contents(self, containers: list[Any]) -> list[Any]:
        encoder = Encoder(self.refer, containers)
        return [encoder.content(container) for container in containers]

    def _reply(self, containers: list[Any], before: list[Any], name: str, value: Callable[[], Any]) -> dict[str, Any]:
        encoder = Encoder(self.refer, containers)
        try:
            reply = {name: encoder.encode(value()), "printed": self.printed()}
            after = [encoder.content(container) for container in containers]
        except RecursionError:
            raise CannotCrossError("the value is nested too deeply to cross to the test") from None
        reply["changed"] = [[at, content] for at, content in enumerate(after) if content != before[at]]
        return reply

    def _described(self, error: BaseException) -> list[Any]:
        """Return the names of an exception's classes, its module, and its arguments in a form that can cross."""
        names = [kind.__name__ for kind in type(error).__mro__]
        try:
            arguments = list(error.args)
            Encoder(self._refuse).encode(arguments)
        except Exception:
            arguments = [str(error)]
        return [names, type(error).__module__, arguments]

    def _refuse(self, value: Any) -> list[Any]:
        raise CannotCrossError(type(value).__name__)

    def _checked(self, value: Any, kind: type) -> Any:
        if not isinstance(value, kind):
            raise BrokenChannelError(f"sent {type(value).__name__} for {kind.__name__}")
        return value

    def _send(self, message: dict[str, Any]) -> None:
        text = json.dumps(message).encode()
        if len(text) > MAX_MESSAGE:
            raise CannotCrossError(f"{len(text)} bytes are too many to cross to the test")
        text = struct.pack("=I", len(text)) + text
        try:
            while text:
                text = text[write(self._fd, text) :]
        except OSError:
            raise BrokenChannelError("ended before the test had run") from None

    def receive(self) -> dict[str, Any]:
        """Return the next message. Raises BrokenChannelError if the other side has ended."""
        (length,) = struct.unpack("=I", self._read(4))
        if length > MAX_MESSAGE:
            raise BrokenChannelError(f"sent a message of {length} bytes")
        try:
            message = json.loads(self._read(length))
        except (ValueError, RecursionError) as error:
            raise BrokenChannelError(f"sent no message: {type(error).__name__}") from None
        result: dict[str, Any] = self._checked(message, dict)
        return result

    def _read(self, length: int) -> bytes:
        pieces = []
        while length:
            try:
                piece = read(self._fd, min(length, 1 << 20))
            except OSError:
                piece = b""
            if not piece:
                raise BrokenChannelError("ended before the test had run")
            pieces.append(piece)
            length -= len(piece)
        return b"".join(pieces)


_classes: dict[tuple[str, ...], Any] = {}


def exception_class(names: list[str], module: str) -> Any:
    """Return the exception class of these names: a builtin, a standard one, or a new one with these bases."""
    at, base = len(names), None
    for at, name in enumerate(names):  # noqa: B007
        base = getattr(builtins, name, None) or getattr(sys.modules.get(module), name, None)
        if module == "__main__" and not hasattr(builtins, name):
            base = None
        if isinstance(base, type) and issubclass(base, BaseException):
            break
    else:
        at, base = len(names), Exception
    for end in range(at, 0, -1):
        key = tuple(names[end - 1 :])
        base = _classes.setdefault(key, type(str(names[end - 1]), (base,), {}))
    return base


def _exception(names: list[str], module: str, arguments: list[Any]) -> BaseException:
    """Rebuild the exception of the other side, as far as its classes are known here."""
    kind = exception_class(names, module)
    try:
        error = kind(*arguments)
    except Exception:
        error = kind.__new__(kind, *arguments)
    if not isinstance(error, BaseException) or isinstance(error, BrokenChannelError):
        raise TypeError("no exception")
    return error

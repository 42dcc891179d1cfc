"""Generated prompts: reasoning_gym tasks, and user functions by path."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any
from urllib.parse import parse_qsl

from slimectl.data.json_values import cell_value, jsonable
from slimectl.data.tables import Listed, Row, Spooled, Table
from slimectl.errors import SettingsError, requiring
from slimectl.plugins.callables import load_callable
from slimectl.plugins.containment import converted
from slimectl.types import Prompt

_END = object()


def generated(source: str, module: str, name: str, query: str) -> Table:
    """Return the rows of `reasoning_gym:TASK?…`, or of the sequence or iterator that `module:function?…` returns.

    Query values are parsed as JSON if possible, else kept as text. Raises SettingsError, HookError.
    """
    arguments = {key: _scalar(value) for key, value in parse_qsl(query, keep_blank_values=True)}
    if module == "reasoning_gym":
        return _reasoning_gym(name, arguments)
    return _called(source, load_callable(f"{module}:{name}", setting="rollout.data"), arguments)


def _scalar(text: str) -> Any:
    """Parse a query value as JSON, or return it as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _reasoning_gym(task: str, arguments: dict[str, Any]) -> Table:
    with requiring("reasoning-gym", extra="quickstart", wanted_by=f"reasoning_gym:{task}"):
        import reasoning_gym
    try:
        # The library's default seed is random, but a resumed run needs the same prompts.
        dataset = reasoning_gym.create_dataset(task, **{"seed": 0, **arguments})
    except Exception as error:
        raise SettingsError(f"reasoning_gym:{task}: {error}") from error

    def prompt(entry: dict[str, Any]) -> Prompt:
        metadata = {"source_dataset": task, "entry": jsonable(entry), "rm_type": "reasoning_gym"}
        return Prompt(text=entry["question"], label=str(entry["answer"]), metadata=metadata)

    return Listed(f"reasoning_gym:{task}", dataset, prompt)


class _Indexed(Listed):
    """Rows of a user's sequence."""

    def __len__(self) -> int:
        with converted(self._name):
            return super().__len__()

    def __getitem__(self, i: int) -> Row:
        with converted(self._name):
            location, row = super().__getitem__(i)
            return location, cell_value(row)


def _check_arguments(source: str, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise SettingsError(f"{source}: {error}") from error


def _called(source: str, function: Callable[..., Any], arguments: dict[str, Any]) -> Table:
    def call() -> Any:
        with suppress(ValueError):  # a builtin function has no readable signature
            _check_arguments(source, function, arguments)
        with converted(source):
            return function(**arguments)

    first = call()
    if isinstance(first, Sequence):
        return _Indexed(source, first)
    at_hand = [first]

    def rows() -> Iterator[Row]:
        with converted(source):
            iterator = iter(at_hand.pop() if at_hand else call())
        for i in count():
            with converted(source):
                row: Any = next(iterator, _END)
            if row is _END:
                return
            yield f"{source}[{i}]", cell_value(row)

    return Spooled(rows)

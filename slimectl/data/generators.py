"""Prompts that a program makes: tasks of reasoning_gym, and functions by their path."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import parse_qsl

from slimectl.data.tables import Listed, Row, Spooled, Table
from slimectl.errors import HookError, MissingExtraError, SettingsError, SlimectlError
from slimectl.hooks import load_callable
from slimectl.types import Prompt


def generated(source: str, module: str, name: str, query: str) -> Table:
    """The rows of `reasoning_gym:TASK?…`, or of what `module:function?…` returns: a sequence or an iterator.

    Values of the query are JSON scalars where they can be, text elsewhere. Raises SettingsError, HookError.
    """
    arguments = {key: _scalar(value) for key, value in parse_qsl(query, keep_blank_values=True)}
    if module == "reasoning_gym":
        return _reasoning_gym(name, arguments)
    return _called(source, load_callable(f"{module}:{name}", setting="rollout.data"), arguments)


def _scalar(text: str) -> Any:
    """A value of a query: JSON where it is JSON, the text itself elsewhere."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _reasoning_gym(task: str, arguments: dict[str, Any]) -> Table:
    try:
        import reasoning_gym
    except ImportError:
        wanted_by = f"reasoning_gym:{task}"
        raise MissingExtraError("reasoning-gym", extra="quickstart", wanted_by=wanted_by) from None
    try:
        # Its own default seed is random, and a resumed run must meet the same prompts.
        dataset = reasoning_gym.create_dataset(task, **{"seed": 0, **arguments})
    except Exception as error:
        raise SettingsError(f"reasoning_gym:{task}: {error}") from error

    def prompt(entry: dict[str, Any]) -> Prompt:
        metadata = {"source_dataset": task, "entry": jsonable(entry), "rm_type": "reasoning_gym"}
        return Prompt(text=entry["question"], label=str(entry["answer"]), metadata=metadata)

    return Listed(f"reasoning_gym:{task}", dataset, prompt)


def jsonable(value: Any) -> Any:
    """The value with tuples, sets and keys as JSON knows them, numpy's scalars as numbers, anything else as text."""
    if isinstance(value, dict):
        return {str(key): jsonable(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(member) for member in value]
    if isinstance(value, set | frozenset):
        return sorted((jsonable(member) for member in value), key=str)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else str(value)


def _called(source: str, function: Callable[..., Any], arguments: dict[str, Any]) -> Table:
    def call() -> Any:
        try:
            return function(**arguments)
        except TypeError as error:
            raise SettingsError(f"{source}: {error}") from error

    first = call()
    if isinstance(first, Sequence):
        return Listed(source, first)
    at_hand = [first]

    def rows() -> Iterator[Row]:
        try:
            for i, row in enumerate(at_hand.pop() if at_hand else call()):
                yield f"{source}[{i}]", row
        except SlimectlError:
            raise
        except Exception as error:
            raise HookError(f"{source}: raised {type(error).__name__}: {error}") from error

    return Spooled(rows)

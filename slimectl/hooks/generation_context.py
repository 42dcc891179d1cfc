"""The running generation, for functions that call slime's `generate` without getting slimectl's as an argument."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from slimectl.stages.generation import GroupGenerator
from slimectl.types import Completion


@dataclass(frozen=True)
class GenerationContext:
    """`generate` asks the engine for one response. `attempts` generates whole samples, in a rollout function only."""

    generate: Callable[[list[int], Any], Awaitable[Completion]]
    attempts: GroupGenerator | None = None


_of_task: ContextVar[GenerationContext | None] = ContextVar("generation", default=None)
_of_rounds: list[GenerationContext] = []
"""Contexts of the rollout functions that are running. Threads that these functions start have no context themselves."""


@contextmanager
def generating(context: GenerationContext) -> Iterator[None]:
    """Make a context the current one in the block, and in tasks that the block creates."""
    token = _of_task.set(context)
    if context.attempts is not None:
        _of_rounds.append(context)
    try:
        yield
    finally:
        _of_task.reset(token)
        if context.attempts is not None:
            _of_rounds.remove(context)


def current_generation() -> GenerationContext | None:
    """Return the context of this task, or of the rollout function that is running, or None if there is neither."""
    context = _of_task.get()
    return context if context is not None or not _of_rounds else _of_rounds[-1]

"""Prompts that are too long to be answered: left out, counted, and the first few named with their line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from slimectl import stdio
from slimectl.errors import RecordError
from slimectl.settings.rollout import RolloutSettings
from slimectl.types import Prompt, Sample

Item = TypeVar("Item")

NAMED = 5
"""Prompts of a process that are named one by one; of more only their number is told."""
MOST_IN_A_ROW = 10_000
MOST_EPOCHS = 4
"""Prompts left out one after another, and times that one line is among them, at which no other is to be hoped for."""

_named: set[str] = set()


def prompt_excess(tokens: int, settings: RolloutSettings, context: int | None, *, evaluation: bool = False) -> str:
    """Return why a prompt of so many tokens cannot be answered by a model that reads `context`; "" where it can.

    Evaluations ask the same of every model: rollout.max_prompt_len does not hold for them.
    """
    if context is not None and tokens >= context:
        return f"{tokens} tokens leave no room for an answer in a context of {context}"
    if settings.max_prompt_len is not None and tokens > settings.max_prompt_len and not evaluation:
        return f"{tokens} tokens, and rollout.max_prompt_len is {settings.max_prompt_len}"
    return ""


def demonstration_excess(sample: Sample, settings: RolloutSettings, context: int | None) -> str:
    """Return why a sample to be imitated is too long; "" where it is not."""
    if context is not None and len(sample.tokens) > context:
        return f"{len(sample.tokens)} tokens with its answer, in a context of {context}"
    return prompt_excess(sample.prompt_length, settings, None)


def drop_long(
    items: Iterable[Item],
    prompt_of: Callable[[Item], Prompt],
    excess: Callable[[Item], str],
    on_dropped: Callable[[Prompt], object] = lambda prompt: None,
    *,
    mixed: bool = False,
) -> Iterator[Item]:
    """Yield the items without an `excess`; the prompts of the others go to `on_dropped`.

    Raises RecordError where none is without: at the end of prompts that were read from the first one on, or when the
    same lines have come several times, or 10 000 in a row. In prompts that are `mixed` by weight a line may come often
    before another.
    """
    dropped: Counter[str] = Counter()
    from_start: bool | None = None
    reason = ""
    for item in items:
        prompt = prompt_of(item)
        from_start = prompt.index == 0 if from_start is None else from_start
        if not (why := excess(item)):
            dropped.clear()
            from_start = False
            yield item
            continue
        reason = why
        name_dropped(prompt, reason)
        on_dropped(prompt)
        dropped[prompt.where] += 1
        again = prompt.where and not mixed and dropped[prompt.where] >= MOST_EPOCHS
        if again or dropped.total() == MOST_IN_A_ROW:
            raise all_too_long(dropped.total(), reason)
    if from_start and dropped:
        raise all_too_long(dropped.total(), reason)


def name_dropped(prompt: Prompt, reason: str) -> None:
    """Say on stderr, once, which prompt is left out and why; after a few, that there are more."""
    name = prompt.where or f"prompt {prompt.index}"
    if name in _named or len(_named) > NAMED:
        return
    _named.add(name)
    more = len(_named) > NAMED
    stdio.say("more prompts are too long: only counted from here on" if more else f"{name}: left out: {reason}")


def all_too_long(count: int, reason: str) -> RecordError:
    """Return the error for prompts of which not one can be answered."""
    return RecordError(
        f"all {count} prompts read are too long, the last one with {reason}; raise rollout.max_prompt_len or "
        f"rollout.max_context_len, or give shorter prompts"
    )

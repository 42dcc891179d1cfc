"""Skips prompts that are too long or have unknown tokens, counts them, and logs the first few with their line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from slimectl.errors import RecordError
from slimectl.settings.rollout import RolloutSettings
from slimectl.system.stdio import logger, quantity
from slimectl.types import Prompt, Sample

Item = TypeVar("Item")

NAMED = 5
"""Number of skipped prompts that a process logs one by one. Further ones are only counted."""
MOST_IN_A_ROW = 10_000
MOST_EPOCHS = 4
"""Numbers of consecutive drops, and of drops of the same line, after which all prompts count as too long."""

_named: set[str] = set()


def prompt_excess(tokens: int, settings: RolloutSettings, context: int | None, *, evaluation: bool = False) -> str:
    """Return why a prompt of `tokens` tokens is too long for a model with this `context`, or "" if it fits.

    Evaluations use the same prompts for every model, so rollout.max_prompt_len does not apply to them.
    """
    if context is not None and tokens >= context:
        return f"{tokens} tokens leave no room for a response in a context of {context}"
    if settings.max_prompt_len is not None and tokens > settings.max_prompt_len and not evaluation:
        return f"{tokens} tokens, and rollout.max_prompt_len is {settings.max_prompt_len}"
    return ""


def demonstration_excess(sample: Sample, settings: RolloutSettings, context: int | None) -> str:
    """Return why a demonstration is too long, or "" if it is not."""
    if context is not None and len(sample.tokens) > context:
        return f"{len(sample.tokens)} tokens with its response, in a context of {context}"
    return prompt_excess(sample.prompt_length, settings, None)


def drop_long(
    items: Iterable[Item],
    prompt_of: Callable[[Item], Prompt],
    excess: Callable[[Item], str],
    on_skipped: Callable[[Prompt], object] = lambda prompt: None,
    *,
    mixed: bool = False,
) -> Iterator[Item]:
    """Yield the items for which `excess` returns "". The prompts of the others are passed to `on_skipped`.

    Raises RecordError if all are too long: at the end of prompts that were read from the start, after MOST_EPOCHS drops
    of the same line, or after MOST_IN_A_ROW drops in a row. The limit per line does not apply to prompts that are
    `mixed` by weight, because a line may repeat there before another comes.
    """
    dropped: Counter[str] = Counter()
    from_start: bool | None = None
    reason = ""
    for item in items:
        prompt = prompt_of(item)
        from_start = prompt.index == 0 if from_start is None else from_start
        if not (fault := excess(item)):
            dropped.clear()
            from_start = False
            yield item
            continue
        reason = fault
        name_dropped(prompt, reason)
        on_skipped(prompt)
        dropped[prompt.source_location] += 1
        repeats = prompt.source_location and not mixed and dropped[prompt.source_location] >= MOST_EPOCHS
        if repeats or dropped.total() == MOST_IN_A_ROW:
            raise all_too_long(dropped.total(), reason)
    if from_start and dropped:
        raise all_too_long(dropped.total(), reason)


def name_dropped(prompt: Prompt, reason: str) -> None:
    """Log a skipped prompt and the reason, once per prompt. After a few, log that there are more."""
    name = prompt.source_location or f"prompt {prompt.index}"
    if name in _named or len(_named) > NAMED:
        return
    _named.add(name)
    more = len(_named) > NAMED
    logger.warning(
        "skipping more prompts, which are only counted from now on" if more else f"{name}: skipped: {reason}"
    )


def all_too_long(count: int, reason: str) -> RecordError:
    """Return the error for prompts that were all skipped."""
    read = quantity(count, "prompt")
    if reason.startswith("token "):
        return RecordError(f"{read} read, all skipped, the last one because {reason}. Use the tokenizer "
                           f"of this model, or write the prompts without such tokens.")  # fmt: skip
    return RecordError(
        f"{read} read, all too long (the last one: {reason}). Raise rollout.max_prompt_len or "
        f"rollout.max_context_len, or use shorter prompts"
    )

"""Drops prompts that the model cannot read or answer, counts them and reports the first few with their line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from slimectl.errors import RecordError
from slimectl.settings.rollout import RolloutSettings
from slimectl.stdio import logger
from slimectl.types import Prompt, Sample

Item = TypeVar("Item")

NAMED = 5
"""Dropped prompts that a process reports one by one; further ones are only counted."""
MOST_IN_A_ROW = 10_000
MOST_EPOCHS = 4
"""Limits after which all prompts count as too long: consecutive drops, and drops of one and the same line."""

_named: set[str] = set()


def prompt_excess(tokens: int, settings: RolloutSettings, context: int | None, *, evaluation: bool = False) -> str:
    """Return the reason why a prompt of `tokens` tokens is too long for a model of context `context`; "" if it fits.

    Evaluations use the same prompts for every model: rollout.max_prompt_len does not apply to them.
    """
    if context is not None and tokens >= context:
        return f"{tokens} tokens leave no room for an answer in a context of {context}"
    if settings.max_prompt_len is not None and tokens > settings.max_prompt_len and not evaluation:
        return f"{tokens} tokens, and rollout.max_prompt_len is {settings.max_prompt_len}"
    return ""


def demonstration_excess(sample: Sample, settings: RolloutSettings, context: int | None) -> str:
    """Return the reason why a demonstration is too long; "" if it is not."""
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
    """Yield the items for which `excess` returns ""; the prompts of the others are passed to `on_dropped`.

    Raises RecordError if all are too long: at the end of prompts that were read from the first one on, after
    MOST_EPOCHS drops of the same line, or after 10 000 drops in a row. The limit per line does not apply to prompts
    that are `mixed` by weight, where a line may repeat before another comes.
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
        on_dropped(prompt)
        dropped[prompt.source_location] += 1
        repeats = prompt.source_location and not mixed and dropped[prompt.source_location] >= MOST_EPOCHS
        if repeats or dropped.total() == MOST_IN_A_ROW:
            raise all_too_long(dropped.total(), reason)
    if from_start and dropped:
        raise all_too_long(dropped.total(), reason)


def name_dropped(prompt: Prompt, reason: str) -> None:
    """Log the dropped prompt and the reason once per prompt; after a few, that there are more."""
    name = prompt.source_location or f"prompt {prompt.index}"
    if name in _named or len(_named) > NAMED:
        return
    _named.add(name)
    more = len(_named) > NAMED
    logger.warning("more prompts are left out: only counted from here on" if more else f"{name}: left out: {reason}")


def all_too_long(count: int, reason: str) -> RecordError:
    """Return the error for prompts that are all left out."""
    if reason.startswith("token "):
        return RecordError(f"all {count} prompts read are left out, the last one because {reason}. Use the tokenizer "
                           f"of this model, or write the prompts without such tokens.")  # fmt: skip
    return RecordError(
        f"all {count} prompts read are too long, the last one with {reason}; raise rollout.max_prompt_len or "
        f"rollout.max_context_len, or give shorter prompts"
    )

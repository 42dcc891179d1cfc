"""Turns of a sample: consecutive tokens of one author, as recorded by a session or implied by the loss mask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, zip_longest
from typing import Any, NotRequired, TypedDict

from slimectl.types import VERSION_SPANS


class Turn(TypedDict):
    """Tokens of one author: "prompt", "policy" or "environment"."""

    author: str
    start: int
    end: int
    taught: bool
    """Whether any token has loss mask 1."""
    reward: NotRequired[float]
    """Reward of this turn alone."""


def turns_of(record: Mapping[str, Any], prompt_length: int) -> list[Turn]:
    """Return runs of tokens of one author: the prompt, the policy, the environment (tools, templates, users).

    Turns of the policy that a program's session recorded (`metadata.agent.turns`) are used unchanged. Without them, the
    policy wrote the tokens with loss mask 1, and tokens with a log-probability or a weight version, which another
    branch trains on. `taught` is true if any token of a turn has loss mask 1.
    """
    length = int(record.get("response_length", 0))
    mask = [bool(bit) for bit in record.get("loss_mask") or [1] * length]
    spans = _recorded_turns(record, length)
    if spans is None:
        keys: list[Any] = list(zip(_sampled(record, mask), mask, strict=True))
    else:
        keys = [None] * length
        for number, (first, end) in enumerate(spans):
            keys[first:end] = [number] * (end - first)
    prompt: Turn = {"author": "prompt", "start": 0, "end": prompt_length, "taught": False}
    turns = [prompt] if prompt_length else []
    position = 0
    for key, run in groupby(keys):
        end = position + len(list(run))
        by_policy = key is not None if spans is not None else key[0]
        turns.append({"author": "policy" if by_policy else "environment", "start": prompt_length + position,
                      "end": prompt_length + end, "taught": any(mask[position:end])})  # fmt: skip
        position = end
    for turn, reward in _rewards(record.get("turn_rewards"), turns, prompt_length):
        turn["reward"] = reward
    return turns


def _rewards(entries: Any, turns: Sequence[Turn], prompt_length: int) -> Iterator[tuple[Turn, float]]:
    """Yield the turns that have a reward, found by their first token or, for plain numbers, by their order."""
    if not isinstance(entries, list):
        return
    own = [turn for turn in turns if turn["author"] == "policy"]
    starts = {turn["start"] - prompt_length: turn for turn in own}
    for number, entry in enumerate(entries):
        reward = entry.get("reward") if isinstance(entry, dict) else entry
        if isinstance(entry, dict) and isinstance(entry.get("start"), int):
            turn = starts.get(entry["start"])
        else:
            turn = own[number] if len(own) == len(entries) else None
        if turn is not None and isinstance(reward, int | float):
            yield turn, reward


def _recorded_turns(record: Mapping[str, Any], length: int) -> list[tuple[int, int]] | None:
    """Return the spans of the policy's turns in the response as recorded by a session, or None if there are none."""
    agent = (record.get("metadata") or {}).get("agent")
    turns = agent.get("turns") if isinstance(agent, dict) else None
    try:
        spans = [(int(first), int(end)) for first, end in turns or ()]
    except (TypeError, ValueError):  # a samples file may contain anything
        return None
    edges = [0, *(edge for span in spans for edge in span), length]
    return spans if spans and edges == sorted(edges) else None


def _sampled(record: Mapping[str, Any], mask: Sequence[bool]) -> list[bool]:
    """Return for each token of the response whether the policy sampled it, as far as the record tells."""
    sampled = [bool(bit or value) for bit, value in zip_longest(mask, record.get("rollout_log_probs") or ())]
    for span in (record.get("metadata") or {}).get(VERSION_SPANS) or ():
        with suppress(TypeError, ValueError, IndexError):
            first, end = max(0, int(span[1])), min(len(mask), int(span[2]))
            sampled[first:end] = [True] * max(0, end - first)
    return sampled[: len(mask)]

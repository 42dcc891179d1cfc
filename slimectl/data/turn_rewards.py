"""Rewards of the policy's turns: their form in a sample, their place in the response, and their numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from slimectl.data.checks import finite
from slimectl.errors import RecordError
from slimectl.types import RewardedTurn, Sample, TurnKey

KEYS = frozenset({"reward", "start", "end", "turn", "player", "state"})
FORM = 'a number, or an object with "reward", and optionally "start" and "end", "turn", "player", "state"'
REMEDY = "Sample from an environment (rollout.env), or set sample.turn_rewards in your agent or reward function"


def checked_turn_rewards(value: Any) -> list[Any]:
    """Return `value` if it has the form of Sample.turn_rewards. Raises ValueError with the reason."""
    if not isinstance(value, list):
        raise ValueError(f"expected a list with an entry for each turn, got {type(value).__name__}")
    end = 0
    for number, entry in enumerate(value):
        place = f"turn {number}"
        if not isinstance(entry, Mapping):
            _check_number(entry, place)
            continue
        if unknown := sorted(map(str, entry.keys() - KEYS)):
            raise ValueError(f"{place}: unknown key {unknown[0]!r}, expected {FORM}")
        _check_number(entry.get("reward"), place)
        for name in ("turn", "player", "start", "end"):
            if name in entry and (type(entry[name]) is not int or entry[name] < 0):
                raise ValueError(f"{place}: {name} must be a whole number of at least 0, got {entry[name]!r}")
        if not isinstance(entry.get("state"), str | None):
            raise ValueError(f"{place}: state must be a string, got {type(entry['state']).__name__}")
        if ("start" in entry) != ("end" in entry):
            raise ValueError(f"{place}: start and end must be given together")
        if "start" in entry:
            if not end <= entry["start"] <= entry["end"]:
                raise ValueError(f"{place}: tokens {entry['start']} to {entry['end']} overlap the turn before it")
            end = entry["end"]
    return value


def _check_number(value: Any, place: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{place}: got {type(value).__name__}, expected {FORM}")
    try:
        finite(value)
    except ValueError as error:
        raise ValueError(f"{place}: reward: {error}") from None


def last_token(entries: Iterable[Any]) -> int:
    """Return the last end of a turn that entries of Sample.turn_rewards name, or 0 if they name none."""
    return max((entry.get("end", 0) for entry in entries if isinstance(entry, Mapping)), default=0)


def numbered_turns(samples: Iterable[Sample]) -> Iterator[tuple[Sample, list[tuple[TurnKey, Mapping[str, Any]]]]]:
    """Yield every sample with the keys and entries of its turns. Numbers become entries with a reward.

    Turns without a number continue the numbers of their attempt and player, in the order of the samples. Raises
    RecordError if an entry has another form.
    """
    counts: Counter[tuple[int, int, int]] = Counter()
    for sample in samples:
        try:
            values = checked_turn_rewards(sample.turn_rewards or [])
        except ValueError as error:
            raise RecordError(f"sample {sample.index}: turn_rewards: {error}") from None
        turns = []
        for value in values:
            entry: Mapping[str, Any] = value if isinstance(value, Mapping) else {"reward": value}
            episode = sample.group_index, sample.trajectory_id, entry.get("player", 0)
            number = entry.get("turn", counts[episode])
            counts[episode] = max(counts[episode], number + 1)
            turns.append((TurnKey(*episode, number), entry))
        yield sample, turns


def rewarded_turns(samples: Sequence[Sample], name: str) -> list[list[RewardedTurn]]:
    """Return the turns of each sample, for the algorithm `name`. Raises RecordError if a sample has no turn rewards."""
    for sample in samples:
        if sample.turn_rewards is None:
            raise RecordError(f"sample {sample.index}: no turn_rewards, which {name} needs. {REMEDY}")
    return [_placed(sample, turns) for sample, turns in numbered_turns(samples)]


def _placed(sample: Sample, turns: Sequence[tuple[TurnKey, Mapping[str, Any]]]) -> list[RewardedTurn]:
    """Return the turns of a sample with their tokens. Raises RecordError if they do not fit the response."""
    spans: list[tuple[int, int]] = [(entry["start"], entry["end"]) for _, entry in turns if "start" in entry]
    if len(spans) != len(turns):
        spans = policy_turns(sample)
        if len(spans) != len(turns):
            raise RecordError(
                f"sample {sample.index}: turn_rewards has {len(turns)} entries, but the policy took {len(spans)} "
                f"turns. Give one for each turn, or add start and end to every entry"
            )
    if spans and spans[-1][1] > sample.response_length:
        raise RecordError(
            f"sample {sample.index}: turn_rewards: tokens {spans[-1][0]} to {spans[-1][1]} are outside of the "
            f"response of {sample.response_length} tokens"
        )
    return [
        RewardedTurn(key, start, end, float(entry["reward"]), entry.get("state"))
        for (key, entry), (start, end) in zip(turns, spans, strict=True)
    ]


def policy_turns(sample: Sample) -> list[tuple[int, int]]:
    """Return the tokens of the policy's turns: as a session recorded them, or runs of tokens with loss mask 1."""
    agent = sample.metadata.get("agent")
    if isinstance(agent, Mapping) and "turns" in agent:
        return [(start, end) for start, end in agent["turns"]]
    mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
    spans, position = [], 0
    for bit, run in groupby(mask):
        end = position + len(list(run))
        if bit:
            spans.append((position, end))
        position = end
    return spans

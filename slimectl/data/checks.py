"""Validators of single JSON values: each returns the value, or raises ValueError with the reason."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable
from typing import Any

from slimectl.data.json_codec import nearest_float32
from slimectl.system.stdio import logger
from slimectl.types import Status

Check = Callable[[Any], Any]
NUMBERS = frozenset({int, float})
FLOATS = frozenset({float})
INTEGERS = frozenset({int})
STATUSES = {status.value: status for status in Status}
LARGEST_ID = 2**63 - 1
PAIRS = frozenset({list, tuple})
LARGEST_LOG_PROB = 1e-3
"""A log-probability is at most 0, up to rounding."""

_warned: set[str] = set()


def optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def a_count(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"expected a whole number, got {shown(value)}")
    if not 0 <= value <= LARGEST_ID:
        raise ValueError(f"expected a number from 0 to 2^63, got {shown(value)}")
    return value


def a_number(value: Any) -> float:
    if type(value) not in NUMBERS:
        raise ValueError(f"expected a number, got {shown(value)}")
    return finite(value)


def finite(value: float) -> float:
    """Convert to a float. Raises ValueError if the number is not finite or too large for a float."""
    try:
        number = float(value)
    except OverflowError:
        raise ValueError("a number too large for a float") from None
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a finite number")
    return number


def a_text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"expected a string, got {shown(value)}")
    return value


def a_bool(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"expected true or false, got {shown(value)}")
    return value


def a_mapping(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError(f"expected an object, got {shown(value)}")
    return value


def a_scalar(value: Any) -> str | int | float:
    if type(value) is int or type(value) is str:
        return value
    if type(value) is float:
        return finite(value)
    raise ValueError(f"expected a string or a number, got {shown(value)}. Put anything else into metadata.")


def a_label(value: Any) -> str | int | float | list[Any] | dict[str, Any]:
    """Accept a string or a number, and for user rewards also a list or an object."""
    return value if type(value) in (list, dict) else a_scalar(value)


def a_reward(value: Any) -> float | dict[str, Any]:
    return value if type(value) is dict else a_number(value)


def a_chat(value: Any) -> str | list[dict[str, Any]]:
    """Accept a string, or a list of messages that have a role."""
    if type(value) is str:
        return value
    if type(value) is not list:
        raise ValueError(f"expected a string or a chat list of {{role, content}}, got {shown(value)}")
    for i, message in enumerate(value):
        if type(message) is not dict or type(message.get("role")) is not str:
            raise ValueError(f"message {i} of the chat: expected {{role, content}}, got {shown(message)}")
        is_result = message["role"] in ("tool", "function") and type(message.get("content")) is dict
        if not is_result and type(message.get("content")) not in (str, list, type(None)):
            raise ValueError(f"message {i} of the chat: content is {shown(message['content'])}, expected a string")
    return value


def a_status(value: Any) -> Status:
    status = STATUSES.get(value) if type(value) is str else None
    if status is None:
        raise ValueError(f"{shown(value)} is not one of {', '.join(STATUSES)}")
    return status


def texts(value: Any) -> list[str]:
    return _all_of(value, frozenset({str}), "strings")


def token_ids(value: Any) -> list[int]:
    ids: list[int] = _all_of(value, INTEGERS, "token ids")
    try:
        array("I", ids)  # checks the range in one pass
    except OverflowError:
        if min(ids) < 0 or max(ids) > LARGEST_ID:
            raise ValueError(f"{shown(min(ids) if min(ids) < 0 else max(ids))} is not a token id") from None
    return ids


def mask_values(value: Any) -> list[int]:
    mask: list[int] = _all_of(value, INTEGERS, "0 and 1")
    if mask.count(1) + mask.count(0) != len(mask):
        raise ValueError(f"{shown(next(v for v in mask if v not in (0, 1)))} is neither 0 nor 1")
    return mask


def floats(value: Any) -> list[float]:
    # If the sum is finite, so is every number. This is six times as fast as checking each one.
    if type(value) is list and FLOATS.issuperset(map(type, value)) and math.isfinite(sum(value)):
        return value
    return [finite(number) for number in _all_of(value, NUMBERS, "numbers")]


def float32_numbers(value: Any) -> list[float]:
    """Accept a list of numbers, and round each to float32."""
    are_floats = type(value) is list and FLOATS.issuperset(map(type, value))
    numbers = value if are_floats else floats(value)
    rounded = nearest_float32(numbers)
    if not math.isfinite(sum(rounded)):
        large = next((number for number, near in zip(floats(numbers), rounded, strict=True) if math.isinf(near)), None)
        if large is not None:
            raise ValueError(f"{large:g} is too large for float32")
    return rounded


def top_tokens(value: Any) -> list[list[list[Any]]]:
    """Accept, for every token of a response, a list of [token, log-probability], the likeliest first, each once."""
    for i, pairs in enumerate(_all_of(value, frozenset({list}), "lists of [token, log-probability]")):
        if not all(type(pair) in PAIRS and len(pair) == 2 for pair in pairs):
            raise ValueError(f"expected pairs of [token, log-probability] at [{i}]")
        ids, log_probs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        try:
            token_ids(ids)
            numbers = floats(log_probs)
        except ValueError as error:
            raise ValueError(f"{error}, in the pairs at [{i}]") from None
        if len(set(ids)) < len(ids):
            raise ValueError(f"a token occurs twice at [{i}]")
        if sorted(numbers, reverse=True) != numbers:
            raise ValueError(f"the pairs at [{i}] are not sorted, the likeliest first")
        if numbers and numbers[0] > LARGEST_LOG_PROB:
            raise ValueError(f"{numbers[0]:g} at [{i}] is not the logarithm of a probability")
    return value  # type: ignore[no-any-return]


def _all_of(value: Any, types: frozenset[type], kind: str) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"expected a list of {kind}, got {shown(value)}")
    if not types.issuperset(map(type, value)):
        i = next(i for i, member in enumerate(value) if type(member) not in types)
        raise ValueError(f"expected a list of {kind}, got {shown(value[i])} at [{i}]")
    return value


def shown(value: Any) -> str:
    """Format a value for an error message: short, in JSON terms.

    >>> shown(None), shown([1, 2]), shown("long " * 20)
    ('null', 'a list', "'long long long long long long long long…'")
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, int) and abs(value) > LARGEST_ID:
        return "a number above 2^63"
    text = repr(value)
    return text if len(text) <= 42 else f"{text[:40]}…{text[-1]}"


def warn_near_miss(record: str, key: str, known_keys: Iterable[str]) -> None:
    """Warn once if `key` looks like a misspelling of a known one."""
    name = f"{record}.{key}"
    if name in _warned:
        return
    _warned.add(name)
    for right in known_keys:
        if one_edit_apart(key, right):
            logger.warning(f"{name}: unknown key, kept unchanged. Did you mean {right}?")


def one_edit_apart(a: str, b: str) -> bool:
    """Return whether one insertion, deletion, replacement or swap of adjacent characters turns `a` into `b`."""
    if len(a) > len(b):
        a, b = b, a
    if len(b) - len(a) > 1 or a == b:
        return False
    i = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    if len(a) < len(b):
        return a[i:] == b[i + 1 :]
    return a[i + 1 :] == b[i + 1 :] or (a[i : i + 2] == b[i : i + 2][::-1] and a[i + 2 :] == b[i + 2 :])

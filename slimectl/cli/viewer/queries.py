"""Queries on samples files: sorted groups, histograms, one prompt over time, comparison of two files.

Every result is a JSON object. Rows are numbers of samples in a file. A group is the samples of one prompt occurrence.
NaN, which JSON does not have, becomes null.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from slimectl.chats.messages import content_text
from slimectl.cli.viewer.conversation import own_prompt
from slimectl.data.filter_expression import FilterExpression, field_of
from slimectl.data.sample_index import COLUMNS, STATUSES, SampleIndex, prompt_hash
from slimectl.errors import SettingsError

PREVIEW = 240
"""Maximum characters of a prompt or response in a list."""
PAGE = slice(50)
"""Rows of a list that are returned unless others are asked for."""
MAX_GROUPS = 500
MAX_GROUP_ROWS = 256
"""Maximum samples of a group in a list. The page of the group shows all."""
BINS = 24

MATCHED_COLUMNS = {
    "reward": "reward", "response_length": "response_length", "index": "index", "group_index": "group",
    "rollout_id": "trajectory", "status": "status",
}  # fmt: skip
"""Fields of a filter that are columns of the index. A filter with only these fields does not read lines."""

SORT_KEYS: dict[str, Callable[[dict[str, np.ndarray], np.ndarray], np.ndarray]] = {
    "group": lambda column, starts: column["group"][starts].astype(float),
    "reward": lambda column, starts: _group_mean(column["reward"], starts),
    "best": lambda column, starts: np.fmax.reduceat(column["reward"], starts),
    "worst": lambda column, starts: np.fmin.reduceat(column["reward"], starts),
    "spread": lambda column, starts: np.sqrt(_group_variance(column["reward"], starts)),
    "length": lambda column, starts: _group_mean(column["response_length"], starts),
    "longest": lambda column, starts: np.maximum.reduceat(column["response_length"], starts).astype(float),
    "size": lambda column, starts: np.diff([*starts, len(column["group"])]).astype(float),
    "mismatch": lambda column, starts: _group_mean(column["mismatch"], starts),
    "version": lambda column, starts: np.fmin.reduceat(column["version"], starts),
}
"""Sort keys of groups. They map columns in group order and the starts of groups to a number per group."""


def list_groups(
    index: SampleIndex,
    *,
    where: str = "",
    search: str = "",
    sort: str = "group",
    descending: bool = False,
    page: slice = PAGE,
) -> dict[str, Any]:
    """Return a page of the groups with a matching sample, each with the values of all its samples.

    Raises SettingsError for a filter that cannot be read.
    """
    columns = index.columns()
    rows = matching_rows(index, columns, where=where, search=search)
    total = {"total": 0, "samples": len(columns["group"]), "matches": len(rows), "complete": index.complete,
             "bad_lines": index.bad_lines, "errors": index.errors, "groups": []}  # fmt: skip
    if not len(rows):
        return total
    order = np.argsort(columns["group"], kind="stable")
    sorted_columns = {name: column[order] for name, column in columns.items() if name in SORT_COLUMNS}
    groups, starts = np.unique(sorted_columns["group"], return_index=True)
    matched = np.isin(groups, np.unique(columns["group"][rows]))
    values = SORT_KEYS.get(sort, SORT_KEYS["group"])(sorted_columns, starts)
    # NaN sorts last in both directions.
    keys = np.where(np.isnan(values), np.inf, -values if descending else values)
    ranking = np.argsort(keys, kind="stable")
    ranking = ranking[matched[ranking]]
    ends = np.append(starts[1:], len(order))
    page_groups, matching = ranking[page][:MAX_GROUPS].tolist(), set(rows.tolist())
    return total | {
        "total": len(ranking),
        "groups": [_group_line(index, columns, order[starts[at] : ends[at]].tolist(), matching) for at in page_groups],
    }


SORT_COLUMNS = ("group", "reward", "response_length", "mismatch", "version")


def matching_rows(
    index: SampleIndex, columns: dict[str, np.ndarray], *, where: str, search: str = "", start: int = 0
) -> np.ndarray:
    """Return the rows from `start` on that contain the searched text and match the filter. Raises SettingsError."""
    rows = np.arange(start, len(columns["group"]))
    if search:
        rows = np.array([row for row in index.search(search) if row >= start], dtype=np.int64)
    if where.strip():
        expression = FilterExpression(where)
        if expression.names <= MATCHED_COLUMNS.keys():
            rows = rows[_column_mask(expression, columns, rows)]
        else:
            names = expression.names & MATCHED_COLUMNS.keys()  # a reward that is an object counts as its number
            values = zip(*(field_values(index, columns, rows, name) for name in names), strict=True)
            columns_by_row = (dict(zip(names, row, strict=True)) for row in values) if names else repeat({})
            pairs = zip(rows.tolist(), columns_by_row, strict=False)
            matches = [row for row, fields in pairs if expression.matches(index.record(row), fields)]
            rows = np.array(matches, dtype=np.int64)
    return rows


def _column_mask(expression: FilterExpression, columns: dict[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Evaluate a filter on the columns of the index, without reading lines, once per combination of values."""
    combination, values = np.zeros(len(rows), dtype=np.int64), []
    for name in expression.names:
        distinct, codes = np.unique(columns[MATCHED_COLUMNS[name]][rows], return_inverse=True)
        # Renumber combinations at each column, so that the numbers do not overflow.
        _, combination = np.unique(combination * len(distinct) + codes, return_inverse=True)
        values.append((name, columns[MATCHED_COLUMNS[name]][rows]))
    _, first, inverse = np.unique(combination, return_index=True, return_inverse=True)
    records = ({name: _field(name, column[row].item()) for name, column in values} for row in first.tolist())
    return np.array([expression.matches(record) for record in records], dtype=bool)[inverse]


def field_values(index: SampleIndex, columns: dict[str, np.ndarray], rows: np.ndarray, name: str) -> Iterator[Any]:
    """Yield the value of a field, or of a column of the index (mismatch, advantage, version), for each row."""
    column = MATCHED_COLUMNS.get(name) or (name if name in ("mismatch", "advantage", "version") else None)
    if column is not None:
        return (_field(name, value) for value in columns[column][rows].tolist())
    return (field_of(record, name) for record in index.records(rows.tolist()))


def prompts_with(index: SampleIndex, text: str) -> dict[int, Any]:
    """Return the prompts that contain a text, ignoring case, by their hash."""
    columns = index.columns()
    rows = np.array(index.search(text), dtype=np.int64)
    _, first = np.unique(columns["prompt"][rows], return_index=True)
    prompts = {
        int(columns["prompt"][row]): index.record(row).get("prompt", "") for row in rows[np.sort(first)].tolist()
    }
    return {number: prompt for number, prompt in prompts.items() if text.lower() in prompt_text(prompt).lower()}


def prompt_text(prompt: Any) -> str:
    """Return the text of a prompt, or the texts of a chat's messages."""
    if isinstance(prompt, list):
        return "\n".join(content_text(message.get("content", "")) for message in prompt if isinstance(message, dict))
    return str(prompt)


def _field(name: str, value: Any) -> Any:
    """Return a value of a column as it is in the record."""
    if name == "status":
        return STATUSES[value].value
    return None if isinstance(value, float) and math.isnan(value) else value


def group(index: SampleIndex, number: int) -> dict[str, Any]:
    """Return the prompt of a group and all its samples."""
    columns = index.columns()
    rows = np.flatnonzero(columns["group"] == number).tolist()
    samples = [_answer(index, columns, row) for row in rows]
    first = index.record(rows[0]) if rows else {}
    return {
        "group": number,
        "prompt": _group_prompt(index, columns, rows, first),
        "label": first.get("label"),
        "metadata": first.get("metadata"),
        "tools": first.get("tools"),
        "hash": int(columns["prompt"][rows[0]]) if rows else None,
        "samples": samples,
    }


def _group_prompt(
    index: SampleIndex, columns: dict[str, np.ndarray], rows: Sequence[int], first: dict[str, Any]
) -> Any:
    """Return the prompt of a group, given its first record. For branches, return the part that they share."""
    attempt = columns["trajectory"][rows[:MAX_GROUP_ROWS]]
    branches = [row for row, number in zip(rows, attempt, strict=False) if number == attempt[0]]
    return own_prompt([first, *(index.record(row) for row in branches[1:])]) if branches else ""


def histograms(index: SampleIndex, *, version: int | None) -> dict[str, Any]:
    """Return histograms of reward, length, staleness and mismatch. `version` is the weight version that was trained."""
    columns = index.columns()
    values = {
        "reward": columns["reward"],
        "length": columns["response_length"].astype(float),
        "staleness": version - columns["version"] if version is not None else np.array([]),
        "mismatch": columns["mismatch"],
    }
    counts = {status.value: int((columns["status"] == number).sum()) for number, status in enumerate(STATUSES)}
    return {
        "histograms": {name: histogram(column) for name, column in values.items()},
        "statuses": {name: count for name, count in counts.items() if count},
        "samples": len(columns["group"]),
        "groups": len(np.unique(columns["group"])),
        "flat_groups": _flat_groups(columns),
        "complete": index.complete,
    }


def histogram(values: np.ndarray) -> dict[str, Any] | None:
    """Return the counts of values in bins of equal width, or None if there is no finite value.

    If there are few distinct values, each has its own bin.
    """
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    distinct, counts = np.unique(finite, return_counts=True)
    if len(distinct) > BINS:
        counts, edges = np.histogram(finite, bins=BINS)
        centers = (edges[:-1] + edges[1:]) / 2
    else:
        centers = distinct
    return {
        "centers": centers.tolist(), "counts": counts.tolist(), "binned": len(distinct) > BINS,
        "mean": float(finite.mean()), "median": float(np.median(finite)),
        "minimum": float(finite.min()), "maximum": float(finite.max()),
    }  # fmt: skip


def prompt_in(index: SampleIndex, number: int, *, answers: int = 8) -> dict[str, Any] | None:
    """Return the responses of a file to the prompt with a hash, or None if it has none."""
    columns = index.columns()
    rows = np.flatnonzero(columns["prompt"] == number)
    if not len(rows):
        return None
    return {
        "rows": rows.tolist()[:MAX_GROUP_ROWS],
        "group": int(columns["group"][rows[0]]),
        "rewards": _numbers(columns["reward"][rows[:MAX_GROUP_ROWS]]),
        "mean": _number(_mean(columns["reward"][rows])),
        "length": _number(_mean(columns["response_length"][rows].astype(float))),
        "answers": [_answer(index, columns, row) for row in rows.tolist()[:answers]],
    }


def compare(
    before: SampleIndex,
    after: SampleIndex,
    *,
    threshold: float,
    only: str = "",
    where: str = "",
    sort: str = "",
    page: slice = PAGE,
) -> dict[str, Any]:
    """Compare the mean reward of prompts that two files share, largest changes first.

    A prompt is right if its mean reward reaches the threshold. `only` selects prompts that became "right" or "wrong".
    `where` selects prompts with a matching sample in either file. `sort` is before, after, change, or a field of the
    first sample in the second file. With a leading -, the largest come first. Raises SettingsError for a filter that
    cannot be read, and for a field that no sample has.
    """
    means_before, means_after = _mean_by_prompt(before), _mean_by_prompt(after)
    prompts = means_before.keys() & means_after.keys()
    if where.strip():
        matching = (
            index.columns()["prompt"][matching_rows(index, index.columns(), where=where)] for index in (before, after)
        )
        prompts &= {number for column in matching for number in column.tolist()}
    changes = [
        (number, means_before[number][0], means_after[number][0]) for number in prompts
        if not math.isnan(means_before[number][0] + means_after[number][0])
    ]  # fmt: skip
    became_right = {number for number, old, new in changes if old < threshold <= new}
    became_wrong = {number for number, old, new in changes if new < threshold <= old}
    shown_prompts = {"right": became_right, "wrong": became_wrong}.get(only)
    shown = sorted(
        (change for change in changes if shown_prompts is None or change[0] in shown_prompts),
        key=lambda change: (-abs(change[2] - change[1]), change[0]),
    )
    if sort:
        shown = _sorted_changes(shown, sort, after, [means_after[change[0]][1] for change in shown])
    return {
        "total": len(shown),
        "shared": len(changes),
        "became_right": len(became_right),
        "became_wrong": len(became_wrong),
        "before_mean": _number(_mean(np.array([old for _, old, _ in changes]))),
        "after_mean": _number(_mean(np.array([new for _, _, new in changes]))),
        "complete": before.complete and after.complete,
        "prompts": [
            _change(change, (before, means_before[change[0]][1]), (after, means_after[change[0]][1]))
            for change in shown[page]
        ],
    }


def _sorted_changes(
    changes: list[tuple[int, float, float]], sort: str, after: SampleIndex, rows: list[int]
) -> list[tuple[int, float, float]]:
    """Return the lines of a comparison, sorted as described in `compare`. `rows` are rows of the second file."""
    name = sort.removeprefix("-")
    numbers = {"before": lambda change: change[1], "after": lambda change: change[2],
               "change": lambda change: change[2] - change[1]}.get(name)  # fmt: skip
    values = (
        map(numbers, changes)
        if numbers is not None
        else field_values(after, after.columns(), np.array(rows, dtype=np.int64), name)
    )
    ranked = [(sort_rank(value), change) for value, change in zip(values, changes, strict=True)]
    present = [(rank, change) for rank, change in ranked if rank is not None]
    if changes and not present:
        raise unknown_field(sort, after.record(rows[0]))
    present.sort(key=lambda pair: pair[0], reverse=sort.startswith("-"))
    return [change for _, change in present] + [change for rank, change in ranked if rank is None]


def sort_rank(value: Any) -> tuple[int, float, str] | None:
    """Return a sort key with which numbers come before texts, or None for a missing value."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))


def unknown_field(sort: str, record: dict[str, Any]) -> SettingsError:
    """Return the error for a sort field that no sample has. `record` is one of the samples."""
    return SettingsError(f"--sort {sort}: no sample has this field. Fields of a sample: {', '.join(sorted(record))}")


def _change(
    change: tuple[int, float, float], before: tuple[SampleIndex, int], after: tuple[SampleIndex, int]
) -> dict[str, Any]:
    """Return a line of a comparison. `before` and `after` are (index, first row of the prompt in it)."""
    number, old, new = change
    (old_index, old_row), (new_index, new_row) = before, after
    record = old_index.record(old_row)
    return {
        "hash": number,
        "prompt": preview(record.get("prompt", "")),
        "label": record.get("label"),
        "before": old,
        "after": new,
        "before_row": old_row,
        "after_row": new_row,
        "before_answer": _text(record),
        "after_answer": _text(new_index.record(new_row)),
    }


def preview(prompt: Any) -> str:
    """Return the beginning of a prompt, or of a chat's last message."""
    if isinstance(prompt, list):
        contents = [content_text(message.get("content")) for message in prompt if isinstance(message, dict)]
        prompt = contents[-1] if contents else ""
    return (prompt if isinstance(prompt, str) else str(prompt))[:PREVIEW]


def _text(record: dict[str, Any]) -> str:
    return str(record.get("response", ""))[:PREVIEW]


def _group_line(
    index: SampleIndex, columns: dict[str, np.ndarray], rows: Sequence[int], matching: set[int]
) -> dict[str, Any]:
    first = index.record(rows[0])
    rewards = columns["reward"][rows]
    return {
        "group": int(columns["group"][rows[0]]),
        "hash": int(columns["prompt"][rows[0]]),
        "prompt": preview(_group_prompt(index, columns, rows, first)),
        "label": first.get("label"),
        "rows": rows[:MAX_GROUP_ROWS],
        "size": len(rows),
        "matches": [row for row in rows[:MAX_GROUP_ROWS] if row in matching],
        "rewards": _numbers(rewards[:MAX_GROUP_ROWS]),
        "attempts": columns["trajectory"][rows[:MAX_GROUP_ROWS]].tolist(),
        "lengths": columns["response_length"][rows[:MAX_GROUP_ROWS]].tolist(),
        "statuses": [STATUSES[number].value for number in columns["status"][rows[:MAX_GROUP_ROWS]]],
        "mean": _number(_mean(rewards)),
        "length": _number(_mean(columns["response_length"][rows].astype(float))),
        "mismatch": _number(_mean(columns["mismatch"][rows])),
        "flat": bool(len(rewards) > 1 and np.nanmax(rewards) == np.nanmin(rewards)) if _any(rewards) else False,
    }


def _answer(index: SampleIndex, columns: dict[str, np.ndarray], row: int) -> dict[str, Any]:
    """Return a sample for the pages of groups and prompts."""
    record = index.record(row)
    response = str(record.get("response", ""))
    return {
        "row": row,
        "index": int(columns["index"][row]),
        "trajectory": int(columns["trajectory"][row]),
        "reward": record.get("reward"),
        "score": _number(columns["reward"][row]),
        "status": STATUSES[columns["status"][row]].value,
        "length": int(columns["response_length"][row]),
        "advantage": _number(columns["advantage"][row]),
        "mismatch": _number(columns["mismatch"][row]),
        "versions": record.get("weight_versions") or [],
        "removed": bool(record.get("remove_sample")),
        "response": response[:MAX_RESPONSE],
        "cut": len(response) > MAX_RESPONSE,
        "explanation": (record.get("metadata") or {}).get("explanation"),
        "error": (record.get("metadata") or {}).get("error"),
    }


MAX_RESPONSE = 100_000
"""Maximum characters of a response in a group. The page of the sample shows all."""


def _flat_groups(columns: dict[str, np.ndarray]) -> int:
    """Return the number of groups with two or more samples and equal rewards, which carry no signal."""
    order = np.argsort(columns["group"], kind="stable")
    groups, starts = np.unique(columns["group"][order], return_index=True)
    if not len(groups):
        return 0
    rewards = columns["reward"][order]
    equal = np.fmax.reduceat(rewards, starts) == np.fmin.reduceat(rewards, starts)
    return int((equal & (np.diff([*starts, len(order)]) > 1)).sum())


def _mean_by_prompt(index: SampleIndex) -> dict[int, tuple[float, int]]:
    """Return (mean reward, first row) of each prompt by its hash."""
    columns = index.columns()
    numbers, first, inverse = np.unique(columns["prompt"], return_index=True, return_inverse=True)
    if not len(numbers):
        return {}
    counts = np.bincount(inverse)
    means = np.bincount(inverse, weights=columns["reward"]) / counts
    return {int(n): (float(m), int(row)) for n, m, row in zip(numbers, means, first, strict=True)}


def _group_mean(column: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the mean of the finite values of each group, or NaN for a group without any."""
    valid = np.isfinite(column)
    counts = np.add.reduceat(valid.astype(float), starts)
    sums = np.add.reduceat(np.where(valid, column, 0.0), starts)
    means = np.full(len(starts), math.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means


def _group_variance(column: np.ndarray, starts: np.ndarray) -> np.ndarray:
    mean = _group_mean(column, starts)
    deviations = column - np.repeat(mean, np.diff([*starts, len(column)]))
    return _group_mean(deviations**2, starts)


def _any(values: np.ndarray) -> bool:
    return bool(np.isfinite(values).any())


def _mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if _any(values) else math.nan


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _numbers(values: np.ndarray) -> list[float | None]:
    return [_number(value) for value in values.tolist()]


assert set(SORT_COLUMNS) <= COLUMNS.keys()
__all__ = ["compare", "group", "histograms", "list_groups", "prompt_hash", "prompt_in"]

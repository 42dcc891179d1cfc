"""One sample, token by token: texts, numbers of each token, turns, and branches of its attempt."""

from __future__ import annotations

import re
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, groupby, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from slimectl.data.sample_index import SampleIndex
from slimectl.data.tool_calls import NOTATIONS
from slimectl.types import VERSION_SPANS
from slimectl.viewer.token_colours import VERSION, token_colours

MAX_TOKENS = 4000
"""Most tokens in one answer; the page asks for the next as one scrolls."""
LISTS = ("tokens", "loss_mask", "rollout_log_probs", "old_log_probs", "log_probs", "ref_log_probs",
         "teacher_log_probs", "ratios", "clipped", "advantages", "returns", "values", "loss_weights")  # fmt: skip
"""Fields with a number for each token, or for each token of the response."""
MAX_TEXT = 200_000
"""Most characters of a text in the record as shown; the raw record has all."""
MAX_BRANCHES = 200

CALLS = "|".join(
    f"{re.escape(opening)}.*?(?:{re.escape(closing)}|$)"
    for opening, closing in sorted({(notation.opening, notation.closing) for notation in NOTATIONS})
    if opening and closing
)
MARKS = re.compile(
    rf"(?P<call>{CALLS})|(?P<result><tool_response>.*?(?:</tool_response>|$))"
    r"|(?:<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>)(?P<message>\w{1,20})",
    re.DOTALL,
)
"""Marks of calls, results and messages in the text of a sample."""

Decode = Callable[[Sequence[int]], str]


def sample_view(index: SampleIndex, row: int, *, start: int, decode: Decode | None) -> dict[str, Any]:
    """Return a sample for its page, with at most MAX_TOKENS tokens from `start` on."""
    record = index.record(row)
    values = record | {name: column for name, column in index.training_record(row).items() if name in LISTS}
    tokens = record.get("tokens") or []
    end = min(len(tokens), start + MAX_TOKENS)
    prompt_length = len(tokens) - int(record.get("response_length", 0))
    turns = turns_of(record, prompt_length)
    authors = [turn["author"] for turn in turns for _ in range(turn["start"], turn["end"])][start:end]
    columns = {name: _response_slice(values[name], prompt_length, start, end) for name in LISTS[1:] if values.get(name)}
    versions = _response_slice(_versions(record), prompt_length, start, end)
    versions = [version if author == "policy" else None for version, author in zip(versions, authors, strict=False)]
    if any(version is not None and version.isdecimal() for version in versions):
        columns[VERSION] = [int(v) if v is not None and v.isdecimal() else None for v in versions]
    texts = token_texts(tokens[max(0, start - 1) : end], decode)[start > 0 :] if decode else None
    return {
        "row": row,
        "record": {name: _shortened(value) for name, value in record.items() if name not in LISTS},
        "total": len(tokens),
        "start": start,
        "prompt_length": prompt_length,
        "ids": tokens[start:end],
        "texts": texts,
        "parts": marked_parts(texts, start) if texts else [],
        "authors": authors,
        "versions": versions,
        "columns": columns,
        "colours": token_colours(columns, authors),
        "turns": turns,
        "branches": branches(index, row),
    }


def token_texts(tokens: Sequence[int], decode: Decode) -> list[str]:
    """Return the text of each token as it stands in the decoded whole.

    A token is decoded together with the one before it, because some tokenizers drop a blank at the start of a text. A
    character of several tokens is the text of its last; the others are empty.
    """
    texts: list[str] = []
    pending: list[int] = []
    before: list[int] = []
    for token in tokens:
        pending.append(token)
        text = _text_after(before, pending, decode)
        if text.endswith("�") and len(pending) < 4:
            texts.append("")
            continue
        texts.append(text)
        before, pending = pending[-1:], []
    if pending:
        texts[-1] = _text_after(before, pending, decode)
    return texts


def _text_after(before: Sequence[int], tokens: Sequence[int], decode: Decode) -> str:
    if not before:
        return decode(tokens)
    prefix, whole = decode(before), decode([*before, *tokens])
    return whole[len(prefix) :] if whole.startswith(prefix) else decode(tokens)


def _response_slice(values: Sequence[Any], prompt_length: int, start: int, end: int) -> list[Any]:
    """Return the values of the tokens in [start, end), None for tokens of the prompt."""
    prompt = max(0, min(end, prompt_length) - start)
    return [None] * prompt + list(values[max(0, start - prompt_length) : max(0, end - prompt_length)])


def _versions(record: dict[str, Any]) -> list[str | None]:
    """Return the weight version of each token of the response; None where the record does not say which one it was."""
    length = int(record.get("response_length", 0))
    versions = [str(version) for version in record.get("weight_versions") or ()]
    column: list[str | None] = [versions[0] if len(set(versions)) == 1 else None] * length
    for span in (record.get("metadata") or {}).get(VERSION_SPANS) or ():
        with suppress(TypeError, ValueError):  # a samples file may hold anything
            version, first, end = str(span[0]), max(0, int(span[1])), min(length, int(span[2]))
            column[first:end] = [version] * max(0, end - first)
    return column


def turns_of(record: dict[str, Any], prompt_length: int) -> list[dict[str, Any]]:
    """Return runs of tokens of one author: the prompt, the policy, the environment (tools, templates, users).

    Turns of the policy that a program's session recorded (`metadata.agent.turns`) are taken as they are. Without them
    the policy wrote what is taught, and of the rest what has a log-probability or a weight version: another branch
    teaches it. `taught` says whether any token of a turn has loss mask 1.
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
    turns = [{"author": "prompt", "start": 0, "end": prompt_length, "taught": False}] if prompt_length else []
    position = 0
    for key, run in groupby(keys):
        end = position + len(list(run))
        by_policy = key is not None if spans is not None else key[0]
        turns.append({"author": "policy" if by_policy else "environment", "start": prompt_length + position,
                      "end": prompt_length + end, "taught": any(mask[position:end])})  # fmt: skip
        position = end
    return turns


def _recorded_turns(record: dict[str, Any], length: int) -> list[tuple[int, int]] | None:
    """Return the spans of the policy's turns in the response as a session recorded them; None if it did not."""
    agent = (record.get("metadata") or {}).get("agent")
    turns = agent.get("turns") if isinstance(agent, dict) else None
    try:
        spans = [(int(first), int(end)) for first, end in turns or ()]
    except (TypeError, ValueError):  # a samples file may hold anything
        return None
    edges = [0, *(edge for span in spans for edge in span), length]
    return spans if spans and edges == sorted(edges) else None


def _sampled(record: dict[str, Any], mask: Sequence[bool]) -> list[bool]:
    """Return of each token of the response whether the policy sampled it, as far as the record says."""
    sampled = [bool(bit or value) for bit, value in zip_longest(mask, record.get("rollout_log_probs") or ())]
    for span in (record.get("metadata") or {}).get(VERSION_SPANS) or ():
        with suppress(TypeError, ValueError, IndexError):
            first, end = max(0, int(span[1])), min(len(mask), int(span[2]))
            sampled[first:end] = [True] * max(0, end - first)
    return sampled[: len(mask)]


def marked_parts(texts: Sequence[str], start: int) -> list[dict[str, Any]]:
    """Return the tool calls, results of tools and beginnings of messages in the texts of tokens from `start` on.

    A message is recognised by the mark of its role in a chat template, a call by the notation of its family.
    """
    ends = list(accumulate(map(len, texts)))
    return [
        {
            "kind": match.lastgroup,
            "role": match.group(match.lastgroup).strip() if match.lastgroup == "message" else None,
            "start": start + bisect_right(ends, match.start()),
            "end": start + bisect_left(ends, match.end()) + 1,
        }
        for match in MARKS.finditer("".join(texts))
        if match.lastgroup is not None
    ]


def branches(index: SampleIndex, row: int) -> dict[str, Any] | None:
    """Return the samples of one attempt as a tree of shared token prefixes; None if it has one sample."""
    columns = index.columns()
    same = columns["group"] == columns["group"][row]
    rows = np.flatnonzero(same & (columns["trajectory"] == columns["trajectory"][row])).tolist()[:MAX_BRANCHES]
    if len(rows) < 2:
        return None
    tokens = {other: list(index.record(other).get("tokens") or []) for other in rows}
    return _branch(sorted(rows, key=lambda other: tokens[other]), tokens, 0)


def _branch(rows: list[int], tokens: dict[int, list[int]], start: int) -> dict[str, Any]:
    """Return the node of rows that share their first `start` tokens."""
    first, last = tokens[rows[0]], tokens[rows[-1]]  # sorted: the prefix of these two is that of all
    limit = min(len(first), len(last))
    end = next((at for at in range(start, limit) if first[at] != last[at]), limit)
    ending = [row for row in rows if len(tokens[row]) == end]
    going_on = [row for row in rows if len(tokens[row]) > end]
    children = [_branch(list(rest), tokens, end) for _, rest in groupby(going_on, key=lambda row: tokens[row][end])]
    return {"start": start, "end": end, "rows": ending, "children": children}


def _shortened(value: Any) -> Any:
    """Return a value with every long text in it cut."""
    match value:
        case str() if len(value) > MAX_TEXT:
            return f"{value[:MAX_TEXT]}… ({len(value)} characters)"
        case dict():
            return {key: _shortened(item) for key, item in value.items()}
        case list():
            return [_shortened(item) for item in value]
    return value


class Decoders:
    """Tokenizers by model folder, loaded when first needed."""

    def __init__(self, load: Callable[[Path], Any]) -> None:
        self._load = load
        self._decoders: dict[Path, Decode | None] = {}
        self._lock = threading.Lock()

    def decoder(self, folder: Path | None) -> Decode | None:
        """Return the decoder of a folder's tokenizer; None if it has none that loads."""
        if folder is None:
            return None
        folder = folder.resolve()
        with self._lock:
            if folder not in self._decoders:
                self._decoders[folder] = self._decode_of(folder)
            return self._decoders[folder]

    def _decode_of(self, folder: Path) -> Decode | None:
        try:
            tokenizer = self._load(folder)
        except Exception:  # without texts the page shows token ids
            return None
        return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False))

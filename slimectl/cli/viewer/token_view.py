"""One sample token by token: texts, values, turns, tool calls and message headers."""

from __future__ import annotations

import re
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

from slimectl.cli.viewer.conversation import HEADER, Decode
from slimectl.cli.viewer.token_colours import VERSION, token_colours
from slimectl.cli.viewer.turns import turns_of
from slimectl.data.sample_index import SampleIndex
from slimectl.data.tool_calls import NOTATIONS
from slimectl.types import VERSION_SPANS

MAX_TOKENS = 4000
"""Maximum tokens per answer. The page asks for more on demand."""
LISTS = ("tokens", "loss_mask", "rollout_log_probs", "old_log_probs", "log_probs", "ref_log_probs",
         "teacher_log_probs", "ratios", "clipped", "advantages", "returns", "values", "loss_weights")  # fmt: skip
"""Fields with a value for each token, or for each token of the response."""
MAX_TEXT = 200_000
"""Maximum characters of a text in the record as shown. The raw record has all."""

CALLS = "|".join(
    f"{re.escape(opening)}.*?(?:{re.escape(closing)}|$)"
    for opening, closing in sorted({(notation.opening, notation.closing) for notation in NOTATIONS})
    if opening and closing
)
MARKS = re.compile(
    rf"(?P<call>{CALLS})|(?P<result><tool_response>.*?(?:</tool_response>|$))|(?P<message>{HEADER.pattern})",
    re.DOTALL,
)
"""Tool calls, tool results and message headers in the text of a sample."""


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
    }


def token_texts(tokens: Sequence[int], decode: Decode) -> list[str]:
    """Return the text that each token adds to the decoded whole.

    A token is decoded together with the one before it, because some tokenizers drop a blank at the start of a text. A
    character made of several tokens is the text of the last one, and the texts of the others are empty.
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
    prefix, text = decode(before), decode([*before, *tokens])
    return text[len(prefix) :] if text.startswith(prefix) else decode(tokens)


def _response_slice(values: Sequence[Any], prompt_length: int, start: int, end: int) -> list[Any]:
    """Return the values of the tokens in [start, end), None for tokens of the prompt."""
    prompt = max(0, min(end, prompt_length) - start)
    return [None] * prompt + list(values[max(0, start - prompt_length) : max(0, end - prompt_length)])


def _versions(record: dict[str, Any]) -> list[str | None]:
    """Return the weight version of each token of the response, or None if the record does not have it."""
    length = int(record.get("response_length", 0))
    versions = [str(version) for version in record.get("weight_versions") or ()]
    column: list[str | None] = [versions[0] if len(set(versions)) == 1 else None] * length
    for span in (record.get("metadata") or {}).get(VERSION_SPANS) or ():
        with suppress(TypeError, ValueError):  # a samples file may contain anything
            version, first, end = str(span[0]), max(0, int(span[1])), min(length, int(span[2]))
            column[first:end] = [version] * max(0, end - first)
    return column


def marked_parts(texts: Sequence[str], start: int) -> list[dict[str, Any]]:
    """Return the tool calls, tool results and message headers in the texts of tokens from `start` on.

    A header is recognised by the role mark of a chat template, and a call by the notation of its model family.
    """
    ends = list(accumulate(map(len, texts)))
    return [
        {
            "kind": match.lastgroup,
            "start": start + bisect_right(ends, match.start()),
            "end": start + bisect_left(ends, match.end()) + 1,
        }
        for match in MARKS.finditer("".join(texts))
        if match.lastgroup is not None
    ]


def _shortened(value: Any) -> Any:
    """Return a value in which long texts are cut."""
    match value:
        case str() if len(value) > MAX_TEXT:
            return f"{value[:MAX_TEXT]}… ({len(value)} characters)"
        case dict():
            return {key: _shortened(item) for key, item in value.items()}
        case list():
            return [_shortened(item) for item in value]
    return value


class Decoders:
    """Tokenizers by model folder, loaded on first use."""

    def __init__(self, load: Callable[[Path], Any]) -> None:
        self._load = load
        self._decoders: dict[Path, Decode | None] = {}
        self._lock = threading.Lock()

    def decoder(self, folder: Path | None) -> Decode | None:
        """Return the decoder of a folder's tokenizer, or None if it cannot be loaded."""
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

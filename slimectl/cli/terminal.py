"""Formats text for a terminal: control characters, colours, line width, sparklines."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rich.cells import cell_len, set_cell_size

PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
PICTURES |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
"""Control characters mapped to Unicode's control pictures, because model output may contain any character."""

MARKS = {
    0x200E: "LRM", 0x200F: "RLM", 0x061C: "ALM", 0x202A: "LRE", 0x202B: "RLE", 0x202C: "PDF", 0x202D: "LRO",
    0x202E: "RLO", 0x2066: "LRI", 0x2067: "RLI", 0x2068: "FSI", 0x2069: "PDI", 0xFEFF: "BOM",
    0x2028: "LS", 0x2029: "PS",
}  # fmt: skip
VISIBLE: dict[int, int | str] = PICTURES | {code: f"⟨{name}⟩" for code, name in MARKS.items()}
VISIBLE |= dict.fromkeys(range(0xD800, 0xE000), 0xFFFD)
"""PICTURES, and marks that change the direction of a line, and halves of surrogate pairs."""
ESCAPES = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), *MARKS, *range(0xD800, 0xE000))}
"""JSON escapes of the same characters."""

MAX_TEXT = 20_000
"""Maximum characters shown of one text of a sample."""
BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*%#"


def visible(text: object, limit: int = MAX_TEXT) -> str:
    """Return the beginning of a text with every character visible, so that it cannot control the terminal."""
    text = str(text)
    remaining = len(text) - limit
    return text[:limit].translate(VISIBLE) + (f"… ({remaining} more characters)" if remaining > 0 else "")


def safe_json(value: Any, *, indent: int | None = None) -> str:
    """Return JSON in which characters that could control a terminal are escaped. It parses to the same value."""
    return json.dumps(value, ensure_ascii=False, indent=indent).translate(ESCAPES)


def one_line(text: object, columns: int) -> str:
    """Return the beginning of a text in one line of at most `columns` columns."""
    return shortened(visible(text, 4 * columns).replace("\n", "␊").replace("\t", " "), columns)


def shortened(line: str, columns: int) -> str:
    """Return a line cut to at most `columns` columns. Wide letters count as two."""
    if cell_len(line) <= columns:
        return line
    dots = "…" if is_utf8() else "..."
    return set_cell_size(line, max(0, columns - len(dots))).rstrip() + dots


def is_utf8() -> bool:
    """Return whether stdout can print every character."""
    return (sys.stdout.encoding or "utf-8").lower().startswith("utf")


def width() -> int:
    """Return the width of the terminal in columns, or 80 without a terminal."""
    return shutil.get_terminal_size().columns


def has_colours() -> bool:
    """Return whether to colour output: on a terminal or with FORCE_COLOR, but never with NO_COLOR."""
    if "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb":
        return False
    return "FORCE_COLOR" in os.environ or sys.stdout.isatty()


def paint(text: str, code: str) -> str:
    """Colour a text with an SGR code, line by line, because pagers reset colours at each line."""
    return "\n".join(f"\x1b[{code}m{line}\x1b[0m" if line and code else line for line in text.split("\n"))


def sparkline(values: Sequence[float], columns: int) -> str:
    """Draw values as a line of blocks, or of ASCII characters if stdout is not UTF-8. Each is the mean of its share.

    >>> sparkline([0.0, 1.0, 2.0, 7.0], 4)
    '▁▂▃█'
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(columns, len(finite))
    edges = [len(finite) * at // count for at in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    blocks = BLOCKS if is_utf8() else ASCII_BLOCKS
    steps = ((mean - low) / (high - low) if high > low else 0.5 for mean in means)
    return "".join(blocks[min(len(blocks) - 1, int(step * len(blocks)))] for step in steps)

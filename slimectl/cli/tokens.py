"""Prints the tokens of a sample, coloured by a value of each token, or with the values in braces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from slimectl.cli.terminal import has_colours, paint, visible
from slimectl.cli.viewer.token_colours import COLOURS as COLOUR_SCALES

TRAINED, MASKED, PROMPT = "trained", "masked", "prompt"
COLOURS = {TRAINED: "30;42", MASKED: "33", PROMPT: "2"}
BRACKETS = {TRAINED: ("[[", "]]"), MASKED: ("((", "))"), PROMPT: ("", "")}
PARTS = {"policy": TRAINED, "environment": MASKED, "prompt": PROMPT}
"""Part of the loss mask by the author of a token."""

SHADES = {
    "cold": ("", "48;5;224", "48;5;217", "48;5;210", "48;5;203"),
    "high": ("", "48;5;230", "48;5;222", "48;5;215", "48;5;208"),
    "low": ("", "48;5;189", "48;5;153", "48;5;111", "48;5;75"),
}
"""Backgrounds (256 colours) for black letters, from weak to strong."""
VERSIONS = ("46", "43", "45", "42", "44", "41")
"""Backgrounds of weight versions, used in turn."""
MARKED = "4"
NAMES = ("logprob", "advantage", "ratio", "trainer_minus_engine", "mask", "version", "reference", "teacher")
"""Values of --color-by."""


def legend(name: str) -> str:
    """Return the line that explains the colours."""
    coloured = has_colours()
    if name == "mask":
        return " ".join(highlight(part, part, coloured) for part in (PROMPT, TRAINED, MASKED))
    if name == "version":
        return "weight version: one colour each" if coloured else "weight version: in {} after its tokens"
    if not coloured:
        return f"{name}: in {{}} after its tokens" + (", ! if clipped" if name == "ratio" else "")
    low, high = next(colour.ends for colour in COLOUR_SCALES if colour.name == name)
    cold = low > high
    shades = [("cold", level) for level in range(5)] if cold else [("low", level) for level in (4, 3, 2, 1)]
    shades += [] if cold else [("high", level) for level in range(5)]
    bar = "".join(_shade(" ", tone, level) for tone, level in shades)
    return f"{name}: {low:.3g} {bar} {high:.3g}" + (", underlined if clipped" if name == "ratio" else "")


def tokens_text(view: Mapping[str, Any], name: str) -> str:
    """Return the tokens of a sample's view, coloured by the value `name`, or with the values in braces.

    If the sample lacks the values, return its text with a note.
    """
    coloured = has_colours()
    texts = view["texts"] or [f"{number} " for number in view["ids"]]
    if name == "mask":
        parts = [PARTS[author] for author in view["authors"]]
        text = "".join(highlight(text, part, coloured) for part, text in _joined(texts, parts))
    elif name == "version":
        text = _versions(view, texts, coloured)
    else:
        colour = next((colour_scale for colour_scale in view["colours"] if colour_scale["name"] == name), None)
        if colour is None:
            return f"{visible(''.join(texts))}\n(no {name}: {LACKING.get(name, 'the record has none')})"
        text = _heat(colour, texts, view["authors"]) if coloured else _plain(colour, texts)
    remaining = view["total"] - view["start"] - len(texts)
    return f"{text}… ({remaining} more tokens)" if remaining > 0 else text


KEEPING = 'this sample was not trained on, or run.keep_samples of the run is not "train"'
LACKING = {"advantage": KEEPING, "ratio": KEEPING, "trainer_minus_engine": KEEPING}


def highlight(text: str, part: str, coloured: bool) -> str:
    """Mark a text as trained, masked or prompt."""
    if coloured:
        return paint(visible(text), COLOURS[part])
    before, after = BRACKETS[part]
    return before + visible(text) + after


def _heat(colour: Mapping[str, Any], texts: list[str], authors: list[str]) -> str:
    """Colour tokens by strength. Consecutive tokens of equal colour are painted together."""
    marks = [*colour["marks"], *[False] * len(texts)]
    levels = [
        (author == "prompt" or strength is None, round(4 * (strength or 0.0)), bool(mark))
        for strength, author, mark in zip(colour["strengths"], authors, marks, strict=False)
    ]
    painted = []
    for (quiet, level, mark), text in _joined(texts, levels):
        tone = "cold" if colour["tone"] == "cold" else "low" if level < 0 else "high"
        painted.append(paint(_shown(text), COLOURS[PROMPT]) if quiet else _shade(_shown(text), tone, abs(level), mark))
    return "".join(painted)


def _shade(text: str, tone: str, level: int, mark: bool = False) -> str:
    background = SHADES[tone][level]
    return paint(text, ";".join(filter(None, (background and f"38;5;16;{background}", MARKED if mark else ""))))


def _plain(colour: Mapping[str, Any], texts: list[str]) -> str:
    """Return the tokens with each value after the tokens that have it."""
    marks = [*colour["marks"], *[False] * len(texts)]
    values = [
        "" if value is None else f"{{{value:.3g}{'!' if mark else ''}}}"
        for value, mark in zip(colour["values"], marks, strict=False)
    ]
    return "".join(visible(text) + value for value, text in _joined(texts, values))


def _versions(view: Mapping[str, Any], texts: list[str], coloured: bool) -> str:
    """Mark the policy's tokens with their weight version. If it is unknown, use all versions of the sample."""
    known = [str(version) for version in view["record"].get("weight_versions") or ()]
    whole = "-".join(dict.fromkeys((known[0], known[-1]))) if known else "unknown"
    labels = [
        (version or whole) if author == "policy" else None
        for version, author in zip(view["versions"], view["authors"], strict=False)
    ]
    shown = []
    for label, text in _joined(texts, labels):
        if label is None:
            shown.append(paint(visible(text), COLOURS[PROMPT]) if coloured else visible(text))
        else:
            number = int(last) if (last := label.rpartition("-")[2]).isdecimal() else 0
            code = f"30;{VERSIONS[number % len(VERSIONS)]}"
            shown.append(paint(_shown(text), code) if coloured else f"{visible(text)}{{{visible(label, 80)}}}")
    names = ", ".join(dict.fromkeys(visible(label, 80) for label in labels if label is not None)) or whole
    return "".join(shown) + (f" (version {names})" if coloured else "")


def _shown(text: str) -> str:
    """Return a text with visible line ends, which can be coloured."""
    return visible(text).replace("\n", "↵\n")


def _joined(texts: list[str], keys: list[Any]) -> Iterator[tuple[Any, str]]:
    """Yield (key, text) for each run of consecutive tokens with the same key."""
    for key, run in groupby(zip(keys, texts, strict=False), key=lambda pair: pair[0]):
        yield key, "".join(text for _, text in run)


def decoder(folder: Path | None) -> Any:
    """Return the decoder of a folder's tokenizer, or None if it or the library that loads it is missing."""
    from slimectl.cli.viewer.token_view import Decoders
    from slimectl.runtime import builders

    return Decoders(builders.token_decoder).decoder(folder)

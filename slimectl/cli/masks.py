"""Displays the loss masks of samples: tokens that are trained on, and context tokens."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from slimectl import wiring
from slimectl.data.manifest import manifest_path
from slimectl.errors import SettingsError
from slimectl.settings import Settings
from slimectl.settings.algorithm import Pairwise, Sft
from slimectl.types import Sample

TAUGHT, READ, PROMPT = "taught", "read", "prompt"
COLOURS = {TAUGHT: "\x1b[30;42m", READ: "\x1b[33m", PROMPT: "\x1b[2m"}
PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
"""Terminal control characters replaced by Unicode's control pictures: model output may hold any character."""
BRACKETS = {TAUGHT: ("[[", "]]"), READ: ("((", "))"), PROMPT: ("", "")}


def at_masks(path: Path, rows: int, settings: Settings) -> None:
    """Print the first samples of a file, or the demonstrations made of its prompts, with each token's role marked."""
    tokenizer = wiring.tokenizer(wiring.model_folder(settings.model.path or _recorded_model(path)))
    coloured = sys.stdout.isatty() if "FORCE_COLOR" not in os.environ else True
    coloured = coloured and "NO_COLOR" not in os.environ
    print(" ".join(_highlight(part, part, coloured) for part in (PROMPT, TAUGHT, READ)))
    for sample in islice(_samples(path, tokenizer, settings), rows):
        mask = sample.mask()
        print(f"--- sample {sample.index}: {sample.prompt_length} + {len(mask)} tokens, {sum(mask)} taught")
        print("".join(_highlight(text, part, coloured) for part, text in _runs(sample, tokenizer)))


def _recorded_model(path: Path) -> str:
    """The model path in the manifest of a file. Raises SettingsError if there is none."""
    file = manifest_path(path)
    manifest = json.loads(file.read_text()) if file.exists() else {}
    model = manifest.get("settings", {}).get("model", {}).get("path")
    if not model:
        raise SettingsError(f"{path}: no manifest says whose tokens these are; add --model DIR")
    return str(model)


def _samples(path: Path, tokenizer: Any, settings: Settings) -> Iterator[Sample]:
    if not isinstance(settings.algorithm, Sft | Pairwise):
        settings = settings.model_copy(update={"algorithm": Sft()})
    return wiring.training_samples(settings, str(path), tokenizer, on_error="stop", report=lambda error: None)


def _runs(sample: Sample, tokenizer: Any) -> Iterator[tuple[str, str]]:
    """(part, text) of each run of consecutive tokens of one part."""
    parts = [PROMPT] * sample.prompt_length + [TAUGHT if bit else READ for bit in sample.mask()]
    for part, tokens in groupby(zip(parts, sample.tokens, strict=True), key=lambda pair: pair[0]):
        yield part, tokenizer.decode([token for _, token in tokens], skip_special_tokens=False)


def _highlight(text: str, part: str, coloured: bool) -> str:
    text = text.translate(PICTURES)
    if coloured:  # line by line: pagers reset colours at each line
        return "\n".join(f"{COLOURS[part]}{line}\x1b[0m" if line else "" for line in text.split("\n"))
    before, after = BRACKETS[part]
    return before + text + after

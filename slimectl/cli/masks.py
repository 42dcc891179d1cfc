"""Samples with their loss masks shown: what the model is taught, and what it only reads."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from slimectl import wiring
from slimectl.data.jsonl import read_lines, read_samples
from slimectl.data.manifest import manifest_path
from slimectl.errors import SettingsError
from slimectl.settings.layers import Layer, resolve
from slimectl.types import Sample

TAUGHT, READ, PROMPT = "taught", "read", "prompt"
COLOURS = {TAUGHT: "\x1b[30;42m", READ: "\x1b[33m", PROMPT: "\x1b[2m"}
BRACKETS = {TAUGHT: ("[[", "]]"), READ: ("((", "))"), PROMPT: ("", "")}


def at_masks(path: Path, rows: int, model: str | None) -> None:
    """The first samples of a file, or of the demonstrations that its prompts become, with every token's part shown."""
    tokenizer = wiring.tokenizer(wiring.model_folder(model or _made_with(path)))
    coloured = sys.stdout.isatty() if "FORCE_COLOR" not in os.environ else True
    coloured = coloured and "NO_COLOR" not in os.environ
    print(" ".join(_shown(part, part, coloured) for part in (PROMPT, TAUGHT, READ)))
    for sample in islice(_samples(path, tokenizer), rows):
        mask = sample.mask()
        print(f"--- sample {sample.index}: {sample.prompt_length} + {len(mask)} tokens, {sum(mask)} taught")
        print("".join(_shown(text, part, coloured) for part, text in _runs(sample, tokenizer)))


def _made_with(path: Path) -> str:
    """The model that the file's manifest names."""
    file = manifest_path(path)
    facts = json.loads(file.read_text()) if file.exists() else {}
    model = facts.get("settings", {}).get("model", {}).get("path")
    if not model:
        raise SettingsError(f"{path}: no manifest says whose tokens these are; add --model DIR")
    return str(model)


def _samples(path: Path, tokenizer: Any) -> Iterator[Sample]:
    if any("tokens" in line for _, line in islice(read_lines(path), 1)):
        return read_samples(path)
    from slimectl.stages.rollout import demonstrations

    settings = resolve([Layer("inspect", {})]).settings
    return demonstrations(wiring.prompts(settings, [str(path)]), tokenizer, settings.rollout)


def _runs(sample: Sample, tokenizer: Any) -> Iterator[tuple[str, str]]:
    """(part, text) of tokens that stand together."""
    parts = [PROMPT] * sample.prompt_length + [TAUGHT if bit else READ for bit in sample.mask()]
    for part, tokens in groupby(zip(parts, sample.tokens, strict=True), key=lambda pair: pair[0]):
        yield part, tokenizer.decode([token for _, token in tokens], skip_special_tokens=False)


def _shown(text: str, part: str, coloured: bool) -> str:
    if coloured:
        return f"{COLOURS[part]}{text}\x1b[0m"
    before, after = BRACKETS[part]
    return before + text + after

"""Output of `slimectl inspect`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from slimectl import builders
from slimectl.architectures.config import raw_config
from slimectl.cli.curve import curve
from slimectl.data.jsonl import read_samples
from slimectl.data.manifest import manifest_path
from slimectl.errors import SettingsError
from slimectl.model_files import check_model_files, read_json
from slimectl.settings import Settings
from slimectl.settings.algorithm import Sft
from slimectl.types import Sample


def show_run(path: Path) -> None:
    """Print the progress of a run, its reward curve and its evaluations."""
    metrics = path / "metrics.jsonl"
    text = metrics.read_text() if metrics.exists() else ""
    # A line without a newline is incomplete: it is being written, or the run was killed.
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    scores = [(line["rollout_id"], line["metrics"]["rollout/raw_reward"]) for line in lines
              if "rollout/raw_reward" in line["metrics"]]  # fmt: skip
    print(f"{path}: {len(scores)} rounds")
    if len(scores) > 1:
        print(curve(scores, title="mean reward of each round"))
    for line in lines:
        for name, value in line["metrics"].items():
            if name.startswith("eval/") and name.endswith("_accuracy"):
                print(f"round {line['rollout_id']:>5}  {name.removeprefix('eval/')} {value:.3f}")
    for step in sorted(path.glob("step_*")):
        print(f"{step.name}: {', '.join(sorted(child.name for child in step.iterdir()))}")


def show_folder(path: Path) -> None:
    """Print the architecture of a model, or the entries of a folder."""
    config_file = path / "config.json"
    if not config_file.exists():
        print(f"{path}: {', '.join(sorted(child.name for child in path.iterdir())) or 'empty'}")
        return
    check_model_files(path)
    config = raw_config(path)
    shown = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "dtype")
    print(f"{path}: " + ", ".join(f"{key} {config[key]}" for key in shown if key in config))


def show_samples(path: Path, rows: int) -> None:
    """Print counts, rewards, and the text of the first samples."""
    samples = list(read_samples(path))
    rewards = [s.reward for s in samples if isinstance(s.reward, int | float)]
    mean = f", mean reward {sum(rewards) / len(rewards):.4g}" if rewards else ", not scored"
    print(f"{path}: {len(samples)} samples of {len({s.group_index for s in samples})} prompts{mean}")
    for sample in samples[:rows]:
        print(f"--- sample {sample.index} ({sample.status}, reward {sample.reward}, label {sample.label!r})")
        print(sample.prompt if isinstance(sample.prompt, str) else json.dumps(sample.prompt, ensure_ascii=False))
        print(f">>> {sample.response}")


def show_manifest(path: Path) -> None:
    """Print the manifest of a path: its origin and inputs."""
    file = manifest_path(path)
    if not file.exists():
        return
    manifest = read_json(file)
    shown = {
        key: manifest[key]
        for key in ("slimectl", "stage", "started", "finished", "counts", "parents")
        if key in manifest
    }
    print("manifest: " + ", ".join(f"{key} {value}" for key, value in shown.items()))
    inputs = manifest.get("inputs")
    for name, digest in inputs.items() if isinstance(inputs, dict) else ():
        print(f"input {name} sha256 {str(digest)[:16]}…")


TAUGHT, READ, PROMPT = "taught", "read", "prompt"
COLOURS = {TAUGHT: "\x1b[30;42m", READ: "\x1b[33m", PROMPT: "\x1b[2m"}
PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
"""Terminal control characters replaced by Unicode's control pictures: model output may hold any character."""
BRACKETS = {TAUGHT: ("[[", "]]"), READ: ("((", "))"), PROMPT: ("", "")}


def show_masks(path: Path, rows: int, settings: Settings) -> None:
    """Print the first samples of a file, or the demonstrations made of its prompts, with each token's role marked."""
    tokenizer = builders.tokenizer(builders.model_folder(settings.model.path or _recorded_model(path)))
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
    if settings.algorithm.trains_on == "rollouts":
        settings = settings.model_copy(update={"algorithm": Sft()})
    return builders.training_samples(settings, str(path), tokenizer, on_error="stop", report=lambda error: None)


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

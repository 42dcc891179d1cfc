"""Output of `slimectl inspect` for runs, model directories, folders and samples files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from slimectl.architectures.config import raw_config
from slimectl.cli.inspect_samples import heading, texts_of
from slimectl.cli.options import Selection
from slimectl.cli.run_summary import run_facts, show_run
from slimectl.cli.terminal import has_colours, safe_json, visible
from slimectl.cli.tokens import MASKED, PROMPT, TRAINED, highlight, legend
from slimectl.cli.viewer.library import Library, SamplesFile, is_run_folder, read_view
from slimectl.data.jsonl import read_samples
from slimectl.data.manifest import manifest_path
from slimectl.data.records import sample_to_json
from slimectl.data.sample_index import reward_number
from slimectl.errors import SettingsError
from slimectl.rewards.components import ComponentValues, means_text
from slimectl.system.model_files import check_model_files, read_json
from slimectl.system.stdio import quantity
from slimectl.types import Sample

if TYPE_CHECKING:
    from slimectl.settings import Settings

MODEL_KEYS = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "dtype")
MANIFEST_KEYS = ("slimectl", "stage", "started", "finished", "counts", "parents")


def show(path: Path, selection: Selection) -> None:
    """Print a summary of a run, a model directory, another folder, or a samples file."""
    if selection.as_json:
        print(safe_json(facts(path, selection.rows), indent=2))
    elif is_run_folder(path):
        show_run(path)
    elif path.is_dir():
        show_folder(path)
        show_manifest(path)
    else:
        show_samples(path, selection)
        show_manifest(path)


def facts(path: Path, rows: int) -> dict[str, Any]:
    """Return a summary of a run, a model directory, another folder or a samples file, with its manifest, as JSON."""
    if is_run_folder(path):
        description = {"kind": "run", **run_facts(path)}
    elif (path / "config.json").exists():
        description = {"kind": "model", **model_facts(path)}
    elif path.is_dir():
        description = {"kind": "folder", "entries": _entries(path)}
    else:
        counts, first = samples_facts(path, rows)
        description = {"kind": "samples", **counts, "rows": first}
    return {"path": str(path), **description, "manifest": manifest_facts(path)}


def _entries(folder: Path) -> list[str]:
    return sorted(child.name for child in folder.iterdir())


def model_facts(path: Path) -> dict[str, Any]:
    """Return the architecture of a model, after checking its files. Raises CheckpointError."""
    check_model_files(path)
    config = raw_config(path)
    return {key: config[key] for key in MODEL_KEYS if key in config}


def show_folder(path: Path) -> None:
    """Print the architecture of a model, or the entries of a folder."""
    if not (path / "config.json").exists():
        print(f"{path}: {', '.join(_entries(path)) or 'empty'}")
        return
    print(f"{path}: " + ", ".join(f"{key} {value}" for key, value in model_facts(path).items()))


def samples_facts(path: Path, rows: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the numbers of samples and prompts, the means of rewards and their components, and the first records."""
    count, prompts, rewards, parts = 0, set[int](), list[float](), ComponentValues()
    first = []
    for sample in read_samples(path):
        if count < rows:
            first.append(sample_to_json(sample))
        count += 1
        prompts.add(sample.group_index)
        if math.isfinite(reward := reward_number(sample.reward)):
            rewards.append(reward)
        parts.add(sample.reward, prompt=sample.group_index)
    summary = {"samples": count, "prompts": len(prompts), "mean_reward": fmean(rewards) if rewards else None}
    return summary | ({"mean_components": means} if (means := parts.means()) else {}), first


def show_samples(path: Path, selection: Selection) -> None:
    """Print counts, rewards, and the text of the first samples."""
    counts, first = samples_facts(path, selection.rows)
    reward = counts["mean_reward"]
    components = visible(means_text(counts.get("mean_components", {})))
    mean = ", not scored" if reward is None else f", mean reward {reward:.4g}{components}"
    print(f"{path}: {quantity(counts['samples'], 'sample')} of {quantity(counts['prompts'], 'prompt')}{mean}")
    pipe = Library([]), [SamplesFile("", path, path.name, "samples")]
    library, (file, *_) = read_view(path) if path.is_file() else pipe
    for record in first:
        print(heading(record))
        print(texts_of(record, library, file, selection))


def manifest_facts(path: Path) -> dict[str, Any] | None:
    """Return origin and inputs of a path from its manifest, or None if it has none."""
    file = manifest_path(path)
    if not file.exists():
        return None
    manifest = read_json(file)
    inputs = manifest.get("inputs")
    origin = {key: manifest[key] for key in MANIFEST_KEYS if key in manifest}
    return origin | {"inputs": inputs if isinstance(inputs, dict) else {}}


def show_manifest(path: Path) -> None:
    """Print the manifest of a path: its origin and inputs."""
    manifest = manifest_facts(path)
    if manifest is None:
        return
    inputs = manifest.pop("inputs")
    print("manifest: " + ", ".join(f"{key} {value}" for key, value in manifest.items()))
    for name, digest in inputs.items():
        print(f"input {name} sha256 {str(digest)[:16]}…")


def show_masks(path: Path, rows: int, settings: Settings) -> None:
    """Print the first samples of a file, or demonstrations built from its prompts, with each token's role marked."""
    from slimectl.runtime import builders

    tokenizer = builders.tokenizer(builders.model_folder(settings.model.path or _recorded_model(path), weights=False))
    coloured = has_colours()
    print(legend("mask"))
    for sample in islice(_samples(path, tokenizer, settings), rows):
        mask = sample.mask()
        print(f"--- sample {sample.index}: {sample.prompt_length} + {len(mask)} tokens, {sum(mask)} trained")
        print("".join(highlight(text, part, coloured) for part, text in _runs(sample, tokenizer)))


def _recorded_model(path: Path) -> str:
    """Return the model path in the manifest of a file. Raises SettingsError if there is none."""
    file = manifest_path(path)
    manifest = json.loads(file.read_text()) if file.exists() else {}
    model = manifest.get("settings", {}).get("model", {}).get("path")
    if not model:
        raise SettingsError(f"{path}: no manifest names the model. Add --model DIR")
    return str(model)


def _samples(path: Path, tokenizer: Any, settings: Settings) -> Iterator[Sample]:
    from slimectl.runtime import builders
    from slimectl.settings.algorithm import Sft
    from slimectl.stages.recorded_rounds import SampleFiles

    if settings.algorithm.trains_on == "rollouts":
        settings = settings.model_copy(update={"algorithm": Sft()})
    rows = builders.training_samples(settings, SampleFiles([str(path)]), tokenizer)
    return (sample for _, sample in rows)


def _runs(sample: Sample, tokenizer: Any) -> Iterator[tuple[str, str]]:
    """Yield (part, text) for each run of consecutive tokens of one part."""
    parts = [PROMPT] * sample.prompt_length + [TRAINED if bit else MASKED for bit in sample.mask()]
    for part, tokens in groupby(zip(parts, sample.tokens, strict=True), key=lambda pair: pair[0]):
        yield part, tokenizer.decode([token for _, token in tokens], skip_special_tokens=False)

"""Output of `slimectl inspect`."""

from __future__ import annotations

import json
from pathlib import Path

from slimectl.cli.curve import curve
from slimectl.data.jsonl import read_samples
from slimectl.data.manifest import manifest_path
from slimectl.model_files import check_model_files, read_json
from slimectl.weights.complete import raw_config


def at_run(path: Path) -> None:
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


def at_folder(path: Path) -> None:
    """Print the architecture of a model, or the entries of a folder."""
    config_file = path / "config.json"
    if not config_file.exists():
        print(f"{path}: {', '.join(sorted(child.name for child in path.iterdir())) or 'empty'}")
        return
    check_model_files(path)
    config = raw_config(path)
    shown = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "dtype")
    print(f"{path}: " + ", ".join(f"{key} {config[key]}" for key in shown if key in config))


def at_samples(path: Path, rows: int) -> None:
    """Print counts, rewards, and the text of the first samples."""
    samples = list(read_samples(path))
    rewards = [s.reward for s in samples if isinstance(s.reward, int | float)]
    mean = f", mean reward {sum(rewards) / len(rewards):.4g}" if rewards else ", not scored"
    print(f"{path}: {len(samples)} samples of {len({s.group_index for s in samples})} prompts{mean}")
    for sample in samples[:rows]:
        print(f"--- sample {sample.index} ({sample.status}, reward {sample.reward}, label {sample.label!r})")
        print(sample.prompt if isinstance(sample.prompt, str) else json.dumps(sample.prompt, ensure_ascii=False))
        print(f">>> {sample.response}")


def at_manifest(path: Path) -> None:
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

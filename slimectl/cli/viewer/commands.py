"""Commands that sample the prompt of a recorded sample again, with the same random numbers if possible."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from slimectl.cli.viewer.library import RunSource, SamplesFile
from slimectl.errors import SlimectlError
from slimectl.plugins.registry import ENGINES
from slimectl.settings import Settings
from slimectl.settings.layers import from_file
from slimectl.settings.loading import resolve
from slimectl.stages.evaluate import OF_ROLLOUT, resolve_dataset_settings

SOURCE = "rollout.data_source_path=slimectl.recipes.replay:RecordedSamples"
OF_EVAL = ("temperature", "top_p", "top_k", "max_response_len")
OF_SCORE = ("custom_rm_path", "rm_type", "reward_key")


def commands(run: RunSource | None, file: SamplesFile, record: dict[str, Any], row: int) -> list[dict[str, str]]:
    """Return commands with titles that tell whether they reproduce the sample or give another response."""
    data = f"--data {shlex.quote(f'{file.path}@[{row}:{row + 1}]')} -s {SOURCE} -n 1"
    settings = None if run is None else _settings(run)
    if run is None or settings is None:
        title = "sample this prompt again, with a model of your choice"
        return [{"title": title, "command": f"slimectl rollout --model DIR {data}"}]
    model, doubt = _weights(run, record)
    doubt = doubt or _doubt(settings)
    sampling, grading = _overrides(settings, file)
    if settings.run.async_level > 1:  # a data source does not support it
        sampling.append("-s run.async_level=0")
    config = f"-c {shlex.quote(str(run.path / 'run.toml'))}"
    again = " ".join([f"slimectl rollout {config} --model {shlex.quote(str(model))} {data}", *sampling])
    graded = " ".join([f"{again} | slimectl score - {config} --explain", *grading])
    title = "sample this prompt again" if doubt else "replay it with the same weights and seed"
    note = f" ({doubt})" if doubt else ""
    return [{"title": title + note, "command": again}, {"title": f"{title}, and grade it{note}", "command": graded}]


def _settings(run: RunSource) -> Settings | None:
    """Return the settings of a run, or None if they cannot be read."""
    with suppress(SlimectlError, OSError):
        return resolve([from_file(run.path / "run.toml")]).settings
    return None


def _doubt(settings: Settings) -> str:
    """Return why a request with the same weights and seed may give another response, or "" if it gives the same."""
    rollout = settings.rollout
    if rollout.agent or rollout.env or rollout.custom_generate_function_path or rollout.function_path:
        return "its agent runs again"
    if not ENGINES.fact(settings.engine.backend, "in_process", False):
        return f"the {settings.engine.backend} engine may sample other tokens"
    return "interrupted responses start again" if rollout.partial_rollout else ""


def _weights(run: RunSource, record: dict[str, Any]) -> tuple[Path, str]:
    """Return the model that wrote a sample. If its weights are gone, return the newest one and the reason."""
    newest = run.path / "latest"
    versions = sorted({str(version) for version in record.get("weight_versions") or ()})
    if len(versions) != 1:
        origin = (
            f"versions {', '.join(versions)} wrote it"
            if versions
            else "the record does not tell which weights wrote it"
        )
        return newest, f"with the newest weights, because {origin}"
    if versions == ["0"]:
        path = run.settings.get("model.path")
        initial = [run.path / "warmup", run.path / "model", *([Path(path)] if isinstance(path, str) else [])]
        model = next((folder for folder in initial if (folder / "config.json").is_file()), None)
        return (
            (model, "") if model is not None else (newest, "with the newest weights, because the initial model is gone")
        )
    for folder in sorted(run.path.glob("step_*"), reverse=True):
        with suppress(OSError, ValueError, KeyError, TypeError):
            if str(json.loads((folder / "state.json").read_text())["weight_version"]) == versions[0]:
                return folder, ""
    return newest, f"with the newest weights, because the checkpoint of version {versions[0]}, which wrote it, is gone"


def _overrides(settings: Settings, file: SamplesFile) -> tuple[list[str], list[str]]:
    """Return options for sampling and for grading, where an evaluation differs from the run's rounds."""
    if file.dataset is None or file.dataset not in settings.eval.datasets:
        return [], []
    dataset_settings = resolve_dataset_settings(settings, file.dataset)
    sampling = {name: getattr(dataset_settings.rollout, name) for name in OF_ROLLOUT}
    sampling |= {name: value for name in OF_EVAL if (value := getattr(dataset_settings.eval, name)) is not None}
    if sampling.get("temperature") == 0:  # `rollout` does not accept 0, but top_k = 1 is greedy at any temperature
        sampling |= {"temperature": settings.rollout.temperature, "top_k": 1}
    grading = {name: getattr(dataset_settings.score, name) for name in OF_SCORE}
    return _options("rollout", settings.rollout, sampling), _options("score", settings.score, grading)


def _options(section: str, values: Any, others: dict[str, Any]) -> list[str]:
    """Return options that set the values of a section that differ, in TOML notation."""
    changed = {name: value for name, value in others.items() if value != getattr(values, name)}
    texts = {name: "none" if value is None else json.dumps(value) for name, value in changed.items()}
    return [f"-s {shlex.quote(f'{section}.{name}={text}')}" for name, text in texts.items()]

"""--eval-config: evaluation datasets and their defaults in a separate file, in slime's format."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from slimectl.errors import SettingsError
from slimectl.settings.layers import Layer

SPELLINGS = {
    "n_samples_per_eval_prompt": "n_samples_per_prompt",
    "eval_interval": "interval",
}
"""Slime's key names and their slimectl equivalents; any key may also be prefixed with eval_ or rollout_."""


def from_eval_config(path: Path) -> Layer:
    """Read [eval] from a YAML or TOML file.

    The file has `defaults` (or `default`) for all datasets, and `datasets`: a list of tables with `name` and `path`,
    or a table of those by name; all of it may be nested under `eval`. Raises SettingsError for anything else.
    """
    document = _read_document(path)
    document = document.get("eval", document)
    unknown = sorted(set(document) - {"defaults", "default", "datasets"})
    if unknown or not document.get("datasets"):
        wrong = f"{unknown[0]}: unknown key" if unknown else "no datasets"
        raise SettingsError(f"{path}: {wrong}; an evaluation file has `defaults` and `datasets`")
    shared = document.get("defaults") or document.get("default") or {}
    data = dict(_parse_dataset(path, entry) for entry in _as_list(document["datasets"]))
    return Layer(str(path), {"eval": {**_normalize_keys(shared), "data": data}})


def _read_document(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        parsed = tomllib.loads(text) if path.suffix == ".toml" else _yaml(text)
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such evaluation file") from None
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(parsed, dict) or not isinstance(parsed.get("eval", {}), dict):
        raise SettingsError(f"{path}: an evaluation file has `defaults` and `datasets`")
    return parsed


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {error}") from None


def _as_list(datasets: Any) -> list[Any]:
    """Convert tables by name to a list."""
    if isinstance(datasets, dict):
        return [{"name": name, **entry} if isinstance(entry, dict) else entry for name, entry in datasets.items()]
    return datasets if isinstance(datasets, list) else [datasets]


def _parse_dataset(path: Path, entry: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(entry, dict) or not entry.get("name") or not entry.get("path"):
        raise SettingsError(f"{path}: datasets: each is a table with `name` and `path`, not {entry!r}")
    return str(entry["name"]), _normalize_keys({key: value for key, value in entry.items() if key != "name"})


def _normalize_keys(options: dict[str, Any]) -> dict[str, Any]:
    """Rename keys to those of [eval], and drop null values."""
    short = {key.removeprefix("eval_").removeprefix("rollout_"): key for key in options if key not in SPELLINGS}
    named = {name: options[key] for name, key in short.items()}
    named |= {ours: options[theirs] for theirs, ours in SPELLINGS.items() if theirs in options}
    return {name: value for name, value in named.items() if value is not None}

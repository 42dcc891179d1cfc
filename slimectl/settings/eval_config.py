"""--eval-config: datasets and what they share, in a file of their own, as slime has it."""

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
"""slime's words for our keys; any key may also have eval_ or rollout_ in front."""


def from_eval_config(path: Path) -> Layer:
    """What a YAML or TOML file says of [eval].

    The file has `defaults` (or `default`), which hold for all, and `datasets`: a list of tables with `name` and `path`,
    or a table of those by name; all of it may stand under `eval`. Raises SettingsError for anything else.
    """
    found = _parsed(path)
    found = found.get("eval", found)
    unknown = sorted(set(found) - {"defaults", "default", "datasets"})
    if unknown or not found.get("datasets"):
        wrong = f"{unknown[0]}: unknown key" if unknown else "no datasets"
        raise SettingsError(f"{path}: {wrong}; an evaluation file has `defaults` and `datasets`")
    shared = found.get("defaults") or found.get("default") or {}
    data = dict(_dataset(path, given) for given in _listed(found["datasets"]))
    return Layer(str(path), {"eval": {**_spelled(shared), "data": data}})


def _parsed(path: Path) -> dict[str, Any]:
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


def _listed(datasets: Any) -> list[Any]:
    """Tables by name as a list."""
    if isinstance(datasets, dict):
        return [{"name": name, **given} if isinstance(given, dict) else given for name, given in datasets.items()]
    return datasets if isinstance(datasets, list) else [datasets]


def _dataset(path: Path, given: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(given, dict) or not given.get("name") or not given.get("path"):
        raise SettingsError(f"{path}: datasets: each is a table with `name` and `path`, not {given!r}")
    return str(given["name"]), _spelled({key: value for key, value in given.items() if key != "name"})


def _spelled(given: dict[str, Any]) -> dict[str, Any]:
    """Keys as [eval] has them; what is null is not given."""
    short = {key.removeprefix("eval_").removeprefix("rollout_"): key for key in given if key not in SPELLINGS}
    named = {name: given[key] for name, key in short.items()}
    named |= {ours: given[theirs] for theirs, ours in SPELLINGS.items() if theirs in given}
    return {name: value for name, value in named.items() if value is not None}

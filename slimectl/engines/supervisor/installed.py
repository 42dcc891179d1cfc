"""The installation of a server in a separate Python: its version and flags."""

from __future__ import annotations

import difflib
import functools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from slimectl.engines.api_keys import ServerKeys
from slimectl.engines.supervisor.bootstrap.hidden_keys import FLAGS, KEYS, joined
from slimectl.errors import BackendError, SettingsError
from slimectl.system.redaction import is_secret_name

WORDS: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "human_readable_int": (int, str)}
PROBE_TIMEOUT_S = 300
EXAMINE = """
import importlib, json, platform, sys, torch
failed = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
about = [torch.__version__, torch.version.cuda, torch.cuda.device_count(), platform.python_version(), sys.path, failed]
print(json.dumps(about))
"""
"""Program for a server's Python: imports the modules that its arguments name, and describes torch."""


@dataclass(frozen=True)
class Installation:
    """The packages in the Python of a server, with imports that fail and requirements that are not met."""

    description: str
    failures: Sequence[str]
    conflicts: Sequence[str]
    remedy: str


@dataclass(frozen=True)
class InstalledServer:
    """A kind of server, configured by `[SECTION.args]` with any of its own arguments.

    `oldest` and `newest` are the supported versions. `script --describe` prints the arguments of the installed version.
    `owned` maps the arguments that slimectl sets to the setting that controls each.
    """

    section: str
    packages: tuple[str, ...]
    """Possible package names."""

    oldest: tuple[int, ...]
    newest: tuple[int, ...]
    script: Path
    owned: Mapping[str, str]
    help_command: str
    on_gpu: str
    """pip requirement on a machine with a GPU."""

    kernels: tuple[str, ...] = ()
    """Modules with compiled kernels, which only import where a GPU is."""

    def interpreter(self, python: str | None) -> str:
        """Return the Python that runs it: `python`, else this one. Raises BackendError without a supported version."""
        path = python or sys.executable
        setting = f"{self.section}.python"
        versions = [installed_version(path, package, setting=setting) for package in self.packages]
        version = next((version for version in versions if version is not None), None)
        name = self.packages[0]
        if version is None:
            raise BackendError(f"engine.backend = {self.section}: {path} has no {name}. Run: {self._remedy(python)}")
        numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
        if not self.oldest <= numbers <= self.newest:
            low, high = (".".join(map(str, bound)) for bound in (self.oldest, self.newest))
            bounds = f"{low} to {high}" if low != high else low
            raise BackendError(
                f"engine.backend = {self.section}: {path} has {name} {version}, but slimectl supports {bounds}. Run: "
                f"{self._remedy(python)}"
            )
        return path

    def examine(self, python: str | None, *, has_gpu: bool) -> Installation:
        """Import it in its Python, with its kernels if there is a GPU. Raises BackendError if it does not run."""
        path, remedy = self.interpreter(python), self._remedy(python, has_gpu=has_gpu)
        fields_of(path, self.script, self.section)
        command = [path, "-E", "-c", EXAMINE, *(self.kernels if has_gpu else ())]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no error message"])[-1]
            raise BackendError(f"{self.section}.python: {path} cannot import torch: {last}. Run: {remedy}")
        torch, cuda, count, version, paths, failed = json.loads(done.stdout.strip().splitlines()[-1])
        setting = f"{self.section}.python"
        numbers = [(name, installed_version(path, name, setting=setting)) for name in self.packages]
        package, number = next((name, number) for name, number in numbers if number is not None)
        failures = [f"{path} cannot import {module}: {reason}" for module, reason in failed.items()]
        if has_gpu and not count:
            failures.append(f"{path}: its torch {torch} sees no GPU. It needs a driver for CUDA {cuda}")
        text = f"{package} {number} with torch {torch}" + (f", CUDA {cuda}, {count} GPUs" if has_gpu else "")
        return Installation(text, failures, list(conflicts(package, paths, version, missing=has_gpu)), remedy)

    def flags(self, args: Mapping[str, Any], python: str) -> list[str]:
        """Convert `[SECTION.args]` to command-line flags. Raises SettingsError for args that the server rejects."""
        if not args:
            return []
        fields = fields_of(python, self.script, self.section)
        return [argument for name, value in args.items() for argument in self._flag(name, value, fields)]

    def launch_flags(
        self, args: Mapping[str, Any], python: str, *, defaults: Mapping[str, str], keys: ServerKeys
    ) -> tuple[list[str], dict[str, str]]:
        """Return the flags of a server, and the environment variables with its secrets (keys and secret `args`).

        `defaults` maps a field to its flag. It applies to fields that are not in `args`.
        """
        public = {field: value for field, value in args.items() if not is_secret_name(field)}
        secret = {field: value for field, value in args.items() if is_secret_name(field)}
        flags = [flag for field, flag in defaults.items() if field not in args]
        hidden = {FLAGS: json.dumps(self.flags(secret, python)), KEYS: json.dumps([keys.api_key, keys.admin_api_key])}
        return joined([*flags, *self.flags(public, python)]), hidden

    def command(self, python: str, arguments: Sequence[str], host: str, port: int) -> list[str]:
        """Return the command that starts a server. -E ignores our PYTHONPATH, which is not meant for another Python."""
        return [python, "-E", str(self.script), *arguments, f"--host={host}", f"--port={port}"]

    def _flag(self, name: str, value: Any, fields: Mapping[str, dict[str, Any]]) -> Iterator[str]:
        section = self.section
        if name in self.owned:
            raise SettingsError(f"{section}.args.{name}: is set by slimectl. Change {self.owned[name]} instead.")
        field = fields.get(name)
        if field is None:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f". Did you mean {section}.args.{near[0]}?" if near else f". See `{self.help_command}`."
            raise SettingsError(f"{section}.args.{name}: unknown to the installed {section}{hint}")
        if field["takes"] == "nothing":
            yield from _switch(f"{section}.args.{name}", value, field)
            return
        values = value if field["takes"] == "many" and isinstance(value, list) else [value]
        yield field["flag"]
        yield from (_word(f"{section}.args.{name}", element, field) for element in values)

    def _remedy(self, python: str | None, *, has_gpu: bool | None = None) -> str:
        """Return the command that installs it.

        CPU requirements pin every package, so without `python` they are installed in a new environment.
        """
        if has_gpu is None:
            import torch

            has_gpu = torch.cuda.is_available()
        if has_gpu:
            return f"{python or sys.executable} -m pip install '{self.on_gpu}'"
        packages = f"--no-deps -r tests/support/cpu/requirements-{self.section}.txt"
        if python is not None:
            return f"{python} -m pip install {packages} in a clone of slimectl"
        folder = f".venv-{self.section}"
        return (
            f"python3 -m venv {folder} && {folder}/bin/pip install {packages} in a clone of slimectl, then set "
            f"{self.section}.python={folder}/bin/python"
        )


@functools.lru_cache(maxsize=8)
def fields_of(python: str, script: Path, section: str) -> Mapping[str, dict[str, Any]]:
    """Return the flags of that Python's server by field. They are read once, in a separate process (5 s)."""
    command = [python, "-E", str(script), "--describe"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no error message"])[-1]
        raise BackendError(f"{section}.python: {python} cannot import {section}: {last}")
    fields: dict[str, dict[str, Any]] = json.loads(result.stdout.strip().splitlines()[-1])
    return fields


def installed_version(python: str, package: str, *, setting: str) -> str | None:
    """Return the version of a package in another Python, or None. Raises BackendError if that Python does not run."""
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
        raise BackendError(f"{setting}: cannot run {python} as Python: {reason}. Set the path of a Python.") from error
    return result.stdout.strip() or None


def conflicts(package: str, paths: Sequence[str], python: str, *, missing: bool) -> Iterator[str]:
    """Yield each requirement of a package, and of its requirements, that the packages in `paths` do not meet.

    `python` is the version of their Python. With `missing`, also yields requirements that are not installed.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    environment = {"extra": "", "python_version": python.rpartition(".")[0], "python_full_version": python}
    installed = {canonicalize_name(dist.name): dist for dist in distributions(path=list(paths))}
    names = [canonicalize_name(package)]
    for name in names:
        for requirement in map(Requirement, installed[name].requires or ()):
            if requirement.marker is not None and not requirement.marker.evaluate(environment):
                continue
            needed = canonicalize_name(requirement.name)
            text = f"{installed[name].name} {installed[name].version} needs {requirement.name}{requirement.specifier}"
            if needed not in installed:
                if missing:
                    yield f"{text}, which is not installed"
                continue
            if not requirement.specifier.contains(installed[needed].version, prereleases=True):
                yield f"{text}, but {installed[needed].version} is installed"
            if needed not in names:
                names.append(needed)


def language_config(model: Path) -> dict[str, Any]:
    """Return the configuration of the language model in a folder."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return dict(config.get("text_config", config))


def _switch(key: str, value: Any, field: Mapping[str, Any]) -> Iterator[str]:
    if not isinstance(value, bool):
        raise SettingsError(f"{key}: {value!r} is not true or false")
    if value or field["off"]:
        yield field["flag"] if value else field["off"]
    elif field["default"] is True:
        raise SettingsError(f"{key}: {key.partition('.')[0]} has no flag to turn it off. Leave it out.")


def _word(key: str, value: Any, field: Mapping[str, Any]) -> str:
    kind, choices = WORDS.get(field["type"] or ""), field["choices"]
    if kind is not None and (isinstance(value, bool) or not isinstance(value, kind)):
        raise SettingsError(f"{key}: {value!r} is not a number")
    if choices and str(value) not in choices:
        raise SettingsError(f"{key}: {value!r} is not one of {', '.join(choices)}")
    return json.dumps(value) if isinstance(value, list | dict | bool) else str(value)

"""Installation of a server in a Python of its own: its version, and the flags that it takes."""

from __future__ import annotations

import difflib
import functools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimectl.engines.api_keys import Keys
from slimectl.engines.supervisor.bootstrap.hidden_keys import FLAGS, KEYS
from slimectl.errors import BackendError, SettingsError
from slimectl.redaction import is_secret_name

WORDS: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "human_readable_int": (int, str)}
PROBE_TIMEOUT_S = 300


@dataclass(frozen=True)
class InstalledServer:
    """A kind of server that `[SECTION.args]` configures, by any field of its own arguments.

    `oldest` and `newest` bound the supported versions. `script` prints the fields of the installed one with --describe.
    `owned` has the fields that slimectl sets, and the setting that each comes from.
    """

    section: str
    packages: tuple[str, ...]
    """Names under which it may be installed."""

    oldest: tuple[int, ...]
    newest: tuple[int, ...]
    script: Path
    owned: Mapping[str, str]
    help_command: str
    on_gpu: str
    """Requirement for pip on a machine with a GPU; without one, requirements-cpu.txt beside the launch module."""

    def interpreter(self, python: str | None) -> str:
        """Return the Python that runs it: `python`, else this one. Raises BackendError if it has none supported."""
        path = python or sys.executable
        setting = f"{self.section}.python"
        versions = [installed_version(path, package, setting=setting) for package in self.packages]
        version = next((version for version in versions if version is not None), None)
        name = self.packages[0]
        if version is None:
            raise BackendError(f"engine.backend = {self.section}: {path} has no {name}; run: {self._remedy(python)}")
        numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
        if not self.oldest <= numbers <= self.newest:
            low, high = (".".join(map(str, bound)) for bound in (self.oldest, self.newest))
            bounds = f"{low} to {high} are" if low != high else f"{low} is"
            raise BackendError(
                f"engine.backend = {self.section}: {path} has {name} {version}, and {bounds} supported; run: "
                f"{self._remedy(python)}"
            )
        return path

    def flags(self, args: Mapping[str, Any], python: str) -> list[str]:
        """Convert `[SECTION.args]` to command-line flags. Raises SettingsError for args that the server rejects."""
        if not args:
            return []
        fields = fields_of(python, self.script, self.section)
        return [argument for name, value in args.items() for argument in self._flag(name, value, fields)]

    def launch_flags(
        self, args: Mapping[str, Any], python: str, *, defaults: Mapping[str, str], keys: Keys
    ) -> tuple[list[str], dict[str, str]]:
        """Return the flags of a server, and the environment that passes its secrets: keys, and secret `args`.

        `defaults` has a flag by the field that it sets, for fields that are not in `args`.
        """
        public = {field: value for field, value in args.items() if not is_secret_name(field)}
        secret = {field: value for field, value in args.items() if is_secret_name(field)}
        flags = [flag for field, flag in defaults.items() if field not in args]
        hidden = {FLAGS: json.dumps(self.flags(secret, python)), KEYS: json.dumps([keys.api_key, keys.admin_api_key])}
        return [*flags, *self.flags(public, python)], hidden

    def command(self, python: str, arguments: Sequence[str], host: str, port: int) -> list[str]:
        """Return the command that starts a server; -E, as our PYTHONPATH is not meant for another Python."""
        return [python, "-E", str(self.script), *arguments, f"--host={host}", f"--port={port}"]

    def _flag(self, name: str, value: Any, fields: Mapping[str, dict[str, Any]]) -> Iterator[str]:
        section = self.section
        if name in self.owned:
            raise SettingsError(f"{section}.args.{name}: is set by slimectl; change {self.owned[name]} instead")
        field = fields.get(name)
        if field is None:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"; did you mean {section}.args.{near[0]}?" if near else f"; see `{self.help_command}`"
            raise SettingsError(f"{section}.args.{name}: unknown to the installed {section}{hint}")
        if field["takes"] == "nothing":
            yield from _switch(f"{section}.args.{name}", value, field)
            return
        values = value if field["takes"] == "many" and isinstance(value, list) else [value]
        yield field["flag"]
        yield from (_word(f"{section}.args.{name}", element, field) for element in values)

    def _remedy(self, python: str | None) -> str:
        """Return the command that installs it.

        Requirements for a CPU pin every package: without `python` they go into an environment of their own.
        """
        import torch

        if torch.cuda.is_available():
            return f"{python or sys.executable} -m pip install '{self.on_gpu}'"
        packages = f"--no-deps -r {self.script.parent.parent / 'requirements-cpu.txt'}"
        if python is not None:
            return f"{python} -m pip install {packages}"
        folder = f".venv-{self.section}"
        return (
            f"python3 -m venv {folder} && {folder}/bin/pip install {packages}; then set "
            f"{self.section}.python={folder}/bin/python"
        )


@functools.lru_cache(maxsize=8)
def fields_of(python: str, script: Path, section: str) -> Mapping[str, dict[str, Any]]:
    """Return the flags of that Python's server, by field; read once, in a separate process (5 s)."""
    command = [python, "-E", str(script), "--describe"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise BackendError(f"{section}.python: the {section} of {python} cannot be imported: {last}")
    fields: dict[str, dict[str, Any]] = json.loads(result.stdout.strip().splitlines()[-1])
    return fields


def installed_version(python: str, package: str, *, setting: str) -> str | None:
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
        raise BackendError(f"{setting}: {python} is not a Python that runs: {reason}; give its path") from error
    return result.stdout.strip() or None


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
        raise SettingsError(f"{key}: {key.partition('.')[0]} has no flag that turns it off; leave it out")


def _word(key: str, value: Any, field: Mapping[str, Any]) -> str:
    kind, choices = WORDS.get(field["type"] or ""), field["choices"]
    if kind is not None and (isinstance(value, bool) or not isinstance(value, kind)):
        raise SettingsError(f"{key}: {value!r} is not a number")
    if choices and str(value) not in choices:
        raise SettingsError(f"{key}: {value!r} is not one of {', '.join(choices)}")
    return json.dumps(value) if isinstance(value, list | dict | bool) else str(value)

"""The interface that users depend on, compared with the files in tests/interface: a change of it shows in the diff.

Write the files anew after an intended change: python tests/test_interface.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from slimectl.cli.app import app
from slimectl.data.metrics_catalogue import CATALOGUE
from slimectl.data.records import CHECKS
from slimectl.hooks import HOOKS
from slimectl.settings.aliases import KEYS, SECTIONS, VALUES
from slimectl.settings.reference import entries

FOLDER = Path(__file__).with_name("interface")


def options(command: Any) -> Any:
    """The names of a command's options and arguments, or its subcommands by name."""
    if hasattr(command, "commands"):
        return {name: options(sub) for name, sub in command.commands.items()}
    return [" ".join([*param.opts, *param.secondary_opts]) for param in command.params]


def interface() -> dict[str, Any]:
    return {
        "commands": options(typer.main.get_command(app)),
        "settings": {entry.key: [entry.kind, repr(entry.default)] for entry in entries()},
        "old_settings": {"sections": SECTIONS, "keys": KEYS, "values": {key: list(old) for key, old in VALUES.items()}},
        "hooks": sorted(HOOKS),
        "metrics": sorted({metric.name for metric in CATALOGUE}),
        "sample": list(CHECKS),
    }


def text(part: str, names: Any) -> str:
    """The JSON of a part: a line for every entry, sorted by name, and for every option of a command."""
    if part == "commands":
        return json.dumps(names, indent=1, sort_keys=True) + "\n"
    if isinstance(names, dict):
        lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(names[name])}" for name in sorted(names))
        return f"{{\n{lines}\n}}\n"
    return "[\n" + ",\n".join(f" {json.dumps(name)}" for name in names) + "\n]\n"


def test_the_interface_is_the_one_that_was_written_down():
    actual = json.loads(json.dumps(interface()))
    for part, names in actual.items():
        assert names == json.loads((FOLDER / f"{part}.json").read_text(encoding="utf-8")), part
    assert {file.stem for file in FOLDER.iterdir()} == actual.keys()


if __name__ == "__main__":
    for part, names in interface().items():
        (FOLDER / f"{part}.json").write_text(text(part, names), encoding="utf-8")

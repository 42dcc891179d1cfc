"""The interface that users depend on, compared with tests/interface.json: a change of it shows in the diff.

Write the file anew after an intended change: python tests/test_interface.py
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

FILE = Path(__file__).with_name("interface.json")


def options(command: Any) -> Any:
    """The names of a command's options and arguments, or its subcommands by name."""
    if hasattr(command, "commands"):
        return {name: options(sub) for name, sub in command.commands.items()}
    return [" ".join([*param.opts, *param.secondary_opts]) for param in command.params]


def interface() -> dict[str, Any]:
    return {
        "commands": options(typer.main.get_command(app)),
        "settings": {entry.key: [entry.kind, repr(entry.default)] for entry in entries()},
        "old settings": {"sections": SECTIONS, "keys": KEYS, "values": {key: list(old) for key, old in VALUES.items()}},
        "hooks": sorted(HOOKS),
        "metrics": sorted({metric.name for metric in CATALOGUE}),
        "sample": list(CHECKS),
    }


def test_the_interface_is_the_one_that_was_written_down():
    actual, expected = json.loads(json.dumps(interface())), json.loads(FILE.read_text(encoding="utf-8"))
    for part, names in expected.items():
        assert actual[part] == names, part
    assert actual.keys() == expected.keys()


if __name__ == "__main__":
    FILE.write_text(json.dumps(interface(), indent=1) + "\n", encoding="utf-8")

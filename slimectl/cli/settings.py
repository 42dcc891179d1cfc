"""slimectl settings show | validate | schema | explain"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from slimectl import stdio
from slimectl.cli.options import SETTINGS, CommonOptions, print_settings, shown, toml_value, with_options
from slimectl.errors import SettingsError


@with_options(SETTINGS, "changed")
def show(
    options: CommonOptions,
    changed: Annotated[bool, typer.Option("--changed", help="Only what differs from the defaults")] = False,
) -> None:
    """Print every setting with the layer that set it.

    Example:

        slimectl settings show -s train.lr=1e-5
    """
    resolution = options.resolve()
    if changed:
        for name, value in shown(resolution):
            if resolution.origins[name] != "default":
                print(f"{name} = {toml_value(value)}  # {resolution.origins[name]}")
        return
    print_settings(resolution)


@with_options(SETTINGS)
def validate(options: CommonOptions) -> None:
    """Check settings files; silent if all is well.

    Example:

        slimectl settings validate -s train.lr=1e-5
    """
    options.resolve()


def schema() -> None:
    """Print the JSON schema of a settings file, for editors.

    Example:

        slimectl settings schema > slimectl.schema.json
    """
    from slimectl.settings import Settings

    print(json.dumps(Settings.model_json_schema(by_alias=True), indent=2))


def explain(key: Annotated[str, typer.Argument(help="A key such as train.lr, or a section such as train")]) -> None:
    """Say what a setting means, its type and its default.

    Example:

        slimectl settings explain rollout.temperature
    """
    from slimectl.hooks import HOOKS
    from slimectl.settings import aliases
    from slimectl.settings.loading import nearest_name, sections
    from slimectl.settings.reference import entries

    name = aliases.current_name(key)
    matches = [entry for entry in entries() if entry.key == name or entry.key.startswith(f"{name}.")]
    if not matches:
        near = nearest_name(key, [*(entry.key for entry in entries()), *aliases.old_names(sections())])
        hint = f"did you mean {near}?" if near else "`slimectl settings show` lists all"
        raise SettingsError(f"{key}: unknown setting; {hint}")
    if name != key:
        stdio.say(f"{key} is now {name}" + (", with the opposite meaning" if key in aliases.INVERTED else ""))
    for entry in matches:
        print(f"{entry.key} = {toml_value(entry.default)}  ({entry.kind})\n    {entry.text}")
        if point := HOOKS.get(entry.key):
            print(f"    {point.shape()} (docs/hooks.md)")


settings = (show, validate, schema, explain)

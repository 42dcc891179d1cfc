"""slimectl settings show | validate | schema | explain | from"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slimectl.cli.options import (
    SETTINGS,
    AsJson,
    CommonOptions,
    output_name,
    print_settings,
    shown,
    with_options,
)
from slimectl.errors import SettingsError
from slimectl.system import stdio

if TYPE_CHECKING:
    from slimectl.settings.reference import Entry


@with_options("custom_config", SETTINGS, "changed as_json")
def show(
    options: CommonOptions,
    changed: Annotated[
        bool, typer.Option("--changed", help="Show only settings that differ from the defaults")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print every setting with the layer that set it.

    Example:

        slimectl settings show -s train.lr=1e-5
    """
    resolution = options.resolve()
    if as_json:
        from slimectl.settings.keys import changed as changed_keys

        keys = set(changed_keys(resolution.settings)) if changed else resolution.origins.keys()
        values = {key: {"value": value, "origin": resolution.origins[key]} for key, value in shown(resolution)}
        print(json.dumps({key: value for key, value in values.items() if key in keys}, indent=2, default=str))
        return
    print_settings(resolution, only_changed=changed)


@with_options("custom_config", SETTINGS)
def validate(options: CommonOptions) -> None:
    """Validate settings files, and the model, data, verifiers and functions that they refer to.

    Prints nothing if the settings are valid. Otherwise prints one line per error and exits with 2. Settings without a
    model and data are valid, because `slimectl score` needs neither. In this case, a note lists the keys that a run
    needs.

    Example:

        slimectl settings validate -s train.lr=1e-5
    """
    from slimectl.runtime.preflight import of_values

    resolution, errors = options.examine()
    errors += [result.detail for result in of_values(resolution.settings) if result.fine is False]
    if errors:
        raise SettingsError("\n".join(dict.fromkeys(errors)))
    model, rollout = resolution.settings.model, resolution.settings.rollout
    if not (model.path or model.card or rollout.data or rollout.data_source_path or resolution.settings.eval.data):
        stdio.note("neither model.path nor rollout.data is set. `slimectl run` needs both")


def schema() -> None:
    """Print the JSON schema of a settings file, for editors.

    Example:

        slimectl settings schema > slimectl.schema.json
    """
    from slimectl.settings.reference import json_schema

    print(json.dumps(json_schema(), indent=2))


def explain(
    key: Annotated[
        str,
        typer.Argument(help="Key such as train.lr or lr, section, flag of another stack (--eps-clip), or search word"),
    ],
) -> None:
    """Explain a setting: meaning, type, default, and the equivalent flags of other stacks.

    Give a flag of slime, verl, TRL, OpenRLHF or ROLL to find the equivalent setting.

    Example:

        slimectl settings explain rollout.temperature
        slimectl settings explain --rollout-batch-size
    """
    from slimectl.hooks import HOOKS
    from slimectl.migrate.launch_scripts.lookup import counterparts
    from slimectl.settings import aliases
    from slimectl.settings.keys import toml_value
    from slimectl.settings.reference import entries
    from slimectl.settings.run import CustomSettings

    if key.partition(".")[0] == "custom":
        print(f"custom.NAME = VALUE  (any)\n    {CustomSettings.__doc__}")
        return
    is_flag = key.startswith("-")
    key = key.lstrip("-").replace("-", "_") if is_flag else key
    name, every, stacks = aliases.current_name(key), list(entries()), counterparts(key)
    matches = [entry for entry in every if entry.key == name or entry.key.startswith(f"{name}.")]
    matches = matches or _search(key, every, [flag.key for flag in stacks], is_flag=is_flag)
    if name != key:
        stdio.note(f"{key} is now {name}" + (", with the opposite meaning" if key in aliases.INVERTED else ""))
    for entry in matches:
        print(f"{entry.key} = {toml_value(entry.default)}  ({entry.kind})\n    {entry.text}")
        if point := HOOKS.get(entry.key):
            print(f"    {point.shape()} (docs/hooks.md)")
    for flag in stacks:
        print(flag.line)


def from_(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Launch script (shell), configuration (YAML) or Python file")
    ],
    stack: Annotated[
        str | None,
        typer.Option("--from", metavar="STACK", help="Source: slime, verl, trl, openrlhf or roll. Default: detected"),
    ] = None,
    out: Annotated[
        str,
        typer.Option("--out", "-o", metavar="FILE", help="Settings file to write, - for stdout", callback=output_name),
    ] = "-",
    root: Annotated[
        Path | None,
        typer.Option("--root", metavar="DIR", help="Folder from which `source` may read files. Default: FILE's folder"),
    ] = None,
    line: Annotated[
        int | None, typer.Option("--line", help="Line of the training command, if FILE has several")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing settings file")] = False,
) -> None:
    """Convert a launch file of another stack to settings. Nothing in the file is executed.

    Each setting has a comment with the flag that it came from. Flags without a counterpart are listed with the reason.
    See docs/from-slime.md for the table of flags.

    Example:

        slimectl settings from run-qwen3-4B.sh > run.toml
    """
    from slimectl.data.atomic_replace import write_text
    from slimectl.migrate.launch_scripts.reading import read
    from slimectl.migrate.launch_scripts.writing import settings_file

    if out != "-" and Path(out).exists() and not force:
        raise SettingsError(f"{out}: already exists. Add --force to replace it, or choose another --out")
    reading = read(file, stack=stack, root=root, line=line)
    conversion = reading.conversion
    text = settings_file(conversion, file, reading.notes)
    if out == "-":
        stdio.emit(text.rstrip("\n"))
    else:
        write_text(Path(out), text)
    for omission in conversion.omissions:
        if omission.by_hand:
            stdio.logger.warning(f"{omission.place or file}: {omission.flag}: {omission.reason}")
    for remark in reading.notes:
        stdio.logger.warning(f"{remark.place}: {remark.text}")
    for problem in conversion.problems:
        stdio.logger.warning(f"unresolved: {problem}")
    stdio.note(
        f"{file}: {conversion.dialect.title}: {stdio.quantity(len(conversion.values), 'setting')}, "
        f"{stdio.quantity(len(conversion.defaults), 'flag')} equal to the default here, "
        f"{len(conversion.omissions)} without a counterpart (listed below the settings)"
    )


def _search(word: str, every: Sequence[Entry], of_stacks: Sequence[str], *, is_flag: bool) -> list[Entry]:
    """Return the settings whose last part is `word`, and the settings that it becomes as a flag of another stack.

    If there are none, return the most likely setting and all that mention the word. Raises SettingsError if there is
    none.
    """
    from slimectl.migrate.launch_scripts.lookup import near_names
    from slimectl.settings import aliases
    from slimectl.settings.keys import keys_of_leaf, sections, suggestion

    by_key = {entry.key: entry for entry in every}
    if of_stacks or keys_of_leaf(word, list(by_key)):
        keys = dict.fromkeys([*keys_of_leaf(word.replace("-", "_"), list(by_key)), *of_stacks])
        return [by_key[key] for key in keys if key in by_key]
    near = None if is_flag else suggestion(word, [*by_key, *aliases.old_names(sections())])
    mentions = [entry for entry in every if not is_flag and entry.key.count(".") == 1 and _mentions(entry, word)]
    if "." in word or not (mentions or near):
        names = [near] if near else near_names(word)
        hint = f"Did you mean {' or '.join(names)}?" if names else "`slimectl settings show` lists all"
        raise SettingsError(f"{word}: unknown setting. {hint}")
    return ([by_key[near]] if near in by_key else []) + [entry for entry in mentions if entry.key != near]


def _mentions(entry: Entry, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}", f"{entry.key.replace('_', ' ')} {entry.text}", re.IGNORECASE) is not None


settings = (show, validate, schema, explain, from_)

"""slimectl doctor"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from slimectl.cli.options import CLUSTER, SETTINGS, AsJson, CommonOptions, with_options
from slimectl.cli.terminal import has_colours, paint, width
from slimectl.errors import SettingsError, SlimectlError
from slimectl.system import stdio
from slimectl.system.stdio import quantity

if TYPE_CHECKING:
    from slimectl.runtime.check_result import CheckResult
    from slimectl.settings import Settings

COLOURS = {"FAIL": "1;31", "warn": "33", "ok": "32"}
NAME_WIDTH = 16
NARROWEST = 60
"""Width of the output in narrower terminals."""


@with_options("recipe engine steps model backend", CLUSTER, "engine_url", SETTINGS, "as_json")
def doctor(
    options: CommonOptions,
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="Recipe name or settings file")] = None,
    engine: Annotated[
        bool, typer.Option("--engine", help="Compare engine and trainer in a loop with learning rate 0")
    ] = False,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of the --engine loop")] = 3,
    as_json: AsJson = False,
) -> None:
    """Check this machine's setup. With --engine, compare engine and trainer log-probabilities.

    Checks GPUs, driver, kernels, NCCL, the engine's packages, limits, network and disk, for the settings of a recipe or
    of ./slimectl.toml. Every failure and warning has a remedy. The exit code is 1 if a check fails.

    Example:

        slimectl doctor quickstart
    """
    results: list[CheckResult] = []
    last_group = ""
    for group, result in _self_test(options, recipe, steps) if engine else _machine(options, recipe):
        results.append(result)
        if as_json:
            stdio.emit(json.dumps(result.to_json() | {"group": group}))
            continue
        if group != last_group:
            stdio.emit(f"\n{group}" if last_group else group)
            last_group = group
        stdio.emit(_shown(result) if group else str(result))
    if failed := [result.what for result in results if result.fine is False]:
        raise SlimectlError(f"{len(failed)} of {len(results)} checks failed: {', '.join(dict.fromkeys(failed))}")
    warned = sum(result.warns for result in results)
    if not as_json:
        stdio.note(f"{quantity(len(results), 'check')}, {quantity(warned, 'warning') if warned else 'no warning'}")


def _machine(options: CommonOptions, recipe: str | None) -> Iterator[tuple[str, CheckResult]]:
    """Yield the checks of this machine, for default settings if the given ones have an error."""
    from slimectl.runtime.check_result import failure
    from slimectl.runtime.doctor.checks import examine
    from slimectl.runtime.doctor.scope import Scope
    from slimectl.settings import Settings

    try:
        settings = _settings(options, recipe)
    except SlimectlError as error:
        yield "Settings", failure("settings", str(error), "Fix them. The checks below are for default settings")
        settings = Settings()
    yield from examine(Scope(settings))


def _self_test(options: CommonOptions, recipe: str | None, steps: int) -> Iterator[tuple[str, CheckResult]]:
    """Yield the checks of a loop with learning rate 0."""
    from slimectl.runtime.self_test import self_test

    settings = _settings(options, recipe)
    if settings.model.path is None:
        raise SettingsError("model.path: no model given. Add --model DIR, a Hugging Face checkpoint directory")
    tested = {
        "score": settings.score.model_copy(update={"rm_type": "random", "custom_rm_path": None, "rm": []}),
        "run": settings.run.model_copy(update={"rollout_batch_size": 4, "num_rollout": steps, "num_epoch": None}),
    }
    if not settings.rollout.data:
        source = {"data": ["slimectl.runtime.self_test:questions"]}
        tested["rollout"] = settings.rollout.model_copy(update=source)
    for result in self_test(settings.model_copy(update=tested), steps=steps):
        yield "", result


def _settings(options: CommonOptions, recipe: str | None) -> Settings:
    from slimectl import recipes

    selected = recipes.find(recipe, instead=bool(options.config), needed=False)
    return options.resolve(recipe=selected.layer).settings


def _shown(result: CheckResult) -> str:
    """Return the lines of a result: aligned and coloured in a terminal, on one line each in a pipe."""
    from slimectl.system.redaction import redact_text

    columns = max(NARROWEST, width()) if stdio.is_terminal() else 10_000
    indent = " " * (NAME_WIDTH + 7)
    parts = [(f"{result.status:<5} {result.what:<{NAME_WIDTH}} ", result.detail)]
    parts += [(" " * (NAME_WIDTH + 4) + "-> ", result.remedy)] if result.remedy else []
    lines = [
        line
        for head, text in parts
        for line in textwrap.wrap(
            redact_text(text), columns, initial_indent=head, subsequent_indent=indent, break_long_words=False,
            break_on_hyphens=False,
        )
    ]  # fmt: skip
    if has_colours():
        lines[0] = paint(result.status, COLOURS.get(result.status, "")) + lines[0][len(result.status) :]
    return "\n".join(lines)

"""The decorator that gives commands the options they share."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

from slimectl.cli.options import CLUSTER, CommonOptions, with_options


def test_a_command_gets_the_options_that_it_names_in_their_order():
    calls = []

    @with_options("model rounds", CLUSTER, "dry_run")
    def command(options: CommonOptions, rounds: Annotated[int, typer.Option("--rounds")] = 3) -> None:
        """Help."""
        calls.append((options.flags(), options.dry_run, rounds))

    assert list(inspect.signature(command).parameters) == ["model", "rounds", "executor", "ray_address", "dry_run"]
    assert (command.__name__, command.__doc__) == ("command", "Help.")
    app = typer.Typer()
    app.command()(command)
    app(["--ray-address", "head:6379", "--rounds", "5", "--dry-run"], standalone_mode=False)
    [(flags, dry_run, rounds)] = calls
    given = {name: value for name, value in flags.items() if value is not None}
    assert given == {"cluster.executor": "ray", "cluster.ray_address": "head:6379"}
    assert (dry_run, rounds) == (True, 5)


def test_the_first_of_two_options_of_one_name_counts():
    calls = []

    @with_options("engine engine_url")
    def command(options: CommonOptions, engine: Annotated[bool, typer.Option("--engine")] = False) -> None:
        calls.append((options.engine, options.engine_url, engine))

    app = typer.Typer()
    app.command()(command)
    app(["--engine", "--engine-url", "a"], standalone_mode=False)
    assert calls == [(None, ["a"], True)]

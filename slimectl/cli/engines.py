"""slimectl engines list | add | remove"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimectl.cli.options import AsJson
from slimectl.errors import BackendError, SettingsError
from slimectl.system import stdio

if TYPE_CHECKING:
    from slimectl.data.engine_requests import EngineReply, EngineRequest, EngineState

LOOK_S = 0.2
SILENCE_S = 5.0
"""Seconds without a reply until a message explains the wait."""

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run that is active")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Return at once instead of waiting for the change")]


class ListsByDefault(typer.core.TyperGroup):
    """A command group in which `engines RUN` means `engines list RUN`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        has_command = args[0] in self.commands or args[0].startswith("-")
        return super().resolve_command(ctx, args if has_command else ["list", *args])


def list_(run: Run, as_json: AsJson = False) -> None:
    """List the engines of a running run.

    Example:

        slimectl engines runs/first
    """
    from slimectl.cli.models import print_table
    from slimectl.data.engine_requests import EngineRequest

    state, _ = _answered(run, EngineRequest("list"))
    if as_json:
        for row in state.engines:
            print(json.dumps(asdict(row)))
        return
    rows = [(str(r.engine), r.state, r.weight_version or "-", str(r.requests), r.machine, r.url) for r in state.engines]
    print_table([("engine", "state", "weights", "requests", "machine", "address"), *rows])


def add(
    run: Run,
    count: Annotated[int, typer.Option("--count", help="Engines to start", min=1)] = 1,
    url: Annotated[
        list[str] | None,
        typer.Option("--url", metavar="URL", help="Running server to add to a run with engine.url (repeatable)"),
    ] = None,
    no_wait: NoWait = False,
) -> None:
    """Add engines to a running run. Each gets the current weights before its first request.

    Example:

        slimectl engines add runs/first --count 2
    """
    from slimectl.data.engine_requests import EngineRequest

    _change(run, EngineRequest("add", count=count, urls=tuple(url or ())), no_wait=no_wait)


def remove(
    run: Run,
    engine: Annotated[
        list[str] | None, typer.Argument(metavar="ENGINE", help="Engines by number or address. Default: the newest")
    ] = None,
    count: Annotated[int, typer.Option("--count", help="Number of newest engines to remove", min=1)] = 1,
    drain: Annotated[
        float, typer.Option("--drain", help="Seconds that requests get to finish before they move", min=0)
    ] = 120.0,
    no_wait: NoWait = False,
) -> None:
    """Remove engines from a running run. Their unfinished requests move to other engines.

    Example:

        slimectl engines remove runs/first 2
    """
    from slimectl.data.engine_requests import EngineRequest

    _change(run, EngineRequest("remove", count, tuple(engine or ()), drain_s=drain), no_wait=no_wait)


def _change(run: Path, request: EngineRequest, *, no_wait: bool) -> None:
    """Ask for a change and print what was done. Raises BackendError with what failed."""
    from slimectl.data.engine_requests import ask

    if no_wait:
        _check_active(run)
        ask(run, request)
        stdio.note(f"requested. See: slimectl engines {shlex.quote(str(run))}")
        return
    _, reply = _answered(run, request)
    if reply.failed:
        raise BackendError("\n".join(reply.failed))


def _answered(run: Path, request: EngineRequest) -> tuple[EngineState, EngineReply]:
    """Ask a run, print the lines of its reply as they come, and return its state and reply when all is done.

    Raises SettingsError if no run is active there, BackendError if it ends meanwhile.
    """
    from slimectl.data.engine_requests import ask, withdraw

    _check_active(run)
    name = ask(run, request)
    printed = 0
    try:
        for state in _states(run, name):
            reply = state.replies[name]
            for line in reply.done[printed:]:
                print(line, flush=True)
            printed = len(reply.done)
            if not reply.open:
                return state, reply
    finally:
        withdraw(run, name)
    raise BackendError(f"{run}: the run ended before that was done. Its log: {run / 'log.txt'}")


def _states(run: Path, name: str) -> Iterator[EngineState]:
    """Yield the states of a run that have a reply to the request `name`, while the run is active."""
    from slimectl.data.engine_requests import read_state

    started, has_noted = time.monotonic(), False
    while _is_active(run):
        state = read_state(run)
        if name in state.replies:
            yield state
        elif not has_noted and time.monotonic() - started > SILENCE_S:
            stdio.note("waiting until the run reads the request. It does so once its models are loaded")
            has_noted = True
        time.sleep(LOOK_S)


def _is_active(run: Path) -> bool:
    from slimectl.data.locks import holder_of
    from slimectl.data.ownership import LOCK

    holder = holder_of(run / LOCK)
    return holder is not None and holder.is_alive()


def _check_active(run: Path) -> None:
    """Raise SettingsError unless a run with engines that can change is active in a folder."""
    from slimectl.data.ownership import is_run
    from slimectl.data.run_settings import RUN_TOML
    from slimectl.settings.layers import from_file
    from slimectl.settings.loading import resolve

    if not is_run(run):
        raise SettingsError(f"{run}: is not the folder of a run. `slimectl runs` lists yours")
    if not _is_active(run):
        raise SettingsError(
            f"{run}: the run is not active. Continue it with: slimectl run --resume {shlex.quote(str(run))}"
        )
    if not resolve([from_file(run / RUN_TOML)]).settings.uses_servers:
        raise SettingsError(
            f"{run}: its only engine is in the process of the run, where none can join or leave. Stop it, and continue "
            f"with servers: slimectl run --resume {shlex.quote(str(run))} --engines 2"
        )


engines = (list_, add, remove)

"""slimectl view"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from slimectl.errors import SettingsError, Terminated
from slimectl.system import stdio

DEFAULT = Path("runs")


def view(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN|SAMPLES]…", help="Runs, samples files, or a folder of runs. Default: runs"),
    ] = None,
    port: Annotated[int, typer.Option("--port", help="Port on 127.0.0.1, 0 for any free one", min=0, max=65535)] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address without opening it")] = False,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="Model whose tokenizer decodes the tokens")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write one self-contained page instead of serving")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the --html file")] = False,
) -> None:
    """View runs and samples in a browser: curves, rounds, groups, tokens, comparisons.

    The page is served only on this machine. It follows running runs, and changes nothing. Press Ctrl-C to stop.

    Example:

        slimectl view runs/quickstart
    """
    from slimectl.cli.viewer.api import ViewApi
    from slimectl.cli.viewer.library import Library
    from slimectl.runtime import builders

    if not paths and not DEFAULT.is_dir():
        raise SettingsError(f"{DEFAULT}: no such folder. Give a run's folder or a samples file: slimectl view RUN")
    if model is not None and not (model / "tokenizer_config.json").is_file():
        raise SettingsError(f"--model {model}: has no tokenizer_config.json. Give a model's folder")
    api = ViewApi(Library(paths or [DEFAULT], model=model), builders.token_decoder)
    if html is not None:
        from slimectl.cli.viewer.export import write_page

        if html.exists() and not force:
            raise SettingsError(f"{html}: already exists. Add --force to replace it")
        stdio.note(write_page(api, html))
        return
    _serve(api, port, open_browser=not no_browser)


def _serve(api: object, port: int, *, open_browser: bool) -> None:
    import asyncio
    import webbrowser

    from slimectl.cli.viewer.server import serve
    from slimectl.system.listening import bound

    token = secrets.token_urlsafe(16)
    listening = bound("127.0.0.1", port)
    address = f"http://127.0.0.1:{listening.getsockname()[1]}/{token}/"

    def ready() -> None:
        stdio.emit(address)
        stdio.note("press Ctrl-C to stop")
        if open_browser and (sys.platform == "darwin" or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ):
            webbrowser.open(address)  # elsewhere it would start a text browser in this terminal

    number = asyncio.run(serve(api, token, listening, ready=ready))  # type: ignore[arg-type]
    if number == signal.SIGHUP:
        raise Terminated(signal.SIGHUP)

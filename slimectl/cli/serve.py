"""slimectl serve"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from typing import Annotated

import typer

from slimectl import stdio
from slimectl.cli.options import Assign, Config, DryRun, Model, print_settings, resolved
from slimectl.errors import EXIT_INTERRUPTED

PARENT = "SLIMECTL_PARENT"
"""Environment variable with the process id that --with-parent watches."""


def serve(
    model: Model = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 is all of them")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 is any free one", min=0, max=65535)] = 30000,
    wait_for_weights: Annotated[
        bool, typer.Option("--wait-for-weights", help="Read no weights: they will be pushed")
    ] = False,
    incremental: Annotated[
        bool, typer.Option("--incremental-streaming-output", help="Stream from /generate only what is new")
    ] = False,
    stream_interval: Annotated[
        int, typer.Option("--stream-interval", help="Tokens between two chunks of a stream", min=1)
    ] = 1,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host", metavar="NAME", help="Another name that clients or a proxy ask it by (repeatable)"
        ),
    ] = None,
    pause_timeout: Annotated[
        float, typer.Option("--pause-timeout", help="Seconds a request waits on a paused engine before 503", min=0.1)
    ] = 60.0,
    with_parent: Annotated[
        bool, typer.Option("--with-parent", help="End when the process that started this ends")
    ] = False,
    config: Config = None,
    assign: Assign = None,
    dry_run: DryRun = False,
) -> None:
    """Serve a model over HTTP: SGLang's API for rollouts and weights, OpenAI's for agents and judges.

    Example:

        slimectl serve --model models/smollm2 --port 30000 -s engine.dtype=bfloat16
    """
    if with_parent:
        leave_with_parent()
    resolution = resolved(config, assign, {"model.path": model})
    if dry_run:
        print_settings(resolution)
        return
    from slimectl import builders
    from slimectl.builders import serving

    folder = builders.model_folder(resolution.settings.model.path, verify=resolution.settings.model.verify)
    key, drawn = serving.admin_key(resolution.settings)
    with ExitStack() as ending:
        at = ending.enter_context(serving.listening(host, port))
        bound_port = at.getsockname()[1]
        lines = [f"http://{f'[{host}]' if ':' in host else host}:{bound_port}: "]
        lines[0] += "waiting for weights" if wait_for_weights else f"serving {folder}"
        if drawn:
            lines.append(ending.enter_context(serving.left_key(key, bound_port)))
        if exposed := serving.exposure(resolution.settings, host):
            lines.append(exposed)
        number, clean = serving.serve(
            resolution.settings,
            folder,
            at,
            host=host,
            admin_key=key,
            allowed_hosts=allow_host or (),
            load=not wait_for_weights,
            ready=lambda: stdio.say("\n".join(lines)),
            interval=stream_interval,
            incremental=incremental,
            pause_timeout_s=pause_timeout,
        )
    interrupted = number == signal.SIGINT
    if not clean:
        # A step or a broadcast in flight would break the interpreter's clean-up.
        sys.stderr.flush()
        os._exit(EXIT_INTERRUPTED if interrupted else 0)
    if interrupted:
        raise KeyboardInterrupt


def leave_with_parent() -> None:
    """End this process within half a second of its parent's end, however the parent ended.

    Polls instead of PR_SET_PDEATHSIG, which fires as soon as the parent's thread ends.
    """
    parent = int(os.environ.get(PARENT) or os.getppid())

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()

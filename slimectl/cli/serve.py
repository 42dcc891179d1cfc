"""slimectl serve"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimectl.cli.options import SETTINGS, CommonOptions, print_preflight, with_options
from slimectl.errors import EXIT_INTERRUPTED, StorageError, Terminated
from slimectl.plugins.garbage import frozen_objects
from slimectl.system import stdio
from slimectl.system.liveness import expose, own_stacks

if TYPE_CHECKING:
    from slimectl.data.manifest import Manifest
    from slimectl.settings import Settings
    from slimectl.types import Sample

PARENT = "SLIMECTL_PARENT"
"""Environment variable with the id of the process that --with-parent watches."""


@dataclass(kw_only=True, eq=False, repr=False)
class ServeOptions:
    """Options of `slimectl serve`: where it listens, and how it responds."""

    host: Annotated[str, typer.Option("--host", help="Address to listen on, 0.0.0.0 for all")] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", help="Port to listen on, 0 for any free one", min=0, max=65535)] = 30000
    wait_for_weights: Annotated[
        bool, typer.Option("--wait-for-weights", help="Start without weights and wait for a push")
    ] = False
    incremental: Annotated[
        bool, typer.Option("--incremental-streaming-output", help="Stream only new text from /generate")
    ] = False
    stream_interval: Annotated[int, typer.Option("--stream-interval", help="Tokens per streamed chunk", min=1)] = 1
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="Additional host name to accept (repeatable)"),
    ] = None
    pause_timeout: Annotated[
        float,
        typer.Option(
            "--pause-timeout", help="Seconds that a request waits for a paused engine before it fails with 503", min=0.1
        ),
    ] = 60.0
    record: Annotated[
        str | None,
        typer.Option("--record", metavar="DIR", help="Record sessions as samples in DIR/samples.jsonl, - for stdout"),
    ] = None
    with_parent: Annotated[bool, typer.Option("--with-parent", help="Exit when the parent process ends")] = False


@with_options("model options", SETTINGS, "dry_run")
def serve(options: ServeOptions, common: CommonOptions) -> None:
    """Serve a model over HTTP with the SGLang and OpenAI APIs.

    Example:

        slimectl serve --model models/smollm2 --port 30000 -s engine.dtype=bfloat16
    """
    if options.with_parent:
        leave_with_parent()
        if PARENT in os.environ:
            expose("server", describe=own_stacks)
    resolution = common.resolve()
    if common.dry_run:
        print_preflight(resolution, "model", "engine")
        return
    number, clean = _serve_until_signal(resolution.settings, options)
    # SIGTERM is the usual end of a server.
    ends = {signal.SIGINT: KeyboardInterrupt(), signal.SIGHUP: Terminated(signal.SIGHUP)}
    end = ends.get(signal.Signals(number))
    if not clean:
        # A step or a broadcast in flight would break the interpreter's clean-up.
        sys.stderr.flush()
        os._exit(0 if end is None else getattr(end, "exit_code", EXIT_INTERRUPTED))
    if end is not None:
        raise end


def _import_models() -> None:
    """Import what every model needs, and exclude it from garbage collection.

    Collections would otherwise traverse the objects of a thousand modules again and again: 0.8 s of 3.8 s of CPU.
    """
    with frozen_objects():
        import transformers.models.auto.modeling_auto  # noqa: F401


def _serve_until_signal(settings: Settings, options: ServeOptions) -> tuple[int, bool]:
    """Serve until a signal arrives. Return its number, and whether all threads have ended."""
    from slimectl.runtime import builders
    from slimectl.runtime.builders import serving
    from slimectl.system.listening import bound
    from slimectl.system.shared_memory import remove_orphans

    remove_orphans()
    folder = builders.model_folder(settings.model.path, verify=settings.model.verify)
    _import_models()
    key, drawn = serving.admin_key(settings.engine)
    with ExitStack() as ending:
        at = ending.enter_context(bound(options.host, options.port))
        bound_port = at.getsockname()[1]
        host = f"[{options.host}]" if ":" in options.host else options.host
        activity = "waiting for weights" if options.wait_for_weights else f"serving {folder}"
        lines = [f"http://{host}:{bound_port}: {activity}"]
        recording = None
        if options.record is not None:
            recording = ending.enter_context(_sample_writer(options.record, settings, folder))
        if drawn:
            lines.append(ending.enter_context(serving.left_key(key, bound_port)))
        if exposed := serving.exposure(settings.engine, options.host):
            lines.append(exposed)
        serves = serving.ServingOptions(
            host=options.host,
            admin_key=key,
            allowed_hosts=options.allow_host or (),
            load=not options.wait_for_weights,
            stream_interval=options.stream_interval,
            incremental=options.incremental,
            pause_timeout_s=options.pause_timeout,
            record=recording,
        )
        return serving.serve(settings, folder, at, serves, ready=lambda: stdio.note("\n".join(lines)))


@contextmanager
def _sample_writer(destination: str, settings: Settings, model: Path) -> Iterator[Callable[[Sample], None]]:
    """Yield a function that writes each sample immediately, to stdout or to the end of samples.jsonl in a folder.

    A manifest next to the file names the model, whose tokenizer decodes the samples.
    """
    from slimectl.data.jsonl import encode_sample

    counts: Counter[str] = Counter()
    with ExitStack() as ending:
        file: Any = None
        if destination != "-":
            path = Path(destination) / "samples.jsonl"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = ending.enter_context(path.open("ab", buffering=0))
                manifest = _manifest(settings, model)
                manifest.write(path, counts={})
            except OSError as error:
                raise StorageError(
                    f"--record {path}: cannot be written: {error.strerror}. Give another folder"
                ) from error

        def write(sample: Sample) -> None:
            line = encode_sample(sample, location=f"session {sample.metadata.get('session')}")
            counts[sample.status.value] += 1
            if file is None:
                stdio.emit(line.decode().rstrip("\n"))
            else:
                file.write(line)

        yield write
        if file is not None:
            manifest.write(path, counts=counts)


def _manifest(settings: Settings, model: Path) -> Manifest:
    from slimectl.data.manifest import Manifest

    values = settings.model_dump(by_alias=True)
    values["model"]["path"] = str(model.resolve())
    return Manifest("serve", values, {})


def leave_with_parent() -> None:
    """End this process within half a second after its parent ends, for whatever reason.

    It polls, because PR_SET_PDEATHSIG fires as soon as the parent's thread ends.
    """
    parent = int(os.environ.get(PARENT) or os.getppid())

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()

"""Settings to a server around the embedded engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from socket import socket

from slimectl.settings import Settings
from slimectl.wiring.engines import engine
from slimectl.wiring.models import tokenizer, version_of


def listening(host: str, port: int) -> socket:
    """The socket of a server, before the model is read. Raises BackendError if the port is taken."""
    from slimectl.engines.serve.server import bound

    return bound(host, port)


def serve(
    settings: Settings,
    folder: Path,
    at: socket,
    *,
    load: bool,
    ready: Callable[[], None],
    interval: int = 1,
    incremental: bool = False,
) -> tuple[int, bool]:
    """Serve a model directory until a signal comes: (which, whether no thread is left behind)."""
    from slimectl.checkpoints.hf import HFCheckpoint
    from slimectl.engines.serve.server import serve as serving
    from slimectl.engines.serve.service import Served, Streaming
    from slimectl.weights.complete import read_config

    text = tokenizer(folder)
    served = Served(
        folder=folder.resolve(),
        config=read_config(folder),
        tokenizer=text,
        dtype=settings.engine.dtype,
        max_running=settings.engine.max_running_requests,
        read=HFCheckpoint().read,
        version=version_of(folder),
    )
    made = engine(settings, folder, text, load=False)
    streaming = Streaming(interval=interval, incremental=incremental)
    return asyncio.run(serving(made, served, at, load=load, streaming=streaming, ready=ready))

"""Builds and runs an HTTP server around the embedded engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from socket import socket
from typing import Any

from slimectl.architectures.config import read_config
from slimectl.runtime.builders.engines import engine as build_engine
from slimectl.runtime.builders.models import tokenizer, version_of
from slimectl.settings import Settings
from slimectl.settings.engine import EngineSettings
from slimectl.settings.secret import reveal
from slimectl.system.redaction import remember
from slimectl.types import Sample, SamplingParams


def admin_key(engine: EngineSettings) -> tuple[str, bool]:
    """Return the key for requests that change the server's state, and whether it was generated here."""
    from slimectl.engines.api_keys import new_key

    key = reveal(engine.admin_api_key, setting="engine.admin_api_key")
    return (key, False) if key else (new_key(), True)


@contextlib.contextmanager
def left_key(key: str, port: int) -> Iterator[str]:
    """Store a key where this user's clients find it until the block ends. Yields a message with its path."""
    from slimectl.engines.api_keys import leave_key

    path = None
    try:
        path = leave_key(key, port)
        notice = f"the admin key (weights, pauses, aborts) is in {path}"
    except (OSError, RuntimeError) as error:
        notice = f"the admin key cannot be stored ({error}). To change weights, set SLIMECTL_ENGINE_ADMIN_API_KEY."
    try:
        yield notice
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                if path.read_text(encoding="ascii").strip() == key:  # a later server on the same port has another key
                    path.unlink()


def exposure(engine: EngineSettings, host: str) -> str | None:
    """Return a warning about what a server exposes to other machines, or None on the loopback interface."""
    from slimectl.engines.server.access import own_names

    _, loopback = own_names(host)
    if loopback:
        return None
    if engine.api_key is not None:
        return f"{host}: other machines can reach this server, unencrypted, with the API key or the admin key."
    return (
        f"{host}: other machines can reach this server and sample from it without a key (/generate, /v1). Weights, "
        f"pauses and aborts need the admin key. Set engine.api_key to protect everything else."
    )


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """Whom a server answers, and how."""

    host: str
    admin_key: str
    allowed_hosts: Sequence[str]
    load: bool
    """Whether to load the weights of the folder instead of waiting for a push."""

    stream_interval: int
    incremental: bool
    pause_timeout_s: float
    record: Callable[[Sample], None] | None
    """Called with the samples of each session of the OpenAI and Anthropic APIs. None: sessions are not recorded."""


def serve(
    settings: Settings, folder: Path, at: socket, options: ServingOptions, *, ready: Callable[[], None]
) -> tuple[int, bool]:
    """Serve a model directory until a signal. Returns its number, and whether all threads have ended."""
    from slimectl.agents.recorder import SessionRecorder, UnrecordedApis
    from slimectl.checkpoints.base_model import base_model
    from slimectl.checkpoints.torch_dist.mapping import ModelCheckpoint
    from slimectl.engines.server.access import Guard, own_names
    from slimectl.engines.server.app import serve as serving
    from slimectl.engines.server.middleware import middlewares
    from slimectl.engines.server.state import ServerConfig, Streaming
    from slimectl.engines.weight_sync.delta_format import DeltaFile
    from slimectl.stages.generation import sampling_params

    names, loopback_only = own_names(options.host, options.allowed_hosts)
    api_key = reveal(settings.engine.api_key, setting="engine.api_key")
    guard = Guard(remember(options.admin_key), api_key=api_key, names=names, loopback_only=loopback_only)
    model_tokenizer = tokenizer(folder)
    served_model = ServerConfig(
        folder=folder.resolve(),
        config=read_config(folder),
        tokenizer=model_tokenizer,
        dtype=settings.engine.dtype,
        max_running=settings.engine.max_running_requests,
        read=ModelCheckpoint().read,
        base_model=base_model,
        version=version_of(folder),
        read_delta=DeltaFile,
        middlewares=middlewares(settings.engine.middleware_paths),
        guard=guard,
        streaming=Streaming(options.stream_interval, options.incremental),
        pause_timeout_s=options.pause_timeout_s,
    )
    embedded = build_engine(settings, folder, model_tokenizer, load=False)
    context, interval = embedded.max_context, options.stream_interval
    extension: Any
    if options.record is None:
        extension = UnrecordedApis(model_tokenizer, SamplingParams(max_tokens=context), context, interval)
    else:  # sampling parameters that a request of an agent does not set come from [rollout]
        params = replace(sampling_params(settings.rollout), max_tokens=context)
        extension = SessionRecorder(model_tokenizer, params, context, interval, write=options.record)
    return asyncio.run(serving(embedded, served_model, at, load=options.load, ready=ready, extension=extension))
